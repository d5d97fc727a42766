"""The table of an RL run's rollouts: what it has of each token, how much it may have, and its bits after a kill."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from made_rollouts import trained_rollouts
from rl_here import RunHere, rl_job_here, running
from tiny_models import rl_job, tiny_params, tiny_tokenizer

from rlhf_core.data.schema import write_rows
from rlhf_core.process import Stop
from rlhf_core.stage.rollouts import publish_rollouts, read_rollouts, step_file, step_files
from rlhf_core.trainers.rl import saved_rollouts
from rlhf_core.trainers.rl.loop import saves_rollouts, train
from rlhf_core.trainers.rl.loop import trained_rollouts as trained_of
from rlhf_core.trainers.rl.saved_rollouts import SavedRollouts, kept_rows, rollout_table
from rlhf_core.trainers.rl.state import Progress
from rlhf_core.types import Prompt, Rollout, Span

TOKENIZER = tiny_tokenizer()
PROMPT = Prompt("p7", "made", [], TOKENIZER("<|user|>Please sort 4172.<|end|><|assistant|>")["input_ids"], "1247")


def ids(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def answered(*texts: str, group: int = 0) -> list[Rollout]:
    return [Rollout(PROMPT, [Span(ids(text), [-0.5] * len(ids(text)), 4)], True, group) for text in texts]


def test_a_row_has_what_was_sampled_and_how_it_was_rewarded():
    rl = tiny_params().rl
    table = rollout_table(5, trained_rollouts(answered("1247.", "no"), rl), [1], rl, TOKENIZER)
    row = table.to_pylist()[0]
    assert table.num_rows == 1 and (row["step"], row["rollouts"], row["group"], row["label"]) == (5, 2, 0, "1247")
    assert row["prompt"] == "<|user|>Please sort 4172.<|end|><|assistant|>" and row["response"] == "no"
    assert row["token_ids"] == ids("no") and "".join(row["tokens"]) == "no"
    count = len(ids("no"))
    assert (row["score"], row["score_reward_model"], row["reward"]) == (count, count, count)
    assert row["engine_logprob"] == [-0.5] * count and row["version"] == [4] * count and row["trained"] == [True] * count
    assert row["old_logprob"] != row["engine_logprob"] and None not in row["old_logprob"] + row["ref_logprob"] + row["advantage"]


def test_tokens_that_were_put_in_have_no_probability_and_no_advantage():
    rl = tiny_params().rl
    tool = Span(ids(" 9 "), [0.0] * len(ids(" 9 ")), None, trained=False)
    spans = [Span(ids("sort"), [-0.5] * len(ids("sort")), 2), tool, Span(ids("so"), [-0.25] * len(ids("so")), 3)]
    row = rollout_table(4, trained_rollouts([Rollout(PROMPT, spans, True, 0)], rl), [0], rl, TOKENIZER).to_pylist()[0]
    first, put_in, last = (len(span.ids) for span in spans)
    assert row["version"] == [2] * first + [None] * put_in + [3] * last
    assert row["trained"] == [True] * first + [False] * put_in + [True] * last
    for name in ("engine_logprob", "old_logprob", "ref_logprob", "advantage"):
        assert [value is None for value in row[name]] == [not trained for trained in row["trained"]], name


@pytest.mark.parametrize(("source", "known"), [("recompute", True), ("from_engine", False)])
def test_the_engines_log_probabilities_are_not_shown_as_the_trainers(source, known):
    rl = tiny_params().rl
    row = rollout_table(5, trained_rollouts(answered("no"), rl, source=source), [0], rl, TOKENIZER).to_pylist()[0]
    assert [value is not None for value in row["old_logprob"]] == [known] * len(row["tokens"])


def test_samples_that_the_trainer_did_not_recompute_have_no_old_log_probability():
    rl = tiny_params(**{"rl.rollout.recomputed_fraction": 0.5, "rl.minibatch_size": 64}).rl
    trained = trained_rollouts(answered("1247.", "no"), rl)
    old = torch.cat([trained.old_logprobs[:1], trained.batch.rollout_logprobs[1:]])
    rows = rollout_table(5, replace(trained, old_logprobs=old), [0, 1], rl, TOKENIZER).to_pylist()
    assert None not in rows[0]["old_logprob"] and set(rows[1]["old_logprob"]) == {None}


def test_whole_groups_are_kept_evenly_spaced():
    groups = [group for group in range(1000) for _ in range(4)]
    rows = kept_rows(groups, [10] * len(groups))
    kept = [groups[row] for row in rows[::4]]
    assert len(rows) == saved_rollouts.STEP_ROLLOUTS and all(groups[row] == groups[rows[i // 4 * 4]] for i, row in enumerate(rows))
    assert {b - a for a, b in itertools.pairwise(kept)} == {7, 8} and kept[0] == 0  # 1000 / 128


def test_long_responses_leave_fewer_groups():
    half = saved_rollouts.STEP_TOKENS // 2
    assert kept_rows([0, 0, 1, 1, 2, 2], [half // 2] * 6) == [0, 1, 2, 3]
    assert kept_rows([0, 0, 0], [half, half, 1]) == [0, 1]
    assert kept_rows([0], [2 * half + 1]) == []


def test_a_run_has_at_most_its_bytes(tmp_path, model_folders, monkeypatch):
    job = rl_job(*model_folders).model_copy(update={"work": str(tmp_path)})
    trained = trained_rollouts([r for group in range(32) for r in answered("1247." * 5, "no", group=group)], job.rl)

    def written() -> list[int]:
        """Groups of the rollouts that are saved."""
        SavedRollouts(job, first_step=1).write(1, trained)
        return read_rollouts(tmp_path)["group"].to_pylist()

    assert len(written()) == 64
    size = step_file(tmp_path, 1).stat().st_size
    monkeypatch.setattr(saved_rollouts, "RUN_BYTES", job.rl.saved_steps * (size - 1))
    assert written() == [g for g in range(0, 32, 2) for _ in (0, 1)]
    assert step_file(tmp_path, 1).stat().st_size < size
    monkeypatch.setattr(saved_rollouts, "RUN_BYTES", 0)
    assert written() == []


def test_the_first_the_last_and_every_tenth_of_the_steps_are_saved():
    rl = tiny_params(**{"rl.steps": 25}).rl
    steps = [step for step in range(1, 26) if saves_rollouts(replace(Progress.start(rl), step=step), rl)]
    assert steps == [1, *range(2, 25, 2), 25] and len(steps) <= rl.saved_steps
    never = tiny_params(**{"rl.steps": 25, "rl.save_rollouts_every": None}).rl
    assert not any(saves_rollouts(replace(Progress.start(never), step=step), never) for step in range(1, 26))


def test_without_saved_rollouts_the_output_is_an_empty_table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    publish_rollouts(tmp_path)
    assert pq.read_table("data/rollouts.parquet").num_rows == 0


def saving(run: RunHere, steps: int) -> None:
    saved = SavedRollouts(run.job, first_step=run.progress.step + 1)
    for _ in range(steps):
        result = run.step()
        saved.write(run.progress.step, trained_of(run.run, result))


UPDATED = {"rl.kl.placement": "loss", "rl.kl.estimator": "k3"}  # old log-probabilities from the update
AHEAD = {"rl.rollout.max_lag": 2, "rl.rollout.stop": ["o", "s", "i"]}


@pytest.mark.parametrize("changes", [UPDATED, AHEAD], ids=["updated", "ahead"])
def test_a_run_that_is_killed_and_resumed_has_the_same_table(model_folders, tmp_path, monkeypatch, changes):
    tables = []
    for name, parts in (("whole", [(4, 0)]), ("killed", [(2, 1), (2, 0)])):  # steps up to a checkpoint, and steps that are lost
        folder = tmp_path / name
        job = rl_job_here(model_folders, folder, **changes)
        (folder / "work").mkdir()
        for done, lost in parts:
            with running(job) as run:
                saving(run, done)
                run.save()
                saving(run, lost)
        monkeypatch.chdir(folder)
        publish_rollouts(folder / "work")
        tables.append(Path("data/rollouts.parquet").read_bytes())
        assert list(step_files(folder / "work")) == [1, 2, 3, 4]
    assert tables[0] == tables[1]


def test_the_loop_saves_rollouts_and_evaluates_as_configured(model_folders, tmp_path):
    changes = {
        "rl.steps": 5,
        "rl.save_rollouts_every": 2,
        **{"rl.evaluation.every": 2, "rl.evaluation.prompts": 4, "rl.evaluation.samples": 2, "rl.evaluation.pass_score": -100.0},
    }
    job = rl_job_here(model_folders, tmp_path, **changes)
    row = {"source": "made", "label": None, "messages": [{"role": "user", "content": "sort 309."}]}
    names = [(split, f"{split}{i}") for split in ("train", "validation") for i in range(6)]
    write_rows(tmp_path / "prepared", "prompt", [row | {"id": name, "split": split} for split, name in names])
    (tmp_path / "work").mkdir()
    job = job.model_copy(update={"timings": str(tmp_path / "timings.csv")})
    with running(job) as run:
        assert train(job, run.workers, Stop()).step == 5
    assert list(step_files(tmp_path / "work")) == [1, 2, 4, 5]
    curves = pd.read_csv(tmp_path / "work/curves.csv").set_index("step")
    means, saved = read_rollouts(tmp_path / "work").to_pandas().groupby("step")[["score", "reward"]].mean(), curves.loc[[1, 2, 4, 5]]
    assert means["score"].to_list() == pytest.approx(saved["score_mean"].to_list(), abs=1e-4)
    before_kl = saved["reward_mean"] + saved["kl_coef"] * saved["kl_mean"]
    assert means["reward"].to_list() == pytest.approx(before_kl.to_list(), abs=1e-4)
    assert curves["eval_pass_1"].dropna().to_dict() == curves["eval_pass_2"].dropna().to_dict() == {2: 1.0, 4: 1.0, 5: 1.0}
    assert (curves["eval_pass_2_low"].dropna() < 1).all() and len(curves["eval_score_low"].dropna()) == 3
    assert list(pd.read_csv(tmp_path / "timings.csv")["seconds_save_rollouts"] > 0.001) == [True, True, False, True, True]
