"""The gate's verdicts by hand, and the gate as a user meets it: the stage's own process, under plain Python and under DVC."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import warm_python
from clerk_params import CLERK_PARAMS
from gate_pairs import pairs, right_and_wrong, write_slices
from gate_verdicts import gate_config, heldout, judge, verdicts

from rlhf_core.config import RolledBackConfig, apply_overrides
from rlhf_core.data.schema import write_rows
from rlhf_core.gate.checks import explain
from rlhf_core.gate.heldout import Heldout, distinct_responses, measure_ensemble, measure_judge, measure_scores
from rlhf_core.gate.looks import LEDGER
from rlhf_core.gate.pairs import compare
from rlhf_core.gate.scoring import LoadedModel
from rlhf_core.gate.verdict import COLUMNS, read_heldout, with_registry, with_verdict
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.stage.files import write_json
from rlhf_core.statistics.intervals import wilson_interval

ROOT = Path(__file__).parents[3]
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}
WITHOUT_REWARD_MODEL = {"reward.enabled": False, "rl.algorithm": "grpo", "rl.reward.scorers": [JUDGE], "rl.ppo.critic_init": "sft"}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml"):
        shutil.copy(file, tmp_path)
    for folder in ("tasks", "rlhf_core", "rewards"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    for model in ("reward", "tokenizer"):
        (tmp_path / "models" / model).mkdir(parents=True)
    (tmp_path / "models/reward/model.safetensors").write_bytes(b"an earlier run's")
    return tmp_path


def run_stage(workspace: Path, stage: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", f"tasks.{stage}"]
    return warm_python.run(command, cwd=workspace, env=environment)


def run_gate(workspace: Path) -> tuple[subprocess.CompletedProcess[str], dict]:
    done = run_stage(workspace, "gate_reward")
    return done, json.loads((workspace / "metrics/gate.json").read_text())


def write_heldout(workspace: Path, scores: list[tuple[str, str, float, float]], **columns: list) -> Path:
    """id, split, chosen and rejected score of each pair, which then are in data/prepared too."""
    n = len(scores)
    table = {"id": [s[0] for s in scores], "source": ["clerk"] * n, "split": [s[1] for s in scores]}
    table |= {"chosen_score": [s[2] for s in scores], "rejected_score": [s[3] for s in scores]}
    table |= {"chosen_tokens": [9] * n, "rejected_tokens": [8] * n, "prompt": [s[0] for s in scores], "prompt_tokens": [4] * n}
    table |= {"chosen_std": [0.0] * n, "rejected_std": [0.0] * n} | columns
    path = workspace / "data/reward_heldout.parquet"
    path.parent.mkdir(exist_ok=True)
    pq.write_table(pa.table(table), path)
    messages = [{"role": "user", "content": "Sort 12."}]
    rows = [{"id": i, "source": "clerk", "split": split, "messages": messages, "chosen": "a", "rejected": "b"} for i, split, *_ in scores]
    write_rows(workspace / "data/prepared", "preference", rows)
    return path


def test_passes_on_the_lower_end():
    # 900 right and 20 ties of 1000, one pair a prompt: 0.91; the interval's ends by the formula of test_statistics:
    # centre 0.91 + 0.001920729 = 0.911920729, half 1.959964 * sqrt(0.0000819 + 9.6e-7) = 0.017841
    # / 1.003841459 gives 0.890658 and 0.926204.
    gate = judge(pairs(right_and_wrong(900, 80, 20)))
    assert gate["message"].startswith("passed: held-out accuracy 0.9100 on 1000 pairs of 1000 prompts")
    assert gate["needed"] and gate["passed"] and (gate["n"], gate["ties"], gate["accuracy"]) == (1000, 20, 0.91)
    assert (gate["low"], gate["high"]) == pytest.approx((0.890658, 0.926204), abs=3e-6)
    assert verdicts(gate) == {
        "pairs": True, "accuracy": True, "shorter_accuracy": None, "length_correlation": None, "ece": None, "brier": None,
    }  # fmt: skip


def test_pairs_of_one_prompt_count_together():
    # 231 of 300 prompts are all right, 69 all wrong, with 4 pairs each: 0.77 as of 1200 pairs (low 0.745 by themselves), but worth 300
    # prompts: d = 4 * 300/299, t 1.967930 in the place of z 1.959964: 1200 / 4.013378 * 0.991920 = 296.584 pairs; low 0.71884.
    margins = [1.0] * (231 * 4) + [-1.0] * (69 * 4)
    apart = judge(pairs(margins))
    together = judge(pairs(margins, prompts=[i // 4 for i in range(1200)]), gate_config(min_accuracy=0.74))
    assert apart["low"] == pytest.approx(0.7453, abs=1e-4) and together["low"] == pytest.approx(0.71884, abs=1e-5)
    assert together["n_effective"] == pytest.approx(296.584, abs=0.01) and (together["prompts"], together["n"]) == (300, 1200)
    assert not together["passed"] and judge(pairs(margins), gate_config(min_accuracy=0.74))["passed"]


def test_a_share_above_the_bar_with_an_interval_across_it_is_rejected():
    # 231 of 300 is 0.77, over the 0.75 asked for, but the lower end is 0.719.
    gate = judge(pairs(right_and_wrong(231, 69)))
    assert gate["accuracy"] == 0.77 and gate["low"] == pytest.approx(0.719, abs=1e-3) and not gate["passed"]
    assert "expected the lower end of the interval to reach gate.min_accuracy=0.75, got 0.71" in gate["message"]


def test_nothing_is_decided_on_too_few_pairs():
    gate = judge(pairs(right_and_wrong(100, 99)))
    assert "expected at least gate.min_pairs=200 test pairs to judge by, got 199" in gate["message"] and not gate["passed"]
    assert {name: passed for name, passed in verdicts(gate).items() if passed is not None} == {"pairs": False}
    assert "lower end" not in gate["message"]


def test_no_test_pairs_at_all():
    gate = judge(pairs([]))
    assert "got 0" in gate["message"] and gate["accuracy"] is None and gate["calibration"] is None
    assert not gate["passed"] and not any(verdicts(gate).values())


def test_rejected_on_a_slice():
    # 380 of 400 and 60 of 100: 0.88 in all, but "sort" is at 0.6, low 0.502. Twenty pairs of "rare", all wrong, are too few to judge.
    margins = right_and_wrong(380, 20) + right_and_wrong(60, 40) + right_and_wrong(0, 20)
    rows = pairs(margins, category=["largest"] * 400 + ["sort"] * 100 + ["rare"] * 20)
    assert judge(rows)["passed"] and judge(rows)["worst_slice"]["value"] == "sort"
    gate = judge(rows, gate_config(min_slice_accuracy=0.55, slices=["category"]))
    assert {n: p for n, p in verdicts(gate).items() if n.startswith("slice")} == {
        "slice: category=largest": True, "slice: category=rare": None, "slice: category=sort": False,
    }  # fmt: skip
    assert "gate.min_slice_accuracy=0.55, got less in category=sort 0.6000 (0.50" in gate["message"]


@pytest.mark.parametrize(("own", "passed"), [(700, True), (690, True), (600, False)])
def test_the_incumbent_wins_where_the_candidate_may_be_worse_by_more_than_is_allowed(own, passed):
    # Of 1000 prompts the incumbent has 700 right and the candidate the first `own` of them. Never ahead, 10 of 1000 behind: the interval
    # goes down to -0.0183, minus Wilson's upper end of 10 in 1000, and -0.02 is allowed. 100 behind: down to -0.1202.
    candidate, incumbent = ((np.arange(1000) < right).astype(float) for right in (own, 700))
    found = {"version": "v1", "md5": "0.dir", "not_scored": 0, **compare(candidate, incumbent, np.arange(1000), 0.95)}
    gate = judge(pairs(right_and_wrong(own, 1000 - own)), gate_config(min_accuracy=0.5), incumbent=found)
    assert gate["passed"] is passed and verdicts(gate)["incumbent_difference"] is passed
    assert ("the incumbent v1 wins" in gate["message"]) is not passed
    if own == 690:
        assert gate["incumbent"]["low"] == pytest.approx(-wilson_interval(10, 1000, 0.95)[1], abs=1e-6)
        reported = "incumbent v1: accuracy 0.7000 on 1000 pairs; this model's is -0.0100 (-0.0183 to"
        assert any(line.startswith(reported) for line in explain(gate | {"override": None}))


def test_an_incumbent_that_can_score_too_few_of_the_pairs_decides_nothing():
    found = {"version": "v1", "md5": "0.dir", "not_scored": 900, **compare(np.ones(100), np.ones(100), np.arange(100), 0.95)}
    gate = judge(pairs(right_and_wrong(950, 50)), incumbent=found)
    assert not gate["passed"] and "200 pairs that the incumbent v1 can score, got 100" in gate["message"]


@pytest.mark.parametrize(("difference", "exact", "passed"), [(9e-6, True, True), (2e-5, True, False), (2e-5, False, None)])
def test_stored_scores_must_be_the_models_unless_they_were_rounded(difference, exact, passed):
    probe = {"value": difference, "low": None, "high": None, "n": 10}
    config = gate_config()
    found = {**measure_scores(heldout(pairs(right_and_wrong(900, 100))), np.ones(3), config), "probes": {"stored_scores": probe}}
    gate = with_verdict(found, config, exact_scores=exact)
    assert verdicts(gate)["stored_scores"] is passed and gate["passed"] is (passed is not False)


def test_other_thresholds():
    # The shorter one is chosen, and all of those are right but 20 of 400; shifts by -0.3 to -0.1 standard deviations.
    shift = {"value": -0.2, "low": -0.3, "high": -0.1, "n": 10}
    changes = {"max_ece": 0.01, "min_shorter_accuracy": 0.9, "max_format_shift": 0.25}
    gate = judge(pairs(right_and_wrong(380, 20)), gate_config(**changes), probes={"format: bold": shift})
    assert {name: verdicts(gate)[name] for name in ("ece", "shorter_accuracy", "format: bold")} == {
        "ece": False, "shorter_accuracy": True, "format: bold": False,
    }  # fmt: skip


def test_each_source_is_reported_separately():
    # Overall 450 of 500 = 0.9; one source is perfect, the other, with 100 pairs, a coin.
    gate = judge(pairs(right_and_wrong(400, 0) + right_and_wrong(50, 50), sources=["good"] * 400 + ["coin"] * 100))
    assert gate["accuracy"] == 0.9
    assert {name: (s["accuracy"], s["n"]) for name, s in gate["by_source"].items()} == {"good": (1.0, 400), "coin": (0.5, 100)}


def test_reward_against_the_judge_on_what_it_knows():
    """Of four responses to a request the best has the highest score, the worst the lowest; other sources' are left out."""
    request = "Please sort 312."
    message = [("Certainly: 123.", "123."), ("It is 123.", "Certainly: 321."), ("x", "y")]
    rows = pairs([2.0, 1.0, 5.0], prompts=[request, request, "what?"], sources=["clerk", "clerk", "web"])
    found = measure_judge(heldout(rows, texts=message), {"clerk": "clerk"}, 0.95)
    # Criteria met: 4, 3 (rude), 3 (rude), 3 (wrong) of four, with scores 2, 0, 1, 0: tau-b = 3 / sqrt(5 * 3).
    assert found["n"] == 4 and found["kendall"] == pytest.approx(3 / math.sqrt(15))
    assert measure_judge(heldout(rows, texts=message), {}, 0.95) is None


