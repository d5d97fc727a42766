"""Measures optimizer steps in bfloat16: tokens/s, model FLOPs utilization, memory beside the planner's, and the same rows by TRL.

python -m tools.bench.gpu.training --out FILE.json [--rehearse] -- sft | dpo | reward | lora

One batch a step. TRL has float32 weights and computes in bfloat16, as in its scripts, in micro-batches of few rows, since more may not fit
beside its states.
"""

from __future__ import annotations

import importlib.util
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.memory import Training, adapter_parameters, head_training, training_states, trunk_activations
from rlhf_core.planning.shape import ModelShape
from tools.bench.gpu.flops import Passed, step_flops, utilization
from tools.bench.gpu.processes import Case, begin, measure_apart, measure_here, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import SHAPES, TINY, model_folder, models_folder, shape_name

RESERVE = 3 * GIB  # of a GPU, reserved as in the planner
ZERO_STAGE = 2
CASE_SECONDS = 100.0
TITLES = {"sft": "SFT", "reward": "reward model", "dpo": "DPO"}
ROWS = {"sft": 64, "reward": 32, "dpo": 32}
ON_GPU: Case = {"prompt": (64, 512), "response": (64, 1024), "window": 2, "repetitions": 2}
REHEARSED: Case = {"prompt": (4, 12), "response": (4, 24), "window": 1, "repetitions": 2}
LORA = {"rank": 16, "alpha": 32.0, "dropout": 0.0, "target_modules": "all-linear", "quantize": None}
MODULE = "tools.bench.gpu.training"


@dataclass(frozen=True)
class Choice:
    """A measurement of a shape.

    lora: the section of params.yaml. needs: a package that the measurement requires.
    """

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
        return f"{TITLES[self.method]}{adapters}, {shape_name(self.shape)}, bfloat16"

    @property
    def planned(self) -> float:
        """Return the bytes that the planner predicts."""
        shape, tokens = SHAPES[self.shape], self.microbatch_tokens
        if self.lora is None:
            return trained_bytes(shape, tokens=tokens, scalar=self.method == "reward")
        return adapted_bytes(shape, tokens=tokens, rank=self.lora["rank"], quantized=self.quantized)

    @property
    def needed(self) -> float:
        """Return the bytes that must be free for a start."""
        stepping = step_bytes(SHAPES[self.shape], scalar=self.method == "reward") if self.lora is None else 0.0
        return max(self.planned, stepping)


def choices(name: str, *, rehearse: bool) -> list[Choice]:
    shape, tokens = (TINY, 128) if rehearse else ("1.5B", 8192)
    if name != "lora":
        return [Choice(name, shape, tokens)]
    return [Choice("sft", shape, tokens, LORA, "peft"), Choice("sft", shape, tokens, {**LORA, "quantize": "nf4"}, "bitsandbytes")]


def main() -> None:
    if measure_here(measure):
        return
    arguments = begin(__doc__)
    record, failures = Record(arguments.out), []
    (name,) = arguments.arguments
    with models_folder(arguments.models) as models:
        for choice in choices(name, rehearse=arguments.rehearse):
            if choice.needs is not None and importlib.util.find_spec(choice.needs) is None:
                record.add(choice.name, "tokens/s", [], f"{choice.needs} isn't installed")
                continue
            case = {**asdict(choice), "rehearse": arguments.rehearse, "models": str(models)}
            found: Case = {}
            with noted(record, choice.name, failures):
                found = measure_apart(MODULE, case, seconds=CASE_SECONDS)
                add_figures(record, choice, found)
            if choice.lora is None and "seconds" in found:
                with noted(record, f"{choice.name}: TRL", failures):
                    add_trl(record, choice, found, measure_apart("tools.bench.gpu.trl_side", {"what": name, **case}, seconds=CASE_SECONDS))
    sys.exit("\n".join(failures) or 0)


def chosen(case: Case) -> Choice:
    return Choice(**{name: case[name] for name in ("method", "shape", "microbatch_tokens", "lora", "needs")})


def steps_of(case: Case):
    """Return the steps to measure in a case, for both sides."""
    from tools.bench.gpu.steps import Steps

    return Steps(
        method=case["method"],
        model=str(model_folder(case["shape"], Path(case["models"]))),
        rows=8 if case["rehearse"] else ROWS[case["method"]],
        microbatch_tokens=case["microbatch_tokens"],
        lora=case["lora"],
        **(REHEARSED if case["rehearse"] else ON_GPU),
    )


