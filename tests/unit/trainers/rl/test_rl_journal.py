"""The journal of batches: what is noted comes back as it was, and a run that resumes trains on it again, whatever its engines would say."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS
from rl_here import Killed, RunHere, rl_job_here, running
from whole_matrix import cells

from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.config import ConfigError, parse_params, read_yaml, set_key
from rlhf_core.data.schema import read_rows, write_rows
from rlhf_core.engines.rollout.requests import Request
from rlhf_core.sampling.scoring import StepScores
from rlhf_core.stage.scratch import RESUMED_FROM, is_recorded, journal_of, remove_checkpoints, write_record
from rlhf_core.trainers.rl.collect import Answers
from rlhf_core.trainers.rl.journal import EVALUATION, Batch, Journal
from rlhf_core.trainers.rl.mismatch import LogprobMismatch
from rlhf_core.trainers.rl.taught import Taught
from rlhf_core.types import Baseline, Dialogue, Prompt, Rollout, Span

PROMPT = Prompt("p", "made", [{"role": "user", "content": "Sort é."}], [5, 6], None)
SPANS = [Span([7], [-0.1], 3), Span([9, 8], [0.0, 0.0], None, trained=False), Span([2], [-1.0 / 3], 4, trained=False)]
DIALOGUE = Dialogue([{"role": "user", "content": "a"}], 1, [True, False, False, True], 3, None, [0.0, 0.25], False, 2, 1, 0)
ROLLOUTS = [Rollout(PROMPT, SPANS, True, 0, DIALOGUE), Rollout(replace(PROMPT, label="4"), SPANS[:1], False, 1)]
SCORES = {"judge": torch.tensor([0.1, torch.nan]), "other": torch.tensor([1.0, -2.5])}
STEPS = 8


def baseline() -> Baseline:
    flat = torch.tensor([[-0.1, 0.0], [-0.2, -0.7]])
    mask = torch.tensor([[True, False], [True, True]])
    return Baseline(SCORES, torch.tensor([True, False]), torch.tensor([1, 2]), mask, flat, flat + 1)


def rl(schedule: str):
    tree = read_yaml(CLERK_PARAMS)
    set_key(tree, "rl.rollout.schedule", schedule)
    return parse_params(tree).rl


def plain(value):
    """A value that `==` compares by content: NaN equals itself, tensors have their dtype."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), repr(value.tolist())
    if isinstance(value, dict):
        return {name: plain(of_one) for name, of_one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(of_one) for of_one in value]
    return plain(vars(value)) if hasattr(value, "__dict__") else repr(value)


@pytest.mark.parametrize("full", [True, False])
def test_a_batch_comes_back_as_it_was(tmp_path: Path, full: bool):
    drawn = [(ROLLOUTS[:1], {"judge": SCORES["judge"][:1]}), (ROLLOUTS, SCORES)] if full else [(ROLLOUTS, SCORES)]
    steps = {"judge": StepScores([[0.1 + 0.2, 1.0], []], [[3, 7], []], [[0.3, -0.1], []])} if full else {}
    taught = Taught([True, False], [0.25], [[[0.1 + 0.2, -1.0], [0.0, 0.0]]], [[[3, 1], [0, 0]]]) if full else None
    metrics = {"dynamic_rounds": 2, "drawn_score_mean": float("nan"), "x": 0.1 + 0.2}
    answers = Answers(ROLLOUTS, SCORES, steps, drawn, baseline() if full else None, 17, metrics, {"judge.cost": 1e-9}, taught)
    batch = Batch(answers, 3e-5 if full else None, {"position": 4, "complete": 2, "rollouts": {}} if full else None)
    journal = Journal(rl("free"), tmp_path)
    journal.note_batch(5, batch)
    assert plain(Journal(rl("free"), tmp_path).batch(5)) == plain(batch)


def test_without_a_journal_nothing_is_written(tmp_path: Path):
    journal = Journal(rl("counted"), tmp_path)
    journal.note_batch(0, Batch(Answers(ROLLOUTS, SCORES, {}, [(ROLLOUTS, SCORES)], None, 0, {}, {}, None), None, None))
    assert journal.batch(0) is None and journal.answer(EVALUATION, 0, lambda: {"x": 1.0}) == {"x": 1.0}
    assert not list(tmp_path.rglob("*"))