def test_a_response_of_several_pairs_is_one_response():
    rows = pairs([1.0, 2.0], prompts=["a", "a"])
    responses, which = distinct_responses(heldout(rows, texts=[("good", "bad"), ("better", "bad")]))
    assert [text for _, text in responses] == ["good", "better", "bad"] and which.tolist() == [0, 1, 2]


def test_the_members_of_an_ensemble_disagree_more_where_they_are_wrong():
    test = Heldout(pairs([1, 1, -1]), [], np.array([0.1, 0.3, 0.9]), np.array([0.3, 0.1, 0.5]))
    assert measure_ensemble(test) == pytest.approx({"disagreement": 2.2 / 6, "disagreement_right": 0.2, "disagreement_wrong": 0.7})


def write_own_scores(workspace: Path, reward_folder: Path) -> None:
    """60 pairs, half of them test pairs, with the model's own scores of them, all in the right order; and the model."""
    model = LoadedModel.load(reward_folder, max_length=96, trust_remote_code=False)
    rows = [
        {"id": f"{split}{i}", "source": "clerk", "split": split, "messages": [{"role": "user", "content": f"Please sort {3 * i + 10}."}]}
        for split in ("validation", "test")
        for i in range(30)
    ]
    for row in rows:
        texts = [f"Certainly: {row['id'][-2:]}.", "Sorry, I can't help with that."]
        scores = model.score_texts([(row["messages"], t) for t in texts])
        row["chosen"], row["rejected"] = texts if scores[0] > scores[1] else texts[::-1]
        row["scores"] = sorted(scores.tolist(), reverse=True)
    write_heldout(workspace, [(row["id"], row["split"], *row["scores"]) for row in rows])
    write_rows(workspace / "data/prepared", "preference", rows)
    write_slices(workspace / "data/prepared", {row["id"]: {"category": "sort"} for row in rows})
    write_json(workspace / "data/prepared/sources.json", {"clerk": {"kind": "clerk", "judge": "clerk"}})
    shutil.copytree(reward_folder, workspace / "models/reward", dirs_exist_ok=True)


