"""Measures the memory of an RL step by role and phase, beside the planner's figures, and the memory of a rollout engine.

python -m tools.bench.gpu.memory --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys
from typing import Any

from rlhf_core.planning.hardware import GIB, Cluster, Gpu
from rlhf_core.planning.plan import CRITIC, POLICY, REFERENCE, REWARD, Group, Placement, Workload, group_memory
from tools.bench.gpu.processes import Case, begin, measure_apart, measure_here, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import SHAPES, TINY, models_folder, shape_name

CASE_SECONDS = 100.0
PASSES = "one pass or optimizer step"  # the planner's name
ON_GPU: Case = {"shape": "0.5B", "prompt": (64, 512), "response": (64, 512), "samples": 64, "microbatch_tokens": 8192, "steps": 3}
REHEARSED: Case = {"shape": TINY, "prompt": (4, 12), "response": (4, 24), "samples": 8, "microbatch_tokens": 128, "steps": 2}


def main() -> None:
    if measure_here(measure):
        return
    arguments = begin(__doc__)
    record, failures = Record(arguments.out), []
    backend = "pytorch" if arguments.rehearse else "vllm"
    with models_folder(arguments.models) as models:
        common = {**(REHEARSED if arguments.rehearse else ON_GPU), "rehearse": arguments.rehearse, "models": str(models)}
        for what, side, add in (("trainer", "PPO trainer", add_trainer), ("engine", f"{backend} engine", add_engine)):
            name = f"{side}, {shape_name(common['shape'])}, bfloat16"
            with noted(record, name, failures):
                case = {**common, "what": what, "backend": backend}
                add(record, name, case, measure_apart("tools.bench.gpu.memory", case, seconds=CASE_SECONDS))
    sys.exit("\n".join(failures) or 0)


def measure(case: Case) -> Case:
    """Measure the memory of a case in the child process.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal).
    """
    from tools.bench.gpu.device import require
    from tools.bench.gpu.roles import measure_engine, measure_trainer

    require(rehearse=case["rehearse"])
    return {"trainer": measure_trainer, "engine": measure_engine}[case["what"]](case)


def add_trainer(record: Record, name: str, case: Case, found: dict[str, Any]) -> None:
    planned = planned_parts(case)
    for what, size in found["roles"].items():
        kind = what.partition(": ")[2]
        plan = planned.get(what, planned.get(kind))
        notes = [] if plan is None else [f"the planner says {plan / GIB:.3g}"]
        if kind == PASSES and "allocated" not in found["phases"]["load"][0]:
            notes.append("by how much the process' resident set grew, for want of a GPU's allocator")
        record.add(f"{name}: {what}", "GiB", [size / GIB], "; ".join(notes))
    for phase, steps in found["phases"].items():
        kind = "allocated" if "allocated" in steps[0] else "resident"
        before, after = (steps[-1][edge] / GIB for edge in ("before", "after"))
        note = f"{kind}; before it {before:.3g}, after it {after:.3g}"
        record.add(f"{name}: highest in phase {phase}", "GiB", [step[kind] / GIB for step in steps], note)
    for place, size in found["stacks"]:
        record.add(f"{name}: live when a backward pass begins, from {place}", "GiB", [size / GIB])
    if not found["stacks"]:
        record.add(f"{name}: live when a backward pass begins", "GiB", [], "no GPU's allocator here")


def planned_parts(case: Case) -> dict[str, float]:
    """Return the bytes that the planner predicts, by role and kind."""
    shape, mean = SHAPES[case["shape"]], lambda span: sum(span) / 2
    work = Workload(
        policy=shape,
        critic=shape,
        reference=True,
        reward_models=(shape,),
        samples=case["samples"],
        group_size=1,
        minibatch=case["samples"],
        ppo_epochs=1,
        prompt_length=mean(case["prompt"]),
        response_length=mean(case["response"]),
        longest=case["response"][1],
        microbatch_tokens=case["microbatch_tokens"],
    )
    group = Group(1, (POLICY, CRITIC, REFERENCE, REWARD))
    any_gpu = Gpu("here", memory=80 * GIB, flops=1.0, bandwidth=1.0, link=1.0)  # the parts don't depend on any of them
    parts = group_memory(work, group, Placement((group,), zero_stage=2), Cluster(any_gpu, gpus=1)).parts
    for role in (POLICY, CRITIC):  # one figure is measured for both
        parts[f"{role}: optimizer"] += parts.pop(f"{role}: float32 weights")
    return parts


def add_engine(record: Record, name: str, case: Case, found: dict[str, Any]) -> None:
    shape = SHAPES[case["shape"]]
    record.add(f"{name}: weights", "GiB", [found["weights"] / GIB], f"the planner says {2 * shape.parameters / GIB:.3g}")
    cache = [found["cache"] / GIB] if found["tokens"] else []
    note = f"{found['tokens']} tokens" if found["tokens"] else "made for each batch, and gone after it"
    record.add(f"{name}: cache of keys and values", "GiB", cache, note)
    for what in ("started", "held"):
        when = {"started": "after its start", "held": "after sampling"}[what]
        record.add(f"{name}: in use {when}", "GiB", [found[what] / GIB])
    for kind, size in found["bytes"].items():
        record.add(f"{name}: highest, {kind}", "GiB", [size / GIB])


if __name__ == "__main__":
    main()