def test_a_file_that_is_damaged_anywhere_is_not_there(tmp_path: Path):
    journal = Journal(rl("free"), tmp_path)
    for place in range(0, 200, 3):
        journal.answer(EVALUATION, 1, lambda: {f"x{i}": i / 7 for i in range(20)})
        (path,) = tmp_path.rglob("evaluation*")
        content = bytearray(path.read_bytes())
        if place < len(content) and place not in range(4, 10):  # the header's time, level and system
            content[place] ^= 0x55
            path.write_bytes(content)
            assert journal._read(EVALUATION, 1) is None, place


def test_an_answer_is_asked_for_once(tmp_path: Path):
    asked = iter([{"x": float("inf")}, {"x": 2.0}])
    assert [Journal(rl("free"), tmp_path).answer(EVALUATION, 4, lambda: next(asked)) for _ in range(3)] == [{"x": float("inf")}] * 3


def test_a_batch_that_cannot_be_written_is_told_as_a_failed_save(tmp_path: Path):
    (tmp_path / "journal").write_text("a file where the folder should be")
    with pytest.raises(SaveFailed, match=r"journal .*batch-000002.* expected to be written"):
        Journal(rl("free"), tmp_path).answer("batch", 2, lambda: 1)


def test_what_was_written_after_an_edit_of_the_inputs_is_removed(tmp_path: Path):
    scratch = tmp_path / "0123456789abcdef"
    for schedule in ("free", "recorded"):
        Journal(rl(schedule), scratch).answer(EVALUATION, 1, lambda: 1)
    noted = [path for kept in (True, False) for path in journal_of(scratch, kept=kept).glob("*")]
    assert len(noted) == 2
    remove_checkpoints(scratch, since=max(path.stat().st_mtime_ns for path in noted))
    assert all(path.exists() for path in noted)
    remove_checkpoints(scratch, since=0)
    assert not any(path.exists() for path in noted)


def test_a_recorded_journal_is_of_the_checkpoint_that_the_work_began_from(tmp_path: Path):
    """checkpoints.resume_from is no part of the fingerprint, but another policy sampled the batches behind its checkpoint."""
    scratch = tmp_path / "0123456789abcdef"
    scratch.mkdir()
    noted = Batch(Answers(ROLLOUTS, SCORES, {}, [(ROLLOUTS, SCORES)], None, 0, {}, {}, None), None, None)
    (alone := Journal(rl("recorded"), scratch)).note_batch(4, noted)
    alone.end()
    for step in (4, 6):
        write_record(scratch / RESUMED_FROM, [{"scratch": "fedcba9876543210", "step": step}])
        resumed = Journal(rl("recorded"), scratch)
        assert resumed.count(4) == 0 and resumed.batch(4) is None and not is_recorded(scratch)
        resumed.note_batch(step, noted)
        assert Journal(rl("recorded"), scratch).count(step) == 1, "a rerun has the same journal"
    (scratch / RESUMED_FROM).unlink()
    assert Journal(rl("recorded"), scratch).count(4) == 1 and is_recorded(scratch)


def test_a_run_that_resumes_behind_its_last_step_ends_without_a_batch(tmp_path: Path):
    Journal(rl("recorded"), tmp_path / "work").end()
    assert is_recorded(tmp_path / "work")


def test_a_storage_refuses_a_journal():
    tree = read_yaml(CLERK_PARAMS)
    for key, value in {"cluster.address": "http://head:8265", "cluster.storage": "s3://bucket/x"}.items():
        set_key(tree, key, value)
    parse_params(tree)
    set_key(tree, "rl.rollout.schedule", "free")
    with pytest.raises(ConfigError, match=r"rl\.rollout\.schedule: expected counted with cluster\.storage, got free"):
        parse_params(tree)


# Whole runs, whose engines say something else each time


