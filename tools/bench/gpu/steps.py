"""Times optimizer steps of the trainers, with the stages' own loop, engine, losses and micro-batches.

All rows are one batch, so that every step has the same examples and repetitions differ only by the machine.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.config import Params, parse_params, set_key
from rlhf_core.curves import MetricsLog
from rlhf_core.engines.deepspeed.engine import TrainEngine, join_world
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import load_language_model, new_scalar_model
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.lora import add_adapters
from rlhf_core.models.probe import can_share_prefixes
from rlhf_core.models.score_head import probe_score_head
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.trainers.preference.train import PreferenceRun, train_on_pairs
from rlhf_core.trainers.reward.train import encode_comparisons, reward_phase
from rlhf_core.trainers.sft.train import sft_phase
from rlhf_core.trainers.supervised.demonstrations import encode_demonstrations
from rlhf_core.trainers.supervised.loop import TrainLoop, engine_settings, train_phase
from tools.bench.gpu.flops import Passed
from tools.bench.gpu.shapes import MAX_LENGTH, Lengths, demonstrations, pairs
from tools.bench.workload import PLAIN
from tools.clerk import clerk_tree

NEVER = 10**9
WARMUP = 2  # untimed first steps; the first creates the optimizer's state


@dataclass(frozen=True)
class Steps:
    """A measurement of a method, as it is written to JSON.

    method: sft, reward or dpo. model: folder of the language model. rows: demonstrations or pairs of a batch.
    prompt, response: lengths in tokens, (least, most). lora: section of params.yaml.
    window: steps timed together; repetitions: number of windows.
    """

    method: str
    model: str
    rows: int
    prompt: tuple[int, int]
    response: tuple[int, int]
    microbatch_tokens: int
    window: int
    repetitions: int
    lora: dict[str, Any] | None = None

    @property
    def params(self) -> Params:
        tree = clerk_tree()
        own = {"batch_size": self.rows, "learning_rate": 1e-5, "microbatch_tokens": self.microbatch_tokens, "zero_stage": 2}
        for key, value in {**PLAIN, **own, "lora": self.lora}.items():
            set_key(tree, f"{self.method}.{key}", value)
        set_key(tree, "model.dtype", "bfloat16")
        set_key(tree, "model.max_length", MAX_LENGTH)
        return parse_params(tree)

    @property
    def lengths(self) -> Lengths:
        return Lengths(tuple(self.prompt), tuple(self.response))


@dataclass(frozen=True)
class Measured:
    """The result of a measurement.

    seconds: seconds of a step, per window. passed: tokens of a step. attention: the model's implementation of attention.

    bytes: `peak_bytes` of the timed steps; load: `peak_bytes` of everything before.
    """

    seconds: list[float]
    passed: Passed
    attention: str
    bytes: dict[str, float]
    load: dict[str, float]


class Enough(Exception):
    """Raised when all windows are timed, to leave the loop before it saves."""


def measure_steps(steps: Steps) -> dict[str, Any]:
    """Measure a method's steps, and return `Measured` as a dict."""
    join_world()
    watch = Watch(steps)
    with tempfile.TemporaryDirectory() as folder, watch:
        try:
            METHODS[steps.method](steps, Path(folder), loop(steps, Path(folder), watch))
        except Enough:
            return asdict(watch.measured())
    raise AssertionError("the loop ended before its windows")


