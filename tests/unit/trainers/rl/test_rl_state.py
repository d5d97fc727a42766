"""The driver's state: how it moves, that it comes back as it was, and the best policy with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.checkpoint.manifest import damage
from rlhf_core.checkpoint.settings import Origin, StoreSettings
from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.loop import is_due, note_if_best
from rlhf_core.trainers.rl.monitor import Finding, MonitorState, Track
from rlhf_core.trainers.rl.state import BestPolicy, Progress, RunStore
from rlhf_core.trainers.rl.workers import save_lost

RL = tiny_params().rl


def normalizer(*scores: float) -> RewardNormalizer:
    made = RewardNormalizer(RL.reward)
    if scores:
        made.calibrate({"reward_model": torch.tensor(scores)})
    return made


def save(store: RunStore, progress: Progress, moments: RewardNormalizer, save_ranks: Callable[[Path], None]) -> None:
    store.write(progress, moments, save_ranks)
    store.publish()
    store.wait()


def write_rank(text: str):
    return lambda folder: (folder / "rank").write_text(text)


def test_a_run_starts_with_the_configured_coefficient_and_a_fixed_one_stays():
    start = Progress.start(RL)
    assert start == Progress(step=0, prompts_drawn=0, kl_coef=RL.kl.coef, best=None)
    assert start.after_step(RL, kl=100.0, prompts_drawn=300) == Progress(1, 300, RL.kl.coef, None)


def test_minutes_end_a_run_like_its_last_step_and_count_on_from_a_checkpoint(tmp_path: Path):
    rl = tiny_params(**{"rl.max_minutes": 2.0, "rl.evaluation.every": 10}).rl
    inside, over = (replace(Progress.start(rl), step=4, seconds=seconds) for seconds in (119.9, 120.0))
    assert not inside.finished(rl) and not is_due(10, inside, rl)
    assert over.finished(rl) and is_due(10, over, rl) and not over.finished(RL) and not is_due(None, over, rl)
    save(RunStore(tmp_path), over, normalizer(1.0, 2.0), write_rank(""))
    assert RunStore(tmp_path).load(rl, normalizer(), lambda found: None) == over
    assert "seconds" not in (tmp_path / "checkpoints/step-4/driver.json").read_text(), "equal states have equal digests"


def test_with_a_target_the_coefficient_follows_the_divergence():
    rl = tiny_params(**{"rl.kl.target": 2.0, "rl.kl.horizon": 1024, "rl.samples_per_step": 256}).rl
    # error clip(3 / 2 - 1, -0.2, 0.2) = 0.2 over 256 of 1024 samples: a factor of 1 + 0.2 / 4
    assert Progress(5, 0, 0.1, None).after_step(rl, kl=3.0, prompts_drawn=1).kl_coef == pytest.approx(0.1 * 1.05)
    # clip(1.9 / 2 - 1) = -0.05: 1 - 0.05 / 4
    assert Progress(5, 0, 0.1, None).after_step(rl, kl=1.9, prompts_drawn=1).kl_coef == pytest.approx(0.1 * 0.9875)


def test_only_a_higher_finite_value_is_an_improvement():
    start = Progress.start(RL)
    assert start.improves(-5.0) and not start.improves(math.nan)
    later = replace(start, step=4, best=BestPolicy(2, 0.5, "score"))
    assert later.improves(0.6) and not later.improves(0.5) and not later.improves(math.nan)


def test_state_comes_back_as_it_was(tmp_path: Path):
    found = Finding("kl", "kl_mean", 7, 1 / 7, 0.1, "stop", "step 7: ...")
    monitor = MonitorState({"kl": Track((0.1, 1 / 7), 1 / 7, 2)}, {"score": (0.1, 0.2)}, ((0.0, 0.5), (1 / 3, 0.6)), (found,), found)
    progress, before = Progress(7, 1234, 0.1 + 0.2, BestPolicy(6, 1 / 3, "score"), monitor), normalizer(0.1, 0.7, 2.0)
    progress.write(tmp_path / "driver.json", before)
    after = normalizer()
    assert Progress.read(tmp_path / "driver.json", after) == progress
    assert after.moments == before.moments


def test_the_best_by_another_metric_is_not_compared_with(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """A judge's share of 0.7083 is above any value of a scorer that is never above 0."""
    scorers = [*(s.model_dump() for s in RL.reward.scorers), {"name": "judge", "kind": "judge", "weight": 0.0}]
    scorers.append({"name": "len", "kind": "length", "target_length": 8, "weight": 0.0})
    evaluation = {"every": 1, "prompts": 48, "keep_best": True}
    judge, length = (
        tiny_params(**{"rl.reward.scorers": scorers, "rl.evaluation": evaluation | {"metric": metric}}).rl for metric in ("judge", "len")
    )
    begun = note_if_best(replace(Progress.start(judge), step=1), {"eval_judge": 0.7083, "eval_len": -0.4}, judge)
    begun.write(tmp_path / "driver.json", normalizer(1.0, 2.0))
    before = Progress.read(tmp_path / "driver.json", normalizer())
    assert before.resumed(judge) == before and before.best == BestPolicy(1, 0.7083, "judge")
    after = before.resumed(length)
    assert after.best is None
    assert caplog.messages == ["rl: the best policy by judge so far, of step 1, isn't compared with later ones"]
    for step, value in ((5, -0.2), (6, -0.151042), (7, -0.16)):
        after = note_if_best(replace(after, step=step), {"eval_judge": 0.1, "eval_len": value}, length)
    assert after.best == BestPolicy(6, -0.151042, "len")