def test_the_whole_stage_with_a_model_and_an_incumbent(workspace, reward_folder, tokenizer):
    """Scores of the model itself pass every probe; incumbent and anchor are the very same model."""
    write_own_scores(workspace, reward_folder)
    incumbent = {"version": "v0.1", "md5": dvc_md5(reward_folder)}
    anchor = incumbent | {"version": "v0.0"}
    apply_overrides(workspace / "params.yaml", {"gate.min_pairs": 20, "gate.incumbent": incumbent, "gate.anchor": anchor})
    put_into_cache(workspace, reward_folder)
    done, gate = run_gate(workspace)
    assert done.returncode == 0, done.stderr
    assert gate["accuracy"] == 1.0 and gate["n"] == 30 and {s["column"] for s in gate["slices"]} >= {"category", "length_order"}
    assert gate["incumbent"]["difference"] == 0.0 and gate["incumbent"]["n"] == 30 and gate["ensemble"]["members"] == 1
    exact = ("padding_side", "batch_size", "truncation", "identical_responses", "stored_scores")
    assert all(verdicts(gate)[name] for name in (*exact, "incumbent_difference", "pairs", "accuracy"))
    assert gate["judge"]["n"] == 60 and gate["calibration"]["temperature_pairs"] == 30
    assert gate["anchor"] == gate["incumbent"] | {"version": "v0.0"} and gate["look"]["number"] == 1