class Fickle:
    """An engine whose random numbers depend on the run, as those of a GPU's batches do. asked: calls that sample."""

    def __init__(self, actor: object, run: int):
        self._actor, self._run, self.asked = actor, run, 0

    def __getattr__(self, name: str):
        return getattr(self._actor, name)

    def generate(self, prompts: list, seeds: list[int], settings, **how):
        self.asked += 1
        return self._actor.generate(prompts, [seed + self._run for seed in seeds], settings, **how)

    def advance(self, requests: list[Request], *args, **how):
        self.asked += 1
        return self._actor.advance([replace(r, seed=r.seed + self._run) for r in requests], *args, **how)


class Fickles:
    """The engines of one run."""

    def __init__(self, run: int):
        self._run, self._all = run, []

    def __call__(self, actor: object) -> Fickle:
        self._all.append(engine := Fickle(actor, self._run))
        return engine

    @property
    def asked(self) -> int:
        return sum(engine.asked for engine in self._all)


def job_of(folders: tuple[Path, Path], folder: Path, **changes):
    """A job that evaluates after every fourth step."""
    settings = {"rl.rollout.schedule": "free", "rl.rollout.stop": ["o", "s", "i"], "rl.evaluation.every": 4, "rl.evaluation.prompts": 4}
    job = rl_job_here(folders, folder, **settings | changes)
    rows = read_rows(folder / "prepared", "prompt", "train")
    write_rows(folder / "prepared", "prompt", [*rows, *({**row, "id": f"v{row['id']}", "split": "validation"} for row in rows[:4])])
    return job


def same_weights(a: RunHere, b: RunHere, versions: range) -> bool:
    return all(torch.equal(a.rank.weights[v][name], b.rank.weights[v][name]) for v in versions for name in a.rank.weights[v])


def same_rows(a: list[dict], b: list[dict]) -> bool:
    return plain(a) == plain(b)


