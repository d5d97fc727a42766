"""CORRECTNESS, resume: a phase that was stopped and goes on gives the weights and curves of one that wasn't, bit for bit."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import PAD, largest_difference, sequences, settings, tiny_params

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.curves import MetricsLog
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.build import load_language_model
from rlhf_core.models.forward import PolicyModule
from rlhf_core.process import Interrupted
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import Demonstration
from rlhf_core.trainers.supervised.loop import TrainLoop, engine_settings, load_random_state, save_random_state, train_phase

pytestmark = pytest.mark.usefixtures("world")
TRAIN = [Demonstration(ids, 2) for ids in sequences(20, seed=0)]
HELDOUT = [Demonstration(ids, 1) for ids in sequences(4, seed=1)]
COLUMNS = ("step", "phase", "loss", "heldout_loss", "learning_rate", "grad_norm")


def dropout_engine(folder: Path) -> TrainEngine:
    """Its forward pass draws random numbers in training, so a generator that isn't restored shows."""
    model = load_language_model(folder)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.2
    return TrainEngine(PolicyModule(model), settings())


def phase(name: str = "sft", steps: int = 7):
    return sft_phase(name, TRAIN, HELDOUT, steps=steps, batch_size=6, pad_id=PAD, microbatch_tokens=40)


class Work:
    """The scratch of a stage with two phases; each call of `run` is a process of its own, so to speak."""

    def __init__(self, folder: Path, sft_folder: Path):
        self.folder, self.sft_folder = folder, sft_folder

    def run(self, *, stop: Callable[[], bool] = lambda: False, checkpoint_every: int = 100, first_steps: int = 3) -> TrainEngine:
        torch.manual_seed(99)
        first_step = 0
        for part in (phase("pretrain", first_steps), phase()):
            engine = dropout_engine(self.sft_folder)
            loop = TrainLoop(
                seed=0,
                checkpoint_every=checkpoint_every,
                eval_every=2,
                first_step=first_step,
                checkpoints=lambda name: CheckpointStore(self.folder / name),
                metrics_log=self.curves,
                stop_requested=stop,
            )
            train_phase(engine, part, loop)
            first_step += part.steps
        return engine

    def curves(self, step: int) -> MetricsLog:
        return MetricsLog(self.folder / "curves.csv", COLUMNS, timings=None, first_step=step)

    @property
    def curve(self) -> str:
        return (self.folder / "curves.csv").read_text()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, sft_folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    work = Work(tmp_path_factory.mktemp("uninterrupted"), sft_folder)
    return work.run().state_dict(), work.curve


def after(steps: int) -> Callable[[], bool]:
    """A stop that is requested during the given step, counted over both phases."""
    requested = itertools.count(1)
    return lambda: next(requested) >= steps


@pytest.mark.parametrize("stopped_at", [1, 4, 8])
def test_resume_after_a_stop_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path, sft_folder: Path, uninterrupted, stopped_at: int):
    weights, curve = uninterrupted
    work = Work(tmp_path, sft_folder)
    with pytest.raises(Interrupted):
        work.run(stop=after(stopped_at))
    assert len(work.curve.splitlines()) == 1 + stopped_at
    assert largest_difference(work.run().state_dict(), weights) == 0
    assert work.curve == curve


def test_resume_after_a_kill_equals_an_uninterrupted_run_bit_for_bit(tmp_path: Path, sft_folder: Path, uninterrupted):
    """Killed two steps after a checkpoint: those steps are done again, and their rows aren't there twice."""
    weights, curve = uninterrupted

    class Killed(Exception):
        pass

    def kill() -> bool:
        if len(work.curve.splitlines()) == 1 + 3 + 5:
            raise Killed
        return False

    work = Work(tmp_path, sft_folder)
    with pytest.raises(Killed):
        work.run(stop=kill, checkpoint_every=3)
    assert CheckpointStore(tmp_path / "sft").latest().step == 3
    assert largest_difference(work.run(checkpoint_every=3).state_dict(), weights) == 0
    assert work.curve == curve


def test_a_stop_is_checked_once_a_step_with_saving_and_leaving(tmp_path: Path, sft_folder: Path):
    """Whenever the signal comes, what the curves have is what the checkpoint has."""
    for asked_at in (1, 2, 3):
        work = Work(tmp_path / str(asked_at), sft_folder)
        with pytest.raises(Interrupted):
            work.run(stop=after(asked_at), first_steps=50)
        assert CheckpointStore(work.folder / "pretrain").latest().step == len(work.curve.splitlines()) - 1


def test_a_stop_in_the_last_step_lets_the_phase_finish(tmp_path: Path, sft_folder: Path):
    work = Work(tmp_path, sft_folder)
    with pytest.raises(Interrupted):
        work.run(stop=after(3))  # the last step of the first phase, so it is the second one that stops
    assert CheckpointStore(tmp_path / "pretrain").latest().step == 3
    assert CheckpointStore(tmp_path / "sft").latest().step == 1


def test_curves_hold_the_held_out_loss_where_it_was_measured(uninterrupted):
    rows = [line.split(",") for line in uninterrupted[1].splitlines()[1:]]
    assert [r[1] for r in rows] == ["pretrain"] * 3 + ["sft"] * 7
    assert [bool(r[3]) for r in rows] == [False, True, True] + [False, True] * 3 + [True]


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, sft_folder: Path):
    def train_batch(engine: TrainEngine, chosen: list[int]) -> dict[str, float]:
        return {"loss": float("nan"), "tokens": 1.0}

    broken = replace(phase("broken"), train_batch=train_batch, evaluate=None)
    engine = dropout_engine(sft_folder)
    store, curves = CheckpointStore(tmp_path / "c"), Work(tmp_path, sft_folder).curves
    loop = TrainLoop(0, 100, 100, first_step=0, checkpoints=lambda _: store, metrics_log=curves, stop_requested=lambda: False)
    with pytest.raises(ValueError, match="broken step 0: expected a finite loss, got nan"):
        train_phase(engine, broken, loop)


def test_every_generator_resumes_its_state(tmp_path: Path):
    def draw() -> tuple[float, float, float]:
        return float(torch.rand(())), random.random(), float(np.random.random())

    save_random_state(tmp_path / "rng.pt")
    drawn = [draw() for _ in range(3)]
    load_random_state(tmp_path / "rng.pt")
    assert [draw() for _ in range(3)] == drawn


def test_the_engine_of_a_phase_warms_up_over_its_share_of_the_steps():
    config = tiny_params(**{"sft.warmup_fraction": 0.1, "sft.min_learning_rate_fraction": 0.2}).sft
    made = engine_settings(config, steps=20, learning_rate=1e-3, dtype="float32", seed=3)
    assert [made.schedule(s) for s in (0, 1, 2, 11, 20)] == pytest.approx([0.5, 1.0, 1.0, 0.6, 0.2])
    assert engine_settings(config, steps=3, learning_rate=1e-3, dtype="float32", seed=3).schedule(0) == 1.0