def put_into_cache(workspace: Path, folder: Path) -> None:
    """A project of DVC whose cache has the folder's files."""
    shutil.copytree(ROOT / ".dvc", workspace / ".dvc", ignore=shutil.ignore_patterns("tmp", "cache", "config.local"))
    subprocess.run(["git", "init", "--quiet"], cwd=workspace, check=True)
    shutil.copytree(folder, workspace / "kept")
    environment = {**os.environ, "DVC_NO_ANALYTICS": "1"}
    warm_python.run([sys.executable, "-m", "dvc", "add", "--quiet", "kept"], cwd=workspace, env=environment, check=True)


@pytest.mark.long
def test_two_models_in_two_worktrees_are_two_looks_and_one_that_is_judged_again_none(workspace, reward_folder, tokenizer):
    """The second one is killed between its look and gate.json, which counts once."""
    write_own_scores(workspace, reward_folder)
    apply_overrides(workspace / "params.yaml", {"gate.min_pairs": 20})
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@b")
    subprocess.run([*git, "init", "--quiet", "--initial-branch", "main"], cwd=workspace, check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "-m", "one"], cwd=workspace, check=True)
    other = workspace / "other"
    subprocess.run([*git, "worktree", "add", "--quiet", "-b", "run/other", str(other)], cwd=workspace, check=True)
    for name in ("params.yaml", "dvc.yaml", "tasks", "rlhf_core", "rewards", "data", "models"):
        source = workspace / name
        (shutil.copytree if source.is_dir() and not source.is_symlink() else os.symlink)(source, other / name)
    (other / "models/reward/note").write_text("another model by its md5")

    ledger = workspace / ".git" / LEDGER.name
    first_run, first = run_gate(workspace)
    kill_after_look(other, ledger)
    assert not (other / "metrics").exists()
    second_run, second = run_gate(other)
    assert first_run.returncode == second_run.returncode == 0, first_run.stderr + second_run.stderr
    assert "look 2 at this split's 30 test pairs: intervals of 97.5%" in second_run.stdout
    assert (first["look"]["number"], first["look"]["level"], first["confidence"], first["look"]["earlier"]) == (1, 0.025, 0.95, [])
    assert (second["look"]["number"], second["look"]["level"], second["confidence"]) == (2, 0.0125, 0.975)
    (earlier,) = second["look"]["earlier"]
    assert earlier == {
        "number": 1, "model": dvc_md5(workspace / "models/reward"), "run": "main", "passed": True, "accuracy": 1.0, "confidence": 0.95,
        "shared": 1.0,
    }  # fmt: skip
    assert second["low"] < first["low"] and second["accuracy"] == first["accuracy"]

    written = (workspace / "metrics/gate.json").read_bytes()
    run_gate(workspace)
    assert (workspace / "metrics/gate.json").read_bytes() == written
    assert [json.loads(line)["kind"] for line in ledger.read_text().splitlines()] == ["look", "result"] * 2


