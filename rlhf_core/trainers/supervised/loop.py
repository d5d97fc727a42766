"""The training loop of SFT, reward, DPO and KTO: optimizer steps, held-out evaluation, checkpoints, and a stop by signal."""

from __future__ import annotations

import functools
import logging
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_core.algorithms.schedules import learning_rate_factor
from rlhf_core.checkpoint.digest import write_digest
from rlhf_core.checkpoint.store import CheckpointStore, Found
from rlhf_core.checkpoint.stored import download_folder, remove_folder, upload_folder
from rlhf_core.config import TrainingConfig, number_of
from rlhf_core.curves import MetricsLog, NoLog
from rlhf_core.data.batching import batch_indices
from rlhf_core.engines.deepspeed.engine import EngineSettings, TrainEngine
from rlhf_core.engines.deepspeed.rank_store import RankStore
from rlhf_core.engines.deepspeed.ranks import is_first, on_any, on_rank_zero, rank, wait_for_all, world_size
from rlhf_core.engines.deepspeed.universal import convert_engines, load_converted, of_other_ranks
from rlhf_core.paths import TIMINGS
from rlhf_core.process import Interrupted, collect_by_default
from rlhf_core.progress import Bar
from rlhf_core.stage.training import TrainRun
from rlhf_core.trainers.supervised.time_limit import ended_by_time, out_of_time

log = logging.getLogger("rlhf")

ENGINE = "engine"  # in a checkpoint

HELD_OUT = 10  # of so many examples `hold_out` takes one

Metrics = dict[str, Any]  # numbers, and in held-out ones those of `beside_untrained`


@dataclass(frozen=True)
class Phase:
    """Optimizer steps on one data set.

    train_batch: positions in the data set -> metrics, after forward and backward passes of this rank's micro-batches of one optimizer step.
        Then the loop steps the engine. Metrics are those of all ranks, `tokens` too.
    evaluate: metrics on held-out data, with names that begin with heldout_; None: the phase has no held-out data.
    """

    name: str
    steps: int
    batch_size: int
    num_examples: int
    train_batch: Callable[[TrainEngine, list[int]], Metrics]
    evaluate: Callable[[TrainEngine], Metrics] | None

    def epochs(self, steps: int) -> float:
        """Return passes over the data set that so many steps make."""
        return steps * self.batch_size / max(1, self.num_examples)


@dataclass(frozen=True)
class Best:
    """The evaluation with the lowest held-out loss, after so many steps."""

    step: int
    loss: float


@dataclass(frozen=True)
class TrainLoop:
    """What a phase's loop needs from the stage that runs it.

    checkpoint_every, eval_every: steps.
    first_step: number of the phase's first step in the curves.
    checkpoints: name of a phase -> its store; called on rank 0 only.
    metrics_log: opens the curves for writing from a given step on.
    stop_requested: whether a signal asks for a stop; called once a step, before the step's checkpoint. One rank's stop is everybody's.
    keep_best: the phase ends with the best weights by the held-out loss.
    max_minutes: of the phase, by rank 0's clock; it ends with the step in which they are over, as with its last one.
    """

    seed: int
    checkpoint_every: int
    eval_every: int
    first_step: int
    checkpoints: Callable[[str], CheckpointStore]
    metrics_log: Callable[[int], MetricsLog]
    stop_requested: Callable[[], bool]
    keep_best: bool = False
    max_minutes: float | None = None


def train_loop(run: TrainRun, config: TrainingConfig, columns: tuple[str, ...], *, first_step: int, seed: int | None = None) -> TrainLoop:
    """Return a training loop with the stage's settings, checkpoints, curves and stop signal.

    Args:
        first_step: number of the phase's first step in the curves.
        seed: None: `seed` of params.yaml.
    """

    def metrics_log(step: int) -> MetricsLog | NoLog:
        if not is_first():
            return NoLog()
        return MetricsLog(
            run.scratch / "curves.csv",
            columns,
            timings=TIMINGS / f"{run.job.stage}.csv",
            first_step=step,
        )

    return TrainLoop(
        seed=run.params.seed if seed is None else seed,
        checkpoint_every=config.checkpoint_every,
        eval_every=config.eval_every,
        keep_best=config.keep_best,
        max_minutes=config.max_minutes,
        first_step=first_step,
        checkpoints=lambda phase: CheckpointStore(run.scratch / phase, run.job.checkpoints, write_digest=write_digest),
        metrics_log=metrics_log,
        stop_requested=run.stop_requested,
    )