class Watch:
    """The loop's stop callback, called once a step. Counts tokens in the first step and times the others."""

    def __init__(self, steps: Steps):
        self._steps, self._done = steps, 0
        self._edges: list[float] = []
        self._batches: list[TokenBatch] = []
        self._load: dict[str, float] = {}
        self._attention = ""

    def __enter__(self) -> Watch:
        self._hook = register_module_forward_pre_hook(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        self._hook.remove()

    def _see(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        if isinstance(module, PolicyModule | ScalarModule) and torch.is_grad_enabled():  # false for the reference
            self._batches.append(arguments[0])
            self._attention = module.model.config._attn_implementation

    def __call__(self) -> bool:
        self._done += 1
        if self._done == 1:
            self._hook.remove()
        if (self._done - WARMUP) % self._steps.window == 0 and self._done >= WARMUP:
            synchronize()
            self._edges.append(time.perf_counter())
        if self._done == WARMUP:
            self._load = peak_bytes()
            reset_peak()
        if len(self._edges) > self._steps.repetitions:
            raise Enough
        return False

    def measured(self) -> Measured:
        seconds = [(b - a) / self._steps.window for a, b in zip(self._edges, self._edges[1:], strict=False)]
        assert self._batches, "no micro-batch of the first step was seen"
        passed = sum((count(batch, pad_id=0) for batch in self._batches), Passed(0, 0, 0, 0.0, 0))
        return Measured(seconds, passed, self._attention, peak_bytes(), self._load)


def count(batch: TokenBatch, *, pad_id: int) -> Passed:
    """The tokens of a micro-batch; no real token may equal `pad_id`.

    A plain sequence of n tokens has n^2 / 2 visible pairs; a branch of b tokens after a prefix of p has b p + b^2 / 2.
    """
    if batch.segments is None:
        lengths = (batch.input_ids != pad_id).sum(1).double()
        tokens, sequences, visible = lengths.sum(), lengths.sum(), (lengths**2 / 2).sum()
    else:
        most = int(batch.segments.max())
        sizes = torch.stack([(batch.segments == k).sum(1) for k in range(most + 1)], 1).double()  # [B, prefix and branches]
        prefix, branches = sizes[:, :1], sizes[:, 1:]
        tokens, sequences = sizes.sum(), (branches + prefix * (branches > 0)).sum()
        visible = (sizes**2 / 2).sum() + (branches * prefix).sum()
    return Passed(int(tokens), batch.input_ids.numel(), int(sequences), float(visible), int(batch.selected.sum()))


# The methods


def loop(steps: Steps, folder: Path, watch: Callable[[], bool]) -> TrainLoop:
    """A loop of optimizer steps alone, without checkpoints and evaluation."""

    def curves(step: int) -> MetricsLog:
        return MetricsLog(folder / "curves.csv", COLUMNS[steps.method], timings=None, first_step=step)

    return TrainLoop(
        seed=0,
        checkpoint_every=NEVER,
        eval_every=NEVER,
        first_step=0,
        checkpoints=lambda phase: CheckpointStore(folder / phase),
        metrics_log=curves,
        stop_requested=watch,
    )


def sft(steps: Steps, folder: Path, loop: TrainLoop) -> None:
    params, tokenizer = steps.params, load_tokenizer(steps.model, trust_remote_code=False)
    rows = demonstrations(steps.rows, steps.lengths)
    train, dropped = encode_demonstrations(rows, tokenizer, max_length=MAX_LENGTH)
    assert not dropped
    section, sizes = params.sft, {"steps": total(steps), "batch_size": steps.rows, "microbatch_tokens": params.sft.microbatch_tokens}
    phase = sft_phase("sft", train, [], pad_id=tokenizer.pad_token_id, **sizes)
    model = load_language_model(Path(steps.model), training_dtype=params.model.dtype)
    add_adapters(model, section.lora, seed=0)
    settings = engine_settings(section, steps=total(steps), learning_rate=section.learning_rate, dtype=params.model.dtype, seed=0)
    train_phase(TrainEngine(PolicyModule(model), settings), phase, loop)


def reward(steps: Steps, folder: Path, loop: TrainLoop) -> None:
    """Train the reward model as the stage train_reward does."""
    params, tokenizer = steps.params, load_tokenizer(steps.model, trust_remote_code=False)
    section = params.reward
    model = new_scalar_model(Path(steps.model), tokenizer, trust_remote_code=False, training_dtype=params.model.dtype)
    shares = probe_score_head(model).per_token and can_share_prefixes(model, max_length=MAX_LENGTH)
    rows = pairs(steps.rows, steps.lengths)
    comparisons, dropped = encode_comparisons(
        rows, tokenizer, max_length=MAX_LENGTH, max_shared_tokens=section.microbatch_tokens if shares else 0
    )
    assert not dropped
    phase = reward_phase(
        comparisons,
        [],
        steps=total(steps),
        batch_size=steps.rows,
        pad_id=tokenizer.pad_token_id,
        microbatch_tokens=section.microbatch_tokens,
        margin=section.margin,
        centering_coef=section.centering_coef,
    )
    settings = engine_settings(section, steps=total(steps), learning_rate=section.learning_rate, dtype=params.model.dtype, seed=0)
    train_phase(TrainEngine(ScalarModule(model), settings), phase, loop)


def dpo(steps: Steps, folder: Path, loop: TrainLoop) -> None:
    params = steps.params
    run = PreferenceRun(start=Path(steps.model), steps=total(steps), model=params.model, scratch=folder, loop=loop)
    train_on_pairs(pairs(steps.rows, steps.lengths), [], params.dpo, run)


METHODS = {"sft": sft, "reward": reward, "dpo": dpo}
_COMMON = ("step", "phase", "loss", "learning_rate", "grad_norm")
COLUMNS = {
    "sft": _COMMON,
    "reward": (*_COMMON, "accuracy"),
    "dpo": (*_COMMON, *("reward_accuracy", "reward_margin", "chosen_reward", "rejected_reward", "chosen_logprob", "rejected_logprob")),
}


def total(steps: Steps) -> int:
    """Return the number of optimizer steps: one more than timed, so that the last one, which saves, is never reached."""
    return WARMUP + steps.window * steps.repetitions + 1


# The device


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> dict[str, float]:
    """The peak since `reset_peak`, allocated and reserved by torch on the GPU; without a GPU the peak resident set since the start."""
    if torch.cuda.is_available():
        return {"allocated": float(torch.cuda.max_memory_allocated()), "reserved": float(torch.cuda.max_memory_reserved())}
    import resource

    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0}
