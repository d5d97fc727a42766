"""Finds the first settings with which a stage fits: full training or adapters, ranks, ZeRO, gradient checkpointing and micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from rlhf_core.config import Params
from rlhf_core.look.facts import MachineFacts, ModelFacts
from rlhf_core.look.schedule import power_of_two
from rlhf_core.planning.machine import Gpu, Machine, has_amx
from rlhf_core.planning.models import Model
from rlhf_core.planning.preflight import gib
from rlhf_core.planning.remedy import changed
from rlhf_core.planning.shortages import ERROR, check
from rlhf_core.planning.stages import Models, Unpredictable

LORA = {"rank": 16, "alpha": 32.0}
MOST_TOKENS, FEWEST_TOKENS = 16_384, 8192  # of a micro-batch on a GPU, without recomputation
FEWEST_CPU_TOKENS = 1024  # of a micro-batch on a CPU, where more are hardly faster
SMALL = 20_000_000  # parameters up to which PyTorch's own generation is faster on a CPU than vLLM's, which takes seconds to start

Settings = dict[str, Any]


@dataclass(frozen=True)
class Fit:
    """The settings with which a stage fits.

    why: the reason for adapters or full training. lacks: what is missing if nothing fits; empty if the stage fits.
    """

    settings: Settings
    why: str
    lacks: str = ""


def propose_fit(stage: str, params: Params, model: ModelFacts, machine: MachineFacts) -> Fit:
    """Return the first settings that fit and leave room for the prediction's error.

    Args:
        params: with lengths and batches.
    """
    if model.sizes is None:
        return Fit({}, "full training, unchecked: the planner doesn't predict the memory of this architecture")
    ladder = list(_ladder(stage, params, machine))
    method, _ = section_of(stage, params)
    with_margin, lacking = _smaller(machine.memory), ""
    for settings in ladder:
        shortage = _shortage(stage, changed(params, settings), model.sizes, with_margin)
        adapted = settings.get(f"{method}.lora") is not None
        if not shortage:
            return Fit(settings, f"adapters, because full training lacks memory: {lacking}" if adapted else "full training fits")
        lacking = lacking if adapted else shortage
    return Fit(ladder[-1], "nothing fits", shortage)


def _models(model: Model) -> Models:
    return Models(model, model, ())


def _shortage(stage: str, params: Params, model: Model, machine: Machine) -> str:
    """What a stage lacks, or why it is refused; empty if it fits."""
    try:
        plan = check(stage, params, _models(model), machine)
    except (Unpredictable, ValueError) as error:
        return str(error)
    if not plan.shortages:
        return ""
    worst = plan.shortages[0]
    return f"{gib(worst.needed)} of the {gib(worst.available)} that {worst.where} has left, beside the prediction's error"


def _smaller(machine: Machine) -> Machine:
    """Return the machine with its memory reduced by the prediction's error."""
    gpus = tuple(Gpu(gpu.total, gpu.free / (1 + ERROR)) for gpu in machine.gpus)
    return replace(machine, host=machine.host / (1 + ERROR), gpus=gpus)


def section_of(stage: str, params: Params) -> tuple[str, str]:
    """Return the keys under which a stage has its adapters and its ranks."""
    method = "sft" if stage == "train_sft" else params.alignment.method
    return method, "rl.trainer" if method == "rl" else method


def _ladder(stage: str, params: Params, machine: MachineFacts) -> Iterator[Settings]:
    """Settings to try in order, those first that change results and speed least: full training, recomputation, more ranks, adapters."""
    method, trainer = section_of(stage, params)
    if not machine.memory.gpus:
        most = section_at(trainer, params).microbatch_tokens
        for lora in (None, LORA):
            for recomputes in (False, True):
                for tokens in _halves(most, max(params.model.max_length, FEWEST_CPU_TOKENS)):
                    settings = {"gradient_checkpointing": recomputes, "microbatch_tokens": tokens}
                    yield {f"{trainer}.{name}": value for name, value in settings.items()} | {f"{method}.lora": lora}
        return
    ranks = len(machine.memory.gpus)
    fixed = {f"{trainer}.ranks": ranks} | ({"rl.rollout.engines": ranks} if method == "rl" else {})
    stages: Sequence[int] = (1, 2, 3) if ranks > 1 else (0,)
    for zero in stages:
        for recomputes in (False, True):
            for tokens in _micro_batches(method, params, ranks, recomputes=recomputes):
                settings = {"zero_stage": zero, "gradient_checkpointing": recomputes, "microbatch_tokens": tokens}
                yield fixed | {f"{trainer}.{name}": value for name, value in settings.items()} | {f"{method}.lora": None}
    for lora in (LORA, LORA | {"quantize": "nf4"}):
        for recomputes in (False, True):
            for tokens in _micro_batches(method, params, ranks, recomputes=recomputes):
                settings = {"zero_stage": stages[0], "gradient_checkpointing": recomputes, "microbatch_tokens": tokens}
                yield fixed | {f"{trainer}.{name}": value for name, value in settings.items()} | {f"{method}.lora": lora}


def section_at(key: str, params: Params) -> Any:
    return reduce(getattr, key.split("."), params)


def _micro_batches(method: str, params: Params, ranks: int, *, recomputes: bool) -> Iterator[int]:
    """Token counts to try for a forward pass on a GPU, largest first.

    They are at most what a rank has of an optimizer step. Small ones, which leave a GPU idle, are tried only with recomputation.
    """
    length = params.model.max_length
    rows = params.rl.minibatch_size if method == "rl" else section_at(method, params).batch_size * (2 if method == "dpo" else 1)
    whole = 2 * power_of_two(max(1, rows // ranks) * length - 1)
    yield from _halves(min(MOST_TOKENS, max(whole, FEWEST_TOKENS)), max(length, 1 if recomputes else min(FEWEST_TOKENS, whole)))


def _halves(most: int, fewest: int) -> Iterator[int]:
    """`most` and its successive halves, none below `fewest`; at least one number."""
    yield most
    while most // 2 >= fewest:
        most //= 2
        yield most


def device_settings(model: ModelFacts, machine: MachineFacts, *, rl: bool) -> Settings:
    """Settings that follow from the device: number format, cores, and on a CPU sampling by PyTorch for a small model.

    Args:
        rl: the policy is trained by RL, whose engine the evaluation shares.
    """
    if machine.memory.gpus:
        return {"model.dtype": "bfloat16"}
    small = model.parameters is not None and model.parameters <= SMALL
    cores = {} if machine.cores is None else {"cluster.threads": machine.cores}
    dtype = "bfloat16" if has_amx() and not small else "float32"
    backend = {"rl.rollout.backend" if rl else "evaluation.backend": "pytorch"} if small else {}
    return {"model.dtype": dtype, **backend, **cores}