def engine_settings(config: TrainingConfig, *, steps: int, learning_rate: float, dtype: str, seed: int) -> EngineSettings:
    """Return the settings of one phase's engine; the learning rate's schedule is over the steps of the phase."""
    return EngineSettings(
        learning_rate=learning_rate,
        schedule=functools.partial(
            learning_rate_factor,
            schedule=config.schedule,
            total=steps,
            warmup=max(1, round(config.warmup_fraction * steps)),
            floor=config.min_learning_rate_fraction,
            decay_fraction=config.decay_fraction,
        ),
        optimizer=config.optimizer,
        betas=(config.betas[0], config.betas[1]),
        eps=config.eps,
        ema_decay=config.ema_decay,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        zero_stage=config.zero_stage,
        offload_optimizer=config.offload_optimizer,
        offload_parameters=config.offload_parameters,
        gradient_checkpointing=config.gradient_checkpointing,
        dtype=dtype,
        seed=seed,
        disable_dropout=config.disable_dropout,
    )


def train_phase(engine: TrainEngine, phase: Phase, loop: TrainLoop) -> Metrics:
    """Run one phase to its end, from its last checkpoint if there is one. Afterwards the engine holds the weights to publish.

    These are the weights of the last step, which is that in which max_minutes are over, if they are; or with keep_best those of the
    evaluation with the lowest heldout_loss, of equal ones the earliest; with ema_decay their average. The engine can't be trained further.

    Returns:
        steps and the epochs that they make; planned_steps and ended_by where max_minutes ended the phase; held-out metrics of the weights,
        if the phase has held-out data; with keep_best also best_step, their step counted from 1.
    Raises:
        Interrupted: a stop was requested, and the state is saved.
        SaveFailed: a checkpoint can't be written.
        ValueError: keep_best without held-out data.
    """
    if loop.keep_best and phase.evaluate is None:
        raise ValueError(f"keep_best: expected held-out data to judge {phase.name} by, got none; add some, or set keep_best to false")
    steps, epochs = number_of(phase.steps, "step"), number_of(float(f"{phase.epochs(phase.steps):.3g}"), "epoch")
    log.info("%s: %s of %d, %s of %d examples", phase.name, steps, phase.batch_size, epochs, phase.num_examples)
    collect_by_default()
    seed_generators(loop.seed + rank())
    store = RankStore(lambda: loop.checkpoints(phase.name))
    try:
        done, best, seconds = _resume(engine, store, phase, loop)
        if done < phase.steps and not out_of_time(seconds, loop.max_minutes):  # otherwise the curves may already hold a later phase's rows
            done, best = _train_steps(engine, phase, loop, store, done=done, best=best, seconds=seconds)
        if best is not None and best.step != done:
            log.info("%s: the best held-out loss, %.6g, is that of step %d of %d", phase.name, best.loss, best.step, done)
            load_state(engine, store.of_step(best.step), phase.name)
    finally:
        store.close()
    engine.exchange_average()
    metrics = {"steps": done, "epochs": phase.epochs(done)}
    if done < phase.steps:
        metrics |= ended_by_time(phase.name, done, phase.steps)
    if phase.evaluate is not None:
        metrics |= evaluate(engine, phase.evaluate)
    return metrics if best is None else metrics | {"best_step": best.step}


