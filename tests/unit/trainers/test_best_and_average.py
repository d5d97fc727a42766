"""The weights that a phase ends with: the best by the held-out loss, or the average; undisturbed and interrupted."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from supervised_ranks import ticking
from tiny_models import PAD, largest_difference, policy_engine, sequences
from whole_matrix import cells

from rlhf_core.checkpoint.settings import Origin, StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore, checkpoint_steps
from rlhf_core.curves import MetricsLog
from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.process import Interrupted
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised import loop as supervised
from rlhf_core.trainers.supervised.demonstrations import Demonstration
from rlhf_core.trainers.supervised.loop import HELD_OUT, Metrics, Phase, TrainLoop, hold_out, train_phase

pytestmark = pytest.mark.usefixtures("world")
TRAIN = [Demonstration(ids, 1) for ids in sequences(6, seed=0)]  # few, which training learns by heart
# The same with every third token exchanged for another: training improves it until it learns TRAIN by heart.
HELDOUT = [Demonstration([t if k % 3 else 5 + (t + 100) % 256 for k, t in enumerate(d.ids)], 1) for d in TRAIN]
STEPS = 12
DECAY = 0.6


def phase(steps: int = STEPS) -> Phase:
    return sft_phase("sft", TRAIN, HELDOUT, steps=steps, batch_size=3, pad_id=PAD, microbatch_tokens=40)


@dataclass
class Run:
    """A phase in a folder, which may be interrupted and run again."""

    folder: Path
    sft_folder: Path
    keep_best: bool = True
    engine: dict[str, Any] = field(default_factory=dict)
    settings: StoreSettings = field(default_factory=StoreSettings)
    max_minutes: float | None = None
    eval_every: int = 1

    def run(
        self, *, of: Phase | None = None, stop: Callable[[], bool] = lambda: False, checkpoint_every: int = 100
    ) -> tuple[TrainEngine, Metrics]:
        how = {"learning_rate": 4e-2, "schedule": lambda step: 1.0, "weight_decay": 0.0, **self.engine}
        engine = policy_engine(self.sft_folder, **how)
        loop = TrainLoop(
            seed=0,
            checkpoint_every=checkpoint_every,
            eval_every=self.eval_every,
            first_step=0,
            checkpoints=lambda name: CheckpointStore(self.folder / name, self.settings),
            metrics_log=self.curves,
            stop_requested=stop,
            keep_best=self.keep_best,
            max_minutes=self.max_minutes,
        )
        return engine, train_phase(engine, of or phase(), loop)

    def curves(self, step: int) -> MetricsLog:
        columns = ("step", "phase", "loss", "heldout_loss", "learning_rate", "grad_norm")
        return MetricsLog(self.folder / "curves.csv", columns, timings=None, first_step=step)

    @property
    def rows(self) -> list[dict[str, str]]:
        with (self.folder / "curves.csv").open() as file:
            return list(csv.DictReader(file))

    @property
    def heldout(self) -> list[float]:
        return [float(row["heldout_loss"]) for row in self.rows]


def after(steps: int) -> Callable[[], bool]:
    asked = itertools.count(1)
    return lambda: next(asked) >= steps


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, sft_folder: Path) -> tuple[dict[str, torch.Tensor], Metrics, list[float]]:
    run = Run(tmp_path_factory.mktemp("undisturbed"), sft_folder)
    engine, metrics = run.run()
    return engine.state_dict(), metrics, run.heldout


def test_the_best_weights_by_the_held_out_loss_are_those_of_a_run_that_ends_there(tmp_path: Path, sft_folder: Path, undisturbed):
    weights, metrics, heldout = undisturbed
    best = heldout.index(min(heldout)) + 1
    assert 2 <= best <= STEPS - 3  # or this shows nothing
    assert metrics["best_step"] == best and metrics["heldout_loss"] == pytest.approx(min(heldout), rel=1e-6)
    short, found = Run(tmp_path / "short", sft_folder, keep_best=False).run(of=phase(best))
    assert largest_difference(weights, short.state_dict()) == 0
    assert found == {"steps": best, "epochs": best * 3 / len(TRAIN), "heldout_loss": metrics["heldout_loss"]}
    last, _ = Run(tmp_path / "last", sft_folder, keep_best=False).run()
    assert largest_difference(weights, last.state_dict()) > 1e-3


@pytest.mark.parametrize("stopped_at", cells(range(1, STEPS), [1, 6, STEPS - 1]))
def test_the_best_weights_survive_a_stop_in_any_step(tmp_path: Path, sft_folder: Path, undisturbed, stopped_at: int):
    weights, metrics, heldout = undisturbed
    run = Run(tmp_path, sft_folder)
    with pytest.raises(Interrupted):
        run.run(stop=after(stopped_at))
    engine, found = run.run()
    assert found == metrics and run.heldout == heldout
    assert largest_difference(engine.state_dict(), weights) == 0
    again, found = run.run()  # killed while the model was saved
    assert found == metrics and largest_difference(again.state_dict(), weights) == 0


@pytest.mark.parametrize("again", [False, True])
def test_the_best_loss_of_another_kind_is_not_compared_with(tmp_path: Path, sft_folder: Path, undisturbed, again: bool):
    """The other work's losses are 100 lower, so that none of this work's would be better."""
    _, _, heldout = undisturbed
    before, now = Origin(config="before"), Origin(config="now")
    of = phase()
    low = replace(of, evaluate=lambda engine: {"heldout_loss": of.evaluate(engine)["heldout_loss"] - 100})
    with pytest.raises(Interrupted):
        Run(tmp_path, sft_folder, settings=StoreSettings(origin=before)).run(of=low, stop=after(3))
    run = Run(tmp_path, sft_folder, settings=StoreSettings(origin=now, accepted=(before,), begun_anew=(("best_loss",),), keep_best=1))
    if again:  # interrupted before a loss of this work is the best
        with pytest.raises(Interrupted):
            run.run(of=replace(of, evaluate=lambda engine: {"heldout_loss": 1e6}), stop=after(1))
    _, found = run.run()
    assert found["best_step"] == 4 + again + min(range(STEPS - 3 - again), key=heldout[3 + again :].__getitem__)
    kept = StoreSettings(origin=now, accepted=(before,), begun_anew=((),))
    unchanged = Run(tmp_path / "kept", sft_folder, settings=kept)
    with pytest.raises(Interrupted):
        replace(unchanged, settings=StoreSettings(origin=before)).run(of=low, stop=after(3))
    assert unchanged.run()[1]["best_step"] <= 3


def test_the_best_weights_survive_a_kill_and_a_damaged_checkpoint(tmp_path: Path, sft_folder: Path, undisturbed):
    weights, metrics, heldout = undisturbed
    run = Run(tmp_path, sft_folder)

    class Killed(Exception):
        pass

    def kill() -> bool:
        if len(run.heldout) == STEPS - 2:
            raise Killed
        return False

    with pytest.raises(Killed):
        run.run(stop=kill, checkpoint_every=3)
    newest = tmp_path / "sft" / f"step-{checkpoint_steps(tmp_path / 'sft')[0]}"
    rng = newest / "rng-0.pt"
    rng.write_bytes(rng.read_bytes()[:-1] + b"?")
    engine, found = run.run(checkpoint_every=3)
    assert found == metrics and run.heldout == heldout
    assert largest_difference(engine.state_dict(), weights) == 0


def test_the_best_is_one_more_checkpoint_and_no_copy(tmp_path: Path, sft_folder: Path, undisturbed):
    _, metrics, _ = undisturbed
    Run(tmp_path, sft_folder).run(checkpoint_every=1)
    assert checkpoint_steps(tmp_path / "sft") == [STEPS, STEPS - 1, metrics["best_step"]]
    assert CheckpointStore(tmp_path / "sft").latest().manifest["best"] == metrics["best_step"]


def measured(values: list[float]) -> Phase:
    """A phase whose held-out losses are given, step after step; the end asks once more."""
    given = iter([*values, 0.0])
    return replace(phase(len(values)), evaluate=lambda engine: {"heldout_loss": next(given)})


@pytest.mark.parametrize(
    ("values", "best"),
    [([3.0, 2.0, 2.0, 2.5], 2), ([1.0, 2.0], 1), ([3.0, 2.0, 1.0], 3), ([math.nan, 2.0, math.nan], 2), ([math.nan, math.nan], None)],
    ids=["earliest of equal ones", "first", "last", "not a number", "nothing but that"],
)
def test_the_best_step_is_that_of_the_lowest_held_out_loss(tmp_path: Path, sft_folder: Path, values: list[float], best: int | None):
    engine, metrics = Run(tmp_path / "best", sft_folder).run(of=measured(values))
    assert metrics.get("best_step") == best
    expected, _ = Run(tmp_path / "expected", sft_folder, keep_best=False).run(of=phase(best or len(values)))
    assert largest_difference(engine.state_dict(), expected.state_dict()) == 0


def test_keep_best_without_held_out_data_is_refused(tmp_path: Path, sft_folder: Path):
    with pytest.raises(ValueError, match="keep_best: expected held-out data to judge sft by, got none"):
        Run(tmp_path, sft_folder).run(of=replace(phase(), evaluate=None))


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_the_average_is_evaluated_and_is_what_the_phase_ends_with(tmp_path: Path, sft_folder: Path, zero_stage: int):
    """By hand: the weights after each step, of runs that end there, averaged; their held-out loss is in the curves."""
    how = {"keep_best": False, "engine": {"zero_stage": zero_stage}}
    run = Run(tmp_path / "average", sft_folder, keep_best=False, engine={"ema_decay": DECAY, "zero_stage": zero_stage})
    engine, metrics = run.run(of=phase(3))
    after = [Run(tmp_path / str(k), sft_folder, **how).run(of=phase(k))[0].state_dict() for k in (1, 2, 3)]
    shares = [DECAY**2, DECAY, 1.0]
    expected = {name: sum(s * w[name] for s, w in zip(shares, after, strict=True)) / sum(shares) for name in after[0]}
    assert largest_difference(engine.state_dict(), expected) < 1e-6
    assert metrics["heldout_loss"] == pytest.approx(run.heldout[-1], rel=1e-6)
    live = Run(tmp_path / "live", sft_folder, **how)
    live.run(of=phase(3))
    assert run.heldout[0] == pytest.approx(live.heldout[0], rel=1e-5)  # after one step the average is the weights
    assert abs(run.heldout[2] - live.heldout[2]) > 1e-3


@pytest.mark.parametrize("stopped_at", [None, 4, 9])
def test_the_best_average_is_that_of_the_step_with_the_lowest_held_out_loss(tmp_path: Path, sft_folder: Path, stopped_at: int | None):
    run = Run(tmp_path / "best", sft_folder, engine={"ema_decay": DECAY})
    if stopped_at is not None:
        with pytest.raises(Interrupted):
            run.run(stop=after(stopped_at))
    engine, metrics = run.run()
    best = run.heldout.index(min(run.heldout)) + 1
    assert metrics["best_step"] == best < STEPS
    expected, _ = Run(tmp_path / "expected", sft_folder, keep_best=False, engine={"ema_decay": DECAY}).run(of=phase(best))
    assert largest_difference(engine.state_dict(), expected.state_dict()) == 0


def test_examples_to_judge_by_are_every_tenth_and_not_trained_on():
    trained, judged = hold_out(list(range(2 * HELD_OUT + 3)))
    assert judged == [HELD_OUT - 1, 2 * HELD_OUT - 1]
    assert sorted(trained + judged) == list(range(2 * HELD_OUT + 3))
    assert hold_out([1, 2]) == ([1, 2], [])


@pytest.fixture
def minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The training loop's clock, which moves by a minute with each reading: once before the first step, and after each."""
    monkeypatch.setattr(supervised, "time", ticking(60))


