"""Cases of optimizer steps and their figures, shared by the parts training and lora."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.memory import Training, adapter_parameters, head_training, training_states, trunk_activations
from rlhf_core.planning.shape import ModelShape
from rlhf_core.process import configure_process
from tools.bench.gpu.cases import Case, measure_apart, measure_here, run_or_die
from tools.bench.gpu.flops import Passed, step_flops, utilization
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import SHAPES, TINY, argument_parser, model_folder, models_folder, shape_name

RESERVE = 3 * GIB  # of a GPU, reserved as in the planner
ZERO_STAGE = 2
CASE_SECONDS = 240.0
METHODS = {"sft": "SFT", "reward": "reward model", "dpo": "DPO"}
ROWS = {"sft": 64, "reward": 32, "dpo": 32}
ON_GPU: dict[str, Any] = {"prompt": (64, 512), "response": (64, 1024), "window": 2, "repetitions": 3}
REHEARSED: dict[str, Any] = {"prompt": (4, 12), "response": (4, 24), "window": 1, "repetitions": 2}
REHEARSED_TOKENS = 128


@dataclass(frozen=True)
class Choice:
    """A measurement of a shape. lora: the section of params.yaml. needs: a required package."""

    method: str
    shape: str
    microbatch_tokens: int
    lora: dict[str, Any] | None = None
    needs: str | None = None

    @property
    def quantized(self) -> bool:
        return self.lora is not None and self.lora["quantize"] is not None

    @property
    def name(self) -> str:
        adapters = "" if self.lora is None else " with QLoRA" if self.quantized else " with LoRA"
        return f"{METHODS[self.method]}{adapters}, {shape_name(self.shape)}, bfloat16"

    @property
    def planned(self) -> float:
        """Bytes according to the planner."""
        shape, tokens = SHAPES[self.shape], self.microbatch_tokens
        if self.lora is None:
            return trained_bytes(shape, tokens=tokens, scalar=self.method == "reward")
        return adapted_bytes(shape, tokens=tokens, rank=self.lora["rank"], quantized=self.quantized)

    @property
    def needed(self) -> float:
        """Bytes that must be free to start."""
        stepping = step_bytes(SHAPES[self.shape], scalar=self.method == "reward") if self.lora is None else 0.0
        return max(self.planned, stepping)


def main(module: str, description: str | None, choices: Sequence[Choice]) -> int:
    """A part's command line, with --cases its child's."""
    configure_process()
    if sys.argv[1:2] == ["--cases"]:
        measure_here(sys.argv[2], measure)
        return 0
    arguments = argument_parser(description).parse_args()
    chosen = rehearsed(choices) if arguments.rehearse else list(choices)
    with models_folder(arguments.models) as models:
        return run_or_die(lambda: part(module, chosen, Record(arguments.out), models=models, rehearse=arguments.rehearse))


def rehearsed(choices: Sequence[Choice]) -> list[Choice]:
    """One case per method and kind of adapter, of the tiny shape."""
    tiny = {(c.method, c.quantized, c.lora is None): Choice(c.method, TINY, REHEARSED_TOKENS, c.lora, c.needs) for c in choices}
    return list(tiny.values())


def part(module: str, choices: Sequence[Choice], record: Record, *, models: Path, rehearse: bool) -> list[str]:
    """Measure and record. Returns the failures."""
    cases, failures = [], []
    for choice in choices:
        if choice.needs is not None and importlib.util.find_spec(choice.needs) is None:
            record.add(choice.name, "tokens/s", [], f"{choice.needs} isn't installed")
            continue
        # Flash attention first, and then without it where that differs.
        for flash in (True, False) if importlib.util.find_spec("flash_attn") is not None and not rehearse else (False,):
            cases.append({**asdict(choice), "flash": flash, "rehearse": rehearse, "models": str(models)})
    for case, found in measure_apart(module, cases, seconds=CASE_SECONDS, together=rehearse):
        choice = chosen(case)
        if isinstance(found, str):
            record.add(choice.name, "tokens/s", [], f"failed: {found}")
            failures.append(f"{choice.name}: {found}")
        elif "room" in found:
            size = f"{choice.needed / GIB:.1f} GiB, by the planner {choice.planned / GIB:.1f}"
            record.add(choice.name, "tokens/s", [], f"not run: it takes {size}, and the GPU has room for {found['room'] / GIB:.1f}")
        else:
            add_figures(record, choice, found)
    return failures


def chosen(case: Case) -> Choice:
    return Choice(**{name: case[name] for name in ("method", "shape", "microbatch_tokens", "lora", "needs")})


def measure(case: Case) -> Case:
    """In the child: `Measured` and the device's name, or the free memory if the planner needs more.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal).
    """
    from tools.bench.gpu.device import device_memory, device_name, require
    from tools.bench.gpu.steps import Steps, measure_steps

    require(rehearse=case["rehearse"])
    choice, memory = chosen(case), device_memory()
    if memory is not None and choice.needed > memory - RESERVE:
        return {"room": memory - RESERVE}
    steps = Steps(
        method=choice.method,
        model=str(model_folder(choice.shape, Path(case["models"]))),
        rows=8 if case["rehearse"] else ROWS[choice.method],
        microbatch_tokens=choice.microbatch_tokens,
        flash=case["flash"],
        lora=choice.lora,
        **(REHEARSED if case["rehearse"] else ON_GPU),
    )
    return {**measure_steps(steps), "device": device_name()}


def add_figures(record: Record, choice: Choice, found: Case) -> None:
    passed, shape = Passed(**found["passed"]), SHAPES[choice.shape]
    what = f"{choice.name}, {found['attention']}"
    seconds = found["seconds"]
    note = f"{passed.sequences} tokens a step, {passed.tokens} of them computed, in passes of at most {choice.microbatch_tokens}; "
    record.add(what, "tokens/s", [passed.sequences / s for s in seconds], note + f"{1 - passed.tokens / passed.padded:.0%} padding on top")
    flops = step_flops(shape, passed, adapters=choice.lora is not None)
    shares = [utilization(flops, s, found["device"]) for s in seconds]
    known = [share for share in shares if share is not None]
    record.add(f"{what}: model FLOPs utilization", "%", known, "" if known else f"unknown device {found['device']}: no utilization")
    for kind, size in found["bytes"].items():
        note = f"while loading and in the steps before {found['load'][kind] / GIB:.3g}"
        record.add(f"{what}: highest memory, {kind}", "GiB", [size / GIB], note)
    if "allocated" in found["bytes"]:
        ratio, note = [found["bytes"]["allocated"] / choice.planned], f"the planner says {choice.planned / GIB:.3g} GiB"
        record.add(f"{what}: allocated over planned", "ratio", ratio, note)
    else:
        record.add(
            f"{what}: allocated over planned", "ratio", [], f"the planner says {choice.planned / GIB:.3g} GiB; no GPU's allocator here"
        )


# The planner's memory of a training step


def trained_bytes(shape: ModelShape, *, tokens: int, scalar: bool = False) -> float:
    """Bytes of full training in bfloat16 on one GPU: states, and a pass of `tokens`.

    Args:
        scalar: a reward model, without a vocabulary head and logits.
    """
    how = Training(zero_stage=ZERO_STAGE)
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, how)
    head = 0.0 if scalar else head_training(shape, tokens, how)
    return states.resident + states.one_pass(trunk_activations(shape, tokens, how) + head)


def step_bytes(shape: ModelShape, *, scalar: bool = False) -> float:
    """Bytes during the optimizer step, without activations: the peak where a pass is small beside the states."""
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, Training(zero_stage=ZERO_STAGE))
    return states.resident + states.step


def adapted_bytes(shape: ModelShape, *, tokens: int, rank: int, quantized: bool) -> float:
    """Bytes with adapters on every linear layer of a frozen language model."""
    how = Training(zero_stage=ZERO_STAGE, adapters=adapter_parameters(shape, rank), quantized=quantized)
    states = training_states(shape.parameters, how, linear=shape.linear)
    return states.resident + states.one_pass(trunk_activations(shape, tokens, how) + head_training(shape, tokens, how))