def _train_steps(
    engine: TrainEngine, phase: Phase, loop: TrainLoop, store: RankStore, *, done: int, best: Best | None, seconds: float
) -> tuple[int, Best | None]:
    """Run the steps after `done`, with evaluations, curves and checkpoints.

    Args:
        best, seconds: of the steps done.
    Returns:
        The number of steps done, and with keep_best the best evaluation, otherwise None.
    """
    engine.train()
    began = time.monotonic() - seconds
    curves = loop.metrics_log(loop.first_step + done)
    try:
        with Bar(f"{phase.name} step", phase.steps, done=done) as bar:
            for step in range(done, phase.steps):
                row, timings = _train_step(engine, phase, step, seed=loop.seed)
                seconds = time.monotonic() - began
                is_over = loop.max_minutes is not None and on_any(is_first() and out_of_time(seconds, loop.max_minutes))
                last, improved = is_over or step + 1 == phase.steps, False
                if phase.evaluate is not None and ((step + 1) % loop.eval_every == 0 or last):
                    with engine.averaged():
                        row |= evaluate(engine, phase.evaluate)
                    row.pop("untrained", None)  # not a curve
                    improved = loop.keep_best and row["heldout_loss"] < (math.inf if best is None else best.loss)  # never NaN
                    best = Best(step + 1, row["heldout_loss"]) if improved else best
                stop = on_any(loop.stop_requested())
                if last or stop or improved or (step + 1) % loop.checkpoint_every == 0:
                    timings |= _write_checkpoint(engine, store, step + 1, row, timings, best, seconds)
                # The curve's row comes before the checkpoint: a run that is killed between them repeats the step and rewrites its row.
                curves.log({"step": loop.first_step + step, "phase": phase.name, **row}, timings)
                store.publish()
                bar.step(**{name: value for name, value in row.items() if name == "loss" or name.startswith("heldout_")})
                if last or stop:
                    break
        store.wait()
    finally:
        curves.close()
    if not last:
        raise Interrupted
    return step + 1, best


def _write_checkpoint(
    engine: TrainEngine, store: RankStore, steps: int, row: Metrics, timings: Metrics, best: Best | None, seconds: float
) -> Metrics:
    """Write the state after so many steps; `store.publish()` makes it a checkpoint. Returns the timings with the time that it takes."""
    began = time.perf_counter()
    score = -row["heldout_loss"] if "heldout_loss" in row else None
    best_step = None if best is None else best.step
    store.write(steps, lambda folder: save_state(engine, folder), score=score, best=best_step, seconds=seconds)
    blocked = time.perf_counter() - began
    return {"seconds": timings["seconds"] + blocked, "seconds_checkpoint": blocked}


def _train_step(engine: TrainEngine, phase: Phase, step: int, *, seed: int) -> tuple[Metrics, Metrics]:
    """Run one optimizer step, and return its metrics and its timings."""
    began = time.perf_counter()
    chosen = batch_indices(step, batch_size=phase.batch_size, num_examples=phase.num_examples, seed=seed)
    learning_rate = engine.learning_rate
    metrics = phase.train_batch(engine, chosen)
    grad_norm = engine.step()
    seconds = time.perf_counter() - began
    tokens = metrics.pop("tokens")
    if not np.isfinite(metrics["loss"]):
        raise ValueError(
            f"{phase.name} step {step}: expected a finite loss, got {metrics['loss']}; lower the learning rate or check the data"
        )
    return {**metrics, "learning_rate": learning_rate, "grad_norm": grad_norm}, {"seconds": seconds, "tokens_per_second": tokens / seconds}


def beside_untrained(untrained: torch.Tensor, losses: torch.Tensor, *, accuracy_error: float) -> dict[str, dict[str, float]]:
    """Return the held-out metric `untrained`: by how much the losses [N] are lower than an untrained model's, for `stage.unlearned`;
    nothing for one loss.

    loss: mean of `untrained` [N]. gain, gain_error: mean of the differences, and its standard error. accuracy_error: standard error of the
    held-out accuracy of a model that guesses.
    """
    if len(losses) < 2:
        return {}
    gains = (untrained - losses).double()
    found = {"loss": float(untrained.mean()), "gain": float(gains.mean()), "gain_error": float(gains.std()) / math.sqrt(len(gains))}
    return {"untrained": {**found, "accuracy_error": accuracy_error}}