CASES = {
    "on policy": {},
    "ahead": {"rl.rollout.max_lag": 2},
    "ahead, two engines, corrected": {"rl.rollout.max_lag": 2, "rl.rollout.engines": 2, "rl.correction.kind": "tis"},
    "ppo, running statistics": {"rl.algorithm": "ppo", "rl.rollout.max_lag": 1, "rl.reward.scorers.0.normalization": "running"},
    "remax": {"rl.algorithm": "remax", "rl.rollout.max_lag": 1},
    "dynamic sampling": {
        "rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.dynamic_sampling.enabled": True, "rl.reward.clip": 0.1,
        "rl.rollout.max_lag": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("case", cells(CASES, ["ahead, two engines, corrected", "dynamic sampling"]))
def test_a_killed_run_trains_on_what_was_noted_without_its_engines(model_folders: tuple[Path, Path], tmp_path: Path, case: str):
    job = job_of(model_folders, tmp_path, **CASES[case])
    with running(job, wrap=Fickles(1)) as first:
        for _ in range(2):
            first.step()
        first.save()
        for _ in range(3):
            first.step()
        update = first.workers.update

        def killed(*args, **kwargs):
            raise Killed

        first.workers.update = killed  # the batch of the next step is noted, and not trained on
        with pytest.raises(Killed):
            first.step()
        first.workers.update = update
    with running(job, wrap=(engines := Fickles(2))) as second:
        assert second.progress.step == 2 and not engines.asked
        for _ in range(4):
            second.step()
        assert not engines.asked
        assert same_weights(first, second, range(2, 6)) and same_rows(first.rows[2:], second.rows[:3])
        while second.progress.step < STEPS:
            second.step()
        assert engines.asked and second.rows[-1].get("policy_lag_max", 0) <= job.rl.rollout.max_lag
        rollouts = [r for result in second.results[4:] for r in result.collected.rollouts]
        assert all(span.version + job.rl.rollout.max_lag >= 6 for r in rollouts for span in r.spans)
        second.save()
    with running(job, wrap=Fickles(3)) as third:
        assert third.progress.step == STEPS and same_weights(second, third, range(STEPS, STEPS + 1))


def test_without_the_journal_such_engines_change_the_run(model_folders: tuple[Path, Path], tmp_path: Path):
    """The comparison above can tell."""
    job, runs = job_of(model_folders, tmp_path, **{"rl.rollout.schedule": "counted"}), []
    for number in (1, 2):
        with running(job, wrap=Fickles(number)) as run:
            run.step()
            runs.append(run)
    assert not same_weights(*runs, range(1, 2)) and not same_rows(runs[0].rows, runs[1].rows)


def test_a_recorded_run_is_trained_again_without_sampling(model_folders: tuple[Path, Path], tmp_path: Path):
    job = job_of(model_folders, tmp_path, **{"rl.rollout.schedule": "recorded", "rl.rollout.max_lag": 2})
    with running(job, wrap=Fickles(1)) as first:
        while first.progress.step < STEPS:
            first.step()
            first.save()
            first.run.journal.trim(first.workers.store.surely_done)
        assert not is_recorded(Path(job.work))
        first.run.journal.end()
    assert is_recorded(Path(job.work))
    shutil.rmtree(job.work)  # as a stage that has succeeded does
    with running(job, wrap=(engines := Fickles(2))) as second:
        while second.progress.step < STEPS:
            second.step()
        assert not engines.asked
        assert same_weights(first, second, range(STEPS + 1)) and same_rows(first.rows, second.rows)


def test_a_whole_journal_that_lacks_a_batch_is_told_once(tmp_path: Path):
    journal = Journal(rl("recorded"), tmp_path / "work")
    journal.answer(EVALUATION, 0, lambda: {})
    journal.end()
    for _ in range(2):
        assert is_recorded(tmp_path / "work") and Journal(rl("recorded"), tmp_path / "work").answer(EVALUATION, 0, lambda: 1) == {}
    with pytest.raises(SaveFailed, match=r"batch-000000.* expected that of a whole run, got none or a damaged one"):
        journal.batch(0)
    assert not is_recorded(tmp_path / "work") and journal.batch(0) is None, "the next start has engines"


def test_a_damaged_batch_ends_the_replay(model_folders: tuple[Path, Path], tmp_path: Path, caplog):
    job = job_of(model_folders, tmp_path)
    with running(job, wrap=Fickles(1)) as first:
        for _ in range(5):
            first.step()
    (folder := journal_of(Path(job.work), kept=False)).joinpath("batch-000003.json.gz").write_bytes(
        (folder / "batch-000003.json.gz").read_bytes()[:-9]
    )
    with running(job, wrap=(engines := Fickles(2))) as second:
        for _ in range(3):
            second.step()
        assert not engines.asked and same_weights(first, second, range(4)) and (folder / "batch-000004.json.gz").exists()
        second.step()
        assert engines.asked and "batch-000003.json.gz: expected a readable file of the journal, got EOFError" in caplog.text
        assert not same_weights(first, second, range(4, 5))
        names = {path.name for path in folder.glob("*")}
        assert (
            "batch-000004.json.gz" not in names
            and {"batch-000003.json.gz", "evaluation-000004.json.gz", "calibration-000000.json.gz"} <= names
        )


class Stale(Fickle):
    """An engine whose log-probabilities are those of another policy."""

    def generate(self, *args, **how):
        groups = super().generate(*args, **how)
        return [[replace(s, logprobs=[logprob - 1 for logprob in s.logprobs]) for s in group] for group in groups]


def test_a_batch_that_the_update_finds_wrong_is_sampled_anew(model_folders: tuple[Path, Path], tmp_path: Path):
    job = job_of(model_folders, tmp_path, **{"rl.kl.placement": "loss", "rl.kl.estimator": "k3"})
    assert job.rl.old_logprobs_source(0) == "from_update"
    with running(job, wrap=lambda actor: Stale(actor, 1)) as first, pytest.raises(LogprobMismatch):
        first.step()
    with running(job, wrap=(engines := Fickles(2))) as second:
        second.step()
        assert engines.asked and second.rows[0]["logprob_difference"] < 1e-4


def test_batches_stay_until_two_checkpoints_have_their_updates(model_folders: tuple[Path, Path], tmp_path: Path):
    job, kept = job_of(model_folders, tmp_path), []
    with running(job) as run:
        for step in range(1, 6):
            run.step()
            if step in (2, 3, 5):
                run.save()
            run.run.journal.trim(run.workers.store.surely_done)
            kept.append(sorted(int(path.name[6:12]) for path in journal_of(Path(job.work), kept=False).glob("batch-*")))
    assert kept == [[0], [0, 1], [2], [2, 3], [3, 4]]