@pytest.mark.usefixtures("minutes")
def test_a_phase_ends_with_the_step_in_which_its_minutes_are_over(tmp_path: Path, sft_folder: Path, caplog):
    """As one that ends there: evaluated, with a checkpoint, and with the weights of so many steps."""
    run = Run(tmp_path / "timed", sft_folder, keep_best=False, max_minutes=4.5, eval_every=100)
    engine, metrics = run.run()
    short, expected = Run(tmp_path / "short", sft_folder, keep_best=False).run(of=phase(5))
    assert metrics == expected | {"planned_steps": STEPS, "ended_by": "max_minutes"} and metrics["steps"] == 5
    assert largest_difference(engine.state_dict(), short.state_dict()) == 0
    assert run.rows[-1]["step"] == "4" and float(run.rows[-1]["heldout_loss"]) == pytest.approx(metrics["heldout_loss"], rel=1e-6)
    assert checkpoint_steps(tmp_path / "timed/sft") == [5]
    assert (
        "sft: max_minutes ended the training after step 5 of 12, at 42% of the learning rate's schedule, which is not bent" in caplog.text
    )


@pytest.mark.usefixtures("minutes")
@pytest.mark.parametrize("stopped_at", [1, 3, 4])
def test_the_minutes_before_a_stop_count_and_a_phase_that_they_ended_trains_no_more(tmp_path: Path, sft_folder: Path, stopped_at: int):
    run = Run(tmp_path / "whole", sft_folder, keep_best=False, max_minutes=4.5)
    engine, metrics = run.run()
    cut = replace(run, folder=tmp_path / "cut")
    with pytest.raises(Interrupted):
        cut.run(stop=after(stopped_at))
    for _ in range(2):  # the second time as if the stage had been killed while the model was saved
        resumed, found = cut.run()
        assert found == metrics and cut.heldout == run.heldout
        assert largest_difference(resumed.state_dict(), engine.state_dict()) == 0


@pytest.mark.usefixtures("minutes")
def test_minutes_that_are_over_leave_the_best_weights_so_far(tmp_path: Path, sft_folder: Path, undisturbed):
    weights, metrics, _ = undisturbed
    assert metrics["best_step"] < STEPS - 1
    engine, found = Run(tmp_path, sft_folder, max_minutes=STEPS - 1.5).run()
    assert (found["steps"], found["best_step"], found["heldout_loss"]) == (STEPS - 1, metrics["best_step"], metrics["heldout_loss"])
    assert largest_difference(engine.state_dict(), weights) == 0
