"""The training loop of SFT, reward, DPO and KTO: optimizer steps, held-out evaluation, checkpoints, and a stop by signal."""

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
    """Optimizer steps on one data set.

    train_batch: positions in the data set -> metrics, after forward and backward passes of all micro-batches of one optimizer step. Then
        the loop steps the engine.
    evaluate: metrics on held-out data, with names that begin with heldout_; None: the phase has no held-out data.
    """

    name: str
    steps: int
    batch_size: int
    num_examples: int
    train_batch: Callable[[TrainEngine, list[int]], Metrics]
    evaluate: Callable[[TrainEngine], Metrics] | None


@dataclass(frozen=True)
class TrainLoop:
    """What a phase's loop needs from the stage that runs it.

    checkpoint_every, eval_every: steps.
    first_step: number of the phase's first step in the curves.
    checkpoints: name of a phase -> its store.
    metrics_log: opens the curves for writing from a given step on.
    stop_requested: whether a signal asks for a stop; called once a step, before the step's checkpoint.
    """

    seed: int
    checkpoint_every: int
    eval_every: int
    first_step: int
    checkpoints: Callable[[str], CheckpointStore]
    metrics_log: Callable[[int], MetricsLog]
    stop_requested: Callable[[], bool]


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


def train_phase(engine: TrainEngine, phase: Phase, loop: TrainLoop) -> None:
    """Run one phase to its end, from its last checkpoint if there is one.

    Raises:
        Interrupted: a stop was requested, and the state is saved.
        NoSpace: a checkpoint can't be written.
    """
    collect_by_default()
    seed_generators(loop.seed)
    store = loop.checkpoints(phase.name)
    done = _resume(engine, store, phase)
    if done == phase.steps:  # the curves may already hold a later phase's rows
        return
    engine.train()
    curves = loop.metrics_log(loop.first_step + done)
    try:
        with Bar(f"{phase.name} step", phase.steps, done=done) as bar:
            for step in range(done, phase.steps):
                row, timings = _train_step(engine, phase, step, seed=loop.seed)
                last = step + 1 == phase.steps
                if phase.evaluate is not None and ((step + 1) % loop.eval_every == 0 or last):
                    row |= evaluate(engine, phase.evaluate)
                stop, blocked = loop.stop_requested(), 0.0
                if last or stop or (step + 1) % loop.checkpoint_every == 0:
                    score = -row["heldout_loss"] if "heldout_loss" in row else None
                    began = time.perf_counter()
                    store.write(step + 1, lambda folder: save_state(engine, folder), score=score)  # written to disk in the background
                    blocked = time.perf_counter() - began
                timings |= {"seconds": timings["seconds"] + blocked, "seconds_checkpoint": blocked}
                # The curve's row comes before the checkpoint: a run that is killed between them repeats the step and rewrites its row.
                curves.log({"step": loop.first_step + step, "phase": phase.name, **row}, timings)
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


def _train_step(engine: TrainEngine, phase: Phase, step: int, *, seed: int) -> tuple[Metrics, Metrics]:
    """One optimizer step: its metrics, and its timings."""
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


def evaluate(engine: TrainEngine, measure: Callable[[TrainEngine], Metrics]) -> Metrics:
    """Held-out metrics of the current weights, without gradients and dropout."""
    engine.eval()
    with torch.no_grad():
        metrics = measure(engine)
    engine.train()
    return metrics


def _resume(engine: TrainEngine, store: CheckpointStore, phase: Phase) -> int:
    """Load the last checkpoint. Returns the number of steps done."""
    found = store.latest()
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
    """Save the engine and the random number generators, which is all of the loop's state: the data position follows from the step."""
    engine.save(folder, "engine")
    save_random_state(folder / "rng.pt")


def load_state(engine: TrainEngine, folder: Path) -> None:
    engine.load(folder, "engine")
    load_random_state(folder / "rng.pt")


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