def test_state_begins_anew_where_it_means_something_else():
    monitor = MonitorState(start={"score": (0.1, 0.2)}, frontier=((0.0, 0.5),))
    adapted = tiny_params(**{"rl.kl.target": 2.0, "rl.kl.coef": 0.4}).rl
    progress = Progress(7, 70, 0.123, BestPolicy(6, 0.5, "score"), monitor)
    assert progress.resumed(adapted) == progress
    assert progress.resumed(RL).kl_coef == RL.kl.coef, "one that isn't adapted is always the configuration's"
    assert progress.resumed(adapted, ["kl_coef", "best", "start", "frontier"]) == Progress(7, 70, 0.4, None, MonitorState())


def test_a_checkpoint_of_other_work_says_what_begins_anew_also_after_a_second_change(tmp_path: Path):
    first, second, third = (Origin(config=name) for name in "123")
    scores = ((first, {}), (second, {"accepted": (first,), "begun_anew": (("best",),)}))
    for step, (origin, how) in enumerate(scores, start=1):
        store = RunStore(tmp_path, StoreSettings(origin=origin, **how))
        store.write(Progress(step, 0, 0.1, BestPolicy(step, 9.0, "score")), normalizer(1.0, 2.0), write_rank(""), score=9.0)
        store.publish()
        store.wait()
    kept = {"accepted": (first, second), "begun_anew": (("best",), ("kl_coef",))}
    settings = StoreSettings(origin=third, keep_best=1, **kept)
    assert settings.changed_since(first) == {"best", "kl_coef"} and settings.changed_since(second) == {"kl_coef"}
    assert settings.changed_since(third) == frozenset()
    assert RunStore(tmp_path, settings).load(RL, normalizer(), lambda found: None).best == BestPolicy(2, 9.0, "score")
    anew = StoreSettings(origin=third, accepted=(first, second), begun_anew=((), ("best",)), keep_best=1)
    store = RunStore(tmp_path, anew)
    assert store.load(RL, normalizer(), lambda found: None).best is None
    for step in (3, 4, 5, 6):  # a lower score, of this work, is the best that is kept
        store.write(Progress(step, 0, 0.1, None), normalizer(1.0, 2.0), write_rank(""), score=1.0 / step)
        store.publish()
        store.wait()
    assert steps(tmp_path) == [3, 5, 6]


def test_a_run_ends_with_its_last_step_or_by_a_limit():
    start = Progress.start(RL)
    assert not start.finished(RL) and replace(start, step=RL.steps).finished(RL)
    stopped = Finding("kl", "kl_mean", 7, 2.0, 1.0, "stop", "")
    assert replace(start, step=7, monitor=MonitorState(stopped=stopped)).finished(RL)
    assert not replace(start, step=7, monitor=MonitorState(warnings=(stopped,))).finished(RL)