def hold_out(examples: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return examples to train on, and every HELD_OUT-th to judge by, for a stage that makes its examples itself, one for each prompt."""
    judged = slice(HELD_OUT - 1, None, HELD_OUT)
    trained = list(examples)
    del trained[judged]
    return trained, examples[judged]


def evaluate(engine: TrainEngine, measure: Callable[[TrainEngine], Metrics]) -> Metrics:
    """Return held-out metrics of the current weights, computed without gradients and dropout."""
    engine.eval()
    with torch.no_grad():
        metrics = measure(engine)
    engine.train()
    return metrics


def _resume(engine: TrainEngine, store: RankStore, phase: Phase, loop: TrainLoop) -> tuple[int, Best | None, float]:
    """Load the last checkpoint. Returns the number of steps done, with keep_best the best evaluation among them, and their seconds."""
    found = store.latest()
    if found is None:
        return 0, None, 0.0
    if found.step > phase.steps:
        raise ValueError(
            f"{phase.name}: expected a checkpoint of at most {phase.steps} steps, got {found.step}; raise epochs or steps, or begin anew"
        )
    load_state(engine, found, phase.name)
    if found.step < phase.steps:
        log.info("%s: resuming from the checkpoint of step %d", phase.name, found.step)
    return found.step, _best_of(found, store) if loop.keep_best else None, found.manifest.get("seconds", 0.0)


def _best_of(found: Found, store: RankStore) -> Best | None:
    """Return the best evaluation up to a checkpoint; None: nothing was evaluated. Any later one is better than a loss of other data or
    another kind, from before checkpoints.resume_from.
    """
    best = found if found.manifest["best"] == found.step else store.of_step(found.manifest["best"])
    if "best_loss" in best.begun_anew:
        return Best(found.step, math.inf)
    score = best.manifest["score"]
    return None if score is None else Best(best.step, -score)


def save_state(engine: TrainEngine, folder: Path) -> list[str]:
    """Save the engine and the random number generators, which is all of the loop's state: the data position follows from the step.

    Returns:
        The names of what this rank wrote into.
    """
    generators = f"rng-{rank()}.pt"
    engine.save(folder, ENGINE)
    save_random_state(folder / generators)
    return [ENGINE, generators]


def load_state(engine: TrainEngine, found: Found, subject: str) -> None:
    """Load what `save_state` wrote on any number of ranks."""
    saved_by = found.manifest["world_size"]
    if saved_by == world_size():
        engine.load(found.folder, ENGINE)
    else:
        if is_first():
            log.warning("%s", of_other_ranks(subject, found.step, key="ranks", saved_by=saved_by, ranks=world_size()))
        engine.check_redistributable()
        universal = found.folder.parent / "universal"

        def convert() -> None:
            convert_engines(found.folder, [ENGINE], universal)
            upload_folder(universal)

        on_rank_zero(convert, subject=subject)
        download_folder(universal)
        load_converted(engine, found.folder, ENGINE, universal)
        wait_for_all()
        on_rank_zero(lambda: remove_folder(universal), subject=subject)
    load_random_state(random_state_of(found.folder, rank()))


def random_state_of(folder: Path, number: int, name: str = "rng") -> Path:
    """Return the file with a rank's generators; that of the first rank where the checkpoint was saved by others."""
    own = folder / f"{name}-{number}.pt"
    return own if own.exists() else folder / "rng-0.pt"


def seed_generators(seed: int) -> None:
    """Seed every random number generator of this process. Python and numpy would seed theirs from the machine's entropy."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_random_state(path: Path) -> None:
    """Save the state of every random number generator of this process."""
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": (kind, torch.from_numpy(keys), *rest)}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    torch.save(state, path)


def load_random_state(path: Path) -> None:
    state = torch.load(path, weights_only=True)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy(), *rest))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