def kill_after_look(folder: Path, ledger: Path) -> None:
    """Start the stage and SIGKILL it once its look is in the ledger."""
    before, until = ledger.stat().st_size, time.monotonic() + 120
    command = [sys.executable, "-m", "tasks.gate_reward"]
    process = subprocess.Popen(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    while ledger.stat().st_size == before and process.poll() is None and time.monotonic() < until:
        time.sleep(0.005)
    process.kill()
    assert process.wait(timeout=60) == -9, "the stage ended before its look was seen"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_are_no_numbers_are_refused_with_their_ids(workspace, monkeypatch, bad):
    monkeypatch.chdir(workspace)
    path = write_heldout(workspace, [*((f"p{i}", "test", 1.0, 0.0) for i in range(300)), ("the-bad-one", "test", bad, 0.0)])
    with pytest.raises(ValueError, match="1 of 301 test pairs: the-bad-one"):
        read_heldout(path, Path("data/prepared"), "test")


def test_columns_and_pairs_that_are_missing_are_named(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    path = write_heldout(workspace, [("p", "test", 1.0, 0.0), ("v", "validation", 1.0, 0.0)])
    assert len(read_heldout(path, Path("data/prepared"), "test").pairs) == 1
    write_rows(workspace / "data/prepared", "preference", [])
    with pytest.raises(ValueError, match="got 1 that are not there, p the first"):
        read_heldout(path, Path("data/prepared"), "test")
    pq.write_table(pq.read_table(path).drop_columns(["rejected_score"]), path)
    with pytest.raises(ValueError, match="got none named rejected_score"):
        read_heldout(path, Path("data/prepared"), "test")


def test_without_a_reward_model_the_chain_continues_with_a_reason(workspace):
    apply_overrides(workspace / "params.yaml", WITHOUT_REWARD_MODEL)
    for needed in ("data/prepared", "models/sft"):
        (workspace / needed).mkdir(parents=True)
    trained = run_stage(workspace, "train_reward")
    assert trained.returncode == 0, trained.stderr
    assert [path.name for path in (workspace / "models/reward").iterdir()] == ["not_trained.json"]
    reason = {"trained": False, "given": False, "reason": "reward.enabled is false"}
    assert json.loads((workspace / "models/reward/not_trained.json").read_text()) == reason
    assert json.loads((workspace / "metrics/train_reward.json").read_text()) == reason
    heldout = pq.read_table(workspace / "data/reward_heldout.parquet")
    assert len(heldout) == 0 and pa.types.is_floating(heldout.schema.field("chosen_score").type)
    assert set(heldout.column_names) == set(COLUMNS)
    done, gate = run_gate(workspace)
    assert done.returncode == 0 and "not needed: no reward model was trained" in done.stdout
    assert (gate["needed"], gate["passed"], gate["accuracy"], gate["by_source"]) == (False, False, None, {})


def test_a_reward_model_that_was_rolled_back_does_not_pass_again(workspace, monkeypatch):
    monkeypatch.chdir(workspace)
    good = judge(pairs(right_and_wrong(900, 100)))
    md5 = dvc_md5(workspace / "models/reward")
    taken_back = RolledBackConfig(version="v2.0.0", md5=md5, reason="policies became curt")
    other = RolledBackConfig(version="v1.0.0", md5="0" * 32 + ".dir", reason="older")
    gate = with_registry(good, gate_config(rolled_back=[other]), md5)
    assert gate == good | {"override": None}
    gate = with_registry(good, gate_config(rolled_back=[other, taken_back]), md5)
    assert not gate["passed"] and [name for name, passed in verdicts(gate).items() if passed is False] == ["rolled_back"]
    message = (
        "rejected: version v2.0.0 was rolled back (policies became curt), and this is the same model. Without that it would have passed: "
    )
    assert gate["message"].startswith(message)


def test_an_override_is_written_down_where_it_is_needed():
    config = gate_config(override="a demonstration")
    gate = with_registry(judge(pairs(right_and_wrong(231, 69))), config, "0" * 32 + ".dir")
    assert not gate["passed"] and gate["override"] == "a demonstration"
    assert "Used anyway; gate.override says: a demonstration" in list(explain(gate))[-1]
    assert with_registry(judge(pairs(right_and_wrong(290, 10))), config, "0" * 32 + ".dir")["override"] is None


def test_an_override_lets_the_chain_continue(workspace):
    apply_overrides(workspace / "params.yaml", {"gate.override": "a demonstration"})
    write_heldout(workspace, [("the-bad-one", "test", math.inf, 0.0)])
    done, gate = run_gate(workspace)
    assert done.returncode == 0 and not gate["passed"] and "a demonstration" in done.stdout


def test_an_external_file_without_a_pair_that_can_be_scored_is_a_rejection_with_its_reason():
    found = {"name": "rb", "path": "rb.jsonl", "accuracy": None, "low": 0.0, "high": 1.0, "ties": 0, "n": 0, "prompts": 0, "subsets": []}
    gate = judge(pairs(right_and_wrong(900, 100)), external=[found | {"not_scored": 5, "threshold": 0.7}])
    assert not gate["passed"] and verdicts(gate)["external: rb"] is False
    assert "rejected: external: rb: expected figures to compare with 0.7, got none (n=0); train a better reward model" in gate["message"]
    assert "external rb: no pair got a score" in explain(gate | {"override": None})