def test_no_checkpoint_is_no_progress(tmp_path: Path):
    assert RunStore(tmp_path).load(RL, normalizer(), write_rank("")) is None


def steps(folder: Path) -> list[int]:
    return sorted(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").iterdir())


def run(folder: Path, best: dict[int, int]) -> RunStore:
    """A run that saves after each of these steps; the policy of the other step is the best by then."""
    store = RunStore(folder)
    for step, of in best.items():
        save(store, Progress(step, 10 * step, 0.1, BestPolicy(of, float(of), "score")), normalizer(1.0, 2.0), write_rank(f"step {step}"))
    return store


def test_the_best_policy_is_that_of_a_checkpoint_which_stays_and_has_no_copy(tmp_path: Path):
    store = run(tmp_path, {0: 0, 2: 2, 3: 2, 4: 2, 5: 2})
    assert steps(tmp_path) == [2, 4, 5]
    assert (store.of_step(2).folder / "rank").read_text() == "step 2"
    assert sorted(p.name for p in tmp_path.rglob("*") if p.is_file() and p.parent.name == "step-5") == [
        "digest.json",
        "driver.json",
        "manifest.json",
        "rank",
    ]


def test_a_best_checkpoint_stays_while_an_older_checkpoint_needs_it(tmp_path: Path):
    """That of step 1 is the best one for step 3, to which a run goes back if the newest checkpoint is damaged."""
    run(tmp_path, {1: 1, 3: 1, 4: 4})
    assert steps(tmp_path) == [1, 3, 4]
    (tmp_path / "checkpoints/step-4/rank").write_text("torn")
    loaded = []
    progress = RunStore(tmp_path).load(RL, normalizer(), lambda found: loaded.append((found.folder / "rank").read_text()))
    assert (progress.step, progress.best, loaded) == (3, BestPolicy(1, 1.0, "score"), ["step 3"])
    run(tmp_path, {5: 4, 6: 4, 7: 4})
    assert steps(tmp_path) == [4, 6, 7]


@pytest.mark.parametrize("how", ["damaged", "missing"])
def test_checkpoints_whose_best_one_is_damaged_are_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str):
    store = run(tmp_path, {1: 1, 2: 2, 3: 2})
    assert steps(tmp_path) == [2, 3]
    torn = tmp_path / "checkpoints/step-2"
    (torn / "rank").write_text("torn") if how == "damaged" else torn.rename(tmp_path / "away")
    assert RunStore(tmp_path).load(RL, normalizer(), lambda found: None) is None
    assert "checkpoint of step 3: its best checkpoint, of step 2: expected" in caplog.text
    with pytest.raises(SaveFailed, match=r"checkpoint of step 2: expected .*; run again: the stage resumes from one before it"):
        store.of_step(2)


def test_what_is_checked_by_ranks_together_is_passed_over_when_one_finds_damage(tmp_path: Path):
    run(tmp_path, {1: 1, 2: 1})
    checked: list[str] = []

    def check(folder: Path) -> str | None:
        checked.append(folder.name)
        return "expected rng-1.pt as it was written, got other content" if folder.name == "step-2" else damage(folder)

    progress = RunStore(tmp_path, check=check).load(RL, normalizer(), lambda found: None)
    assert (progress.step, checked) == (1, ["step-2", "step-1"])


def test_a_rank_lost_during_a_save_is_told_with_folder_bytes_and_remedy(tmp_path: Path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "half.pt").write_bytes(b"x" * 1500)
    found = save_lost(RoleLost("trainer rank 1: expected save to finish, got no answer within 5 s", [1]), tmp_path)
    assert found.ranks == [1]
    assert str(found) == (
        f"trainer rank 1: expected save to finish, got no answer within 5 s; got 1.5 kB of the checkpoint in {tmp_path}; raise "
        "checkpoints.save_timeout if the rank is late, or use a faster disk"
    )
