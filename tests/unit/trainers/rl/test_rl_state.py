"""The driver's state: how it moves, that it comes back as it was, and the best policy with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.sampling.scoring import RewardNormalizer
from rlhf_core.trainers.rl.monitor import Finding, MonitorState, Track
from rlhf_core.trainers.rl.state import Best, Progress, RunStore

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


def write_policy(text: str):
    def export(folder: Path) -> None:
        folder.mkdir()
        (folder / "weights").write_text(text)

    return export


def test_a_run_starts_with_the_configured_coefficient_and_a_fixed_one_stays():
    start = Progress.start(RL)
    assert start == Progress(step=0, prompts_drawn=0, kl_coef=RL.kl.coef, best=None)
    assert start.after_step(RL, kl=100.0, prompts_drawn=300) == Progress(1, 300, RL.kl.coef, None)


def test_with_a_target_the_coefficient_follows_the_divergence():
    rl = tiny_params(**{"rl.kl.target": 2.0, "rl.kl.horizon": 1024, "rl.samples_per_step": 256}).rl
    # error clip(3 / 2 - 1, -0.2, 0.2) = 0.2 over 256 of 1024 samples: a factor of 1 + 0.2 / 4
    assert Progress(5, 0, 0.1, None).after_step(rl, kl=3.0, prompts_drawn=1).kl_coef == pytest.approx(0.1 * 1.05)
    # clip(1.9 / 2 - 1) = -0.05: 1 - 0.05 / 4
    assert Progress(5, 0, 0.1, None).after_step(rl, kl=1.9, prompts_drawn=1).kl_coef == pytest.approx(0.1 * 0.9875)


def test_only_a_higher_finite_value_is_an_improvement():
    start = Progress.start(RL)
    assert start.improves(-5.0) and not start.improves(math.nan)
    later = replace(start, step=4, best=Best(2, 0.5))
    assert later.improves(0.6) and not later.improves(0.5) and not later.improves(math.nan)


def test_state_comes_back_as_it_was(tmp_path: Path):
    found = Finding("kl", "kl_mean", 7, 1 / 7, 0.1, "stop", "step 7: ...")
    monitor = MonitorState({"kl": Track((0.1, 1 / 7), 1 / 7, 2)}, {"score": (0.1, 0.2)}, ((0.0, 0.5), (1 / 3, 0.6)), (found,), found)
    progress, before = Progress(7, 1234, 0.1 + 0.2, Best(6, 1 / 3), monitor), normalizer(0.1, 0.7, 2.0)
    progress.write(tmp_path / "driver.json", before)
    after = normalizer()
    assert Progress.read(tmp_path / "driver.json", after) == progress
    assert after.moments == before.moments


def test_a_run_ends_with_its_last_step_or_by_a_limit():
    start = Progress.start(RL)
    assert not start.finished(RL) and replace(start, step=RL.steps).finished(RL)
    stopped = Finding("kl", "kl_mean", 7, 2.0, 1.0, "stop", "")
    assert replace(start, step=7, monitor=MonitorState(stopped=stopped)).finished(RL)
    assert not replace(start, step=7, monitor=MonitorState(warnings=(stopped,))).finished(RL)


def test_no_checkpoint_is_no_progress_and_an_abandoned_best_policy_goes(tmp_path: Path):
    store = RunStore(tmp_path)
    store.keep_best(write_policy("abandoned"))
    assert RunStore(tmp_path).load(normalizer(), write_rank("")) is None
    assert not store.best_policy.exists()


def test_the_best_policy_is_that_of_the_checkpoint_whatever_came_after_it(tmp_path: Path):
    store = RunStore(tmp_path)
    store.keep_best(write_policy("of step 2"))
    save(store, Progress(3, 30, 0.1, Best(2, 1.0)), normalizer(1.0, 2.0), write_rank("three"))
    store.keep_best(write_policy("of step 4"))  # and then the run is killed
    loaded = []
    progress = RunStore(tmp_path).load(normalizer(), lambda found: loaded.append((found.folder / "rank").read_text()))
    assert (progress.step, progress.best, loaded) == (3, Best(2, 1.0), ["three"])
    assert (store.best_policy / "weights").read_text() == "of step 2"


def test_a_damaged_checkpoint_goes_back_with_its_best_policy_too(tmp_path: Path):
    store = RunStore(tmp_path)
    for step, text in ((2, "first"), (4, "second")):
        store.keep_best(write_policy(text))
        save(store, Progress(step, 10 * step, 0.1, Best(step, float(step))), normalizer(1.0, 2.0), write_rank(text))
    (tmp_path / "checkpoints/step-4/best/weights").write_text("torn")
    progress = RunStore(tmp_path).load(normalizer(), lambda found: None)
    assert progress == Progress(2, 20, 0.1, Best(2, 2.0))
    assert (store.best_policy / "weights").read_text() == "first"
