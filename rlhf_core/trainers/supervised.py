"""The loop that SFT and reward training share: batches, micro-batches, held-out looks, checkpoints, a stop by signal."""

from __future__ import annotations

import functools
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import TrainingConfig
from rlhf_core.data.batching import batch_indices
from rlhf_core.engines.deepspeed_engine import EngineSettings, TrainEngine, warmup_cosine
from rlhf_core.process import Interrupted, collect_by_default
from rlhf_core.progress import Bar
from rlhf_core.tracking import MetricsLog

log = logging.getLogger("rlhf")

Metrics = dict[str, float]


@dataclass(frozen=True)
class Phase:
    """A stretch of optimizer steps on one data set.

    train_batch: takes positions in the data set, runs forward and backward of the whole optimizer step's batch (all
        micro-batches), and returns metrics; the loop then steps the engine.
    evaluate: metrics on held-out data, names beginning with heldout_; None: no held-out data in this phase.
    """

    name: str
    steps: int
    batch_size: int
    num_examples: int
    train_batch: Callable[[TrainEngine, list[int]], Metrics]
    evaluate: Callable[[TrainEngine], Metrics] | None


@dataclass(frozen=True)
class LoopSettings:
    seed: int
    checkpoint_every: int
    eval_every: int


def engine_settings(config: TrainingConfig, *, steps: int, learning_rate: float, dtype: str, seed: int) -> EngineSettings:
    """The engine of one phase: linear warm-up and a cosine over its steps."""
    warmup = max(1, round(config.warmup_fraction * steps))
    return EngineSettings(
        learning_rate=learning_rate,
        schedule=functools.partial(warmup_cosine, total=steps, warmup=warmup, floor=config.min_learning_rate_fraction),
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        zero_stage=config.zero_stage,
        offload_optimizer=config.offload_optimizer,
        dtype=dtype,
        seed=seed,
        disable_dropout=config.disable_dropout,
    )


def train_phase(
    engine: TrainEngine,
    phase: Phase,
    settings: LoopSettings,
    *,
    checkpoints: Callable[[str], CheckpointStore],
    first_step: int,
    metrics_log: Callable[[int], MetricsLog],
    stop_requested: Callable[[], bool],
) -> None:
    """Run one phase, from its checkpoint if there is one, to its end.

    Args:
        checkpoints: the store of the phase of a name.
        first_step: number of the phase's first step in the curves.
        metrics_log: opens the curves for writing from a given step on.
    Raises:
        Interrupted: a stop was asked for, and the state is saved.
        NoSpace: a checkpoint can't be written.
    """
    collect_by_default()
    seed_generators(settings.seed)
    store = checkpoints(phase.name)
    done = _resume(engine, store, phase)
    if done == phase.steps:  # the curves may already hold a later phase's rows
        return
    engine.train()
    curves = metrics_log(first_step + done)
    try:
        with Bar(f"{phase.name} step", phase.steps, done=done) as bar:
            for step in range(done, phase.steps):
                row, timings = _train_step(engine, phase, settings, step)
                if phase.evaluate is not None and ((step + 1) % settings.eval_every == 0 or step + 1 == phase.steps):
                    row |= evaluate(engine, phase.evaluate)
                last, stop = step + 1 == phase.steps, stop_requested()
                saving = _save(engine, store, step + 1, row) if last or stop or (step + 1) % settings.checkpoint_every == 0 else 0.0
                timings |= {"seconds": timings["seconds"] + saving, "seconds_checkpoint": saving}
                # First the curve, then the checkpoint: a run that is killed between them does the step again, and writes its row again.
                curves.log({"step": first_step + step, "phase": phase.name, **row}, timings)
                store.publish()
                bar.step(**{name: value for name, value in row.items() if name == "loss" or name.startswith("heldout_")})
                if stop and not last:
                    break
        store.wait()
    finally:
        curves.close()
        store.close()
    if not last:
        raise Interrupted


def _save(engine: TrainEngine, store: CheckpointStore, step: int, row: Metrics) -> float:
    """Take the snapshot of a step; what is best is so by the held-out loss. Returns the seconds for which training stood still."""
    started = time.perf_counter()
    score = -row["heldout_loss"] if "heldout_loss" in row else None
    store.write(step, lambda folder: save_state(engine, folder), score=score)
    return time.perf_counter() - started


def _train_step(engine: TrainEngine, phase: Phase, settings: LoopSettings, step: int) -> tuple[Metrics, Metrics]:
    started = time.perf_counter()
    chosen = batch_indices(step, batch_size=phase.batch_size, num_examples=phase.num_examples, seed=settings.seed)
    learning_rate = engine.learning_rate
    metrics = phase.train_batch(engine, chosen)
    grad_norm = engine.step()
    seconds = time.perf_counter() - started
    tokens = metrics.pop("tokens")
    if not np.isfinite(metrics["loss"]):
        raise ValueError(
            f"{phase.name} step {step}: expected a finite loss, got {metrics['loss']}; lower the learning rate or check the data"
        )
    return {**metrics, "learning_rate": learning_rate, "grad_norm": grad_norm}, {"seconds": seconds, "tokens_per_second": tokens / seconds}


def evaluate(engine: TrainEngine, measure: Callable[[TrainEngine], Metrics]) -> Metrics:
    engine.eval()
    with torch.no_grad():
        metrics = measure(engine)
    engine.train()
    return metrics


def _resume(engine: TrainEngine, checkpoints: CheckpointStore, phase: Phase) -> int:
    found = checkpoints.latest()
    if found is None:
        return 0
    if found.step > phase.steps:
        raise ValueError(
            f"{phase.name}: expected a checkpoint of at most {phase.steps} steps, got one of {found.step}; raise the steps or begin anew"
        )
    load_state(engine, found.folder)
    if found.step < phase.steps:
        log.info("%s: resuming from the checkpoint of step %d", phase.name, found.step)
    return found.step


def save_state(engine: TrainEngine, folder: Path) -> None:
    """Engine and random number generators: all that the loop needs; the data position follows from the step."""
    engine.save(folder, "engine")
    save_random_state(folder / "rng.pt")


def load_state(engine: TrainEngine, folder: Path) -> None:
    engine.load(folder, "engine")
    load_random_state(folder / "rng.pt")


def seed_generators(seed: int) -> None:
    """Every generator of this process. Python's and numpy's would begin with the machine's noise, and no two runs have the same state."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def save_random_state(path: Path) -> None:
    """The state of every random number generator of this process."""
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