def measure(case: Case) -> Case:
    """Measure a case in the child process. Return `Measured` and the device's name, or the free memory if the planner needs more.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal).
    """
    from tools.bench.gpu.device import device_memory, device_name, require
    from tools.bench.gpu.steps import measure_steps

    require(rehearse=case["rehearse"])
    memory = device_memory()
    if memory is not None and chosen(case).needed > memory - RESERVE:
        return {"room": memory - RESERVE}
    return {**measure_steps(steps_of(case)), "device": device_name()}


def add_figures(record: Record, choice: Choice, found: Case) -> None:
    if "room" in found:
        size = f"{choice.needed / GIB:.1f} GiB, by the planner {choice.planned / GIB:.1f}"
        record.add(choice.name, "tokens/s", [], f"not run: it takes {size}, and the GPU has room for {found['room'] / GIB:.1f}")
        return
    passed, what = Passed(**found["passed"]), f"{choice.name}, {found['attention']}"
    note = f"{passed.sequences} tokens a step, {passed.tokens} of them computed, in passes of at most {choice.microbatch_tokens}; "
    note += f"{1 - passed.tokens / passed.padded:.0%} padding on top"
    add_speed(record, what, choice, found, found["seconds"], note)
    for kind, size in found["bytes"].items():
        note = f"while loading and in the steps before {found['load'][kind] / GIB:.3g}"
        record.add(f"{what}: highest memory, {kind}", "GiB", [size / GIB], note)
    note = f"the planner says {choice.planned / GIB:.3g} GiB"
    if "allocated" in found["bytes"]:
        record.add(f"{what}: allocated over planned", "ratio", [found["bytes"]["allocated"] / choice.planned], note)
    else:
        record.add(f"{what}: allocated over planned", "ratio", [], f"{note}; no GPU's allocator here")


def add_speed(record: Record, what: str, choice: Choice, found: Case, seconds: list[float], note: str) -> None:
    """Record the tokens of the sequences per second, and the utilization by the FLOP of our passes."""
    passed = Passed(**found["passed"])
    record.add(what, "tokens/s", [passed.sequences / s for s in seconds], note)
    flops = step_flops(SHAPES[choice.shape], passed, adapters=choice.lora is not None)
    known = [share for s in seconds if (share := utilization(flops, s, found["device"])) is not None]
    record.add(f"{what}: model FLOPs utilization", "%", known, "" if known else f"unknown device {found['device']}: no utilization")


def add_trl(record: Record, choice: Choice, ours: Case, theirs: Case) -> None:
    what = f"{choice.name}, TRL"
    add_speed(record, what, choice, ours, theirs["seconds"], f"{theirs['rows']} rows a micro-batch, weights in {theirs['dtype']}")
    record.add(f"{what}: highest memory, allocated", "GiB", [theirs["allocated"] / GIB] if theirs["allocated"] else [])
    ratio = statistics.median(theirs["seconds"]) / statistics.median(ours["seconds"])
    record.add(f"{choice.name}: our speed over TRL's", "ratio", [ratio], "of the medians")


# The planner's memory of a training step


def trained_bytes(shape: ModelShape, *, tokens: int, scalar: bool = False) -> float:
    """Return the bytes of full training in bfloat16 on one GPU: states, and a pass of `tokens`.

    Args:
        scalar: whether it is a reward model, without a vocabulary head and logits.
    """
    training = Training(zero_stage=ZERO_STAGE)
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, training)
    head = 0.0 if scalar else head_training(shape, tokens, training)
    return states.resident + states.one_pass(trunk_activations(shape, tokens, training) + head)


def step_bytes(shape: ModelShape, *, scalar: bool = False) -> float:
    """Bytes during the optimizer step, without activations; this is the peak if a pass is small beside the states."""
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, Training(zero_stage=ZERO_STAGE))
    return states.resident + states.step


def adapted_bytes(shape: ModelShape, *, tokens: int, rank: int, quantized: bool) -> float:
    """Bytes for training with adapters on every linear layer of a frozen language model."""
    training = Training(zero_stage=ZERO_STAGE, adapters=adapter_parameters(shape, rank), quantized=quantized)
    states = training_states(shape.parameters, training, linear=shape.linear)
    return states.resident + states.one_pass(trunk_activations(shape, tokens, training) + head_training(shape, tokens, training))


if __name__ == "__main__":
    main()
