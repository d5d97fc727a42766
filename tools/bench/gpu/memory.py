"""Part memory: memory of an RL step by role and phase, beside the planner's figures, and of a rollout engine.

python -m tools.bench.gpu.memory --out FILE.json [--rehearse]
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rlhf_core.planning.hardware import GIB, Cluster, Gpu
from rlhf_core.planning.plan import CRITIC, POLICY, REFERENCE, REWARD, Group, Placement, Workload, group_memory
from rlhf_core.process import configure_process
from tools.bench.gpu.cases import Case, measure_apart, measure_here, run_or_die
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import SHAPES, TINY, argument_parser, models_folder, shape_name

CASE_SECONDS = 200.0
PASSES = "one pass or optimizer step"  # the planner's name
ON_GPU: Case = {"shape": "0.5B", "prompt": (64, 512), "response": (64, 512), "samples": 64, "microbatch_tokens": 8192, "steps": 3}
REHEARSED: Case = {"shape": TINY, "prompt": (4, 12), "response": (4, 24), "samples": 8, "microbatch_tokens": 128, "steps": 2}


def main() -> int:
    configure_process()
    if sys.argv[1:2] == ["--cases"]:
        measure_here(sys.argv[2], measure)
        return 0
    arguments = argument_parser(__doc__).parse_args()
    with models_folder(arguments.models) as models:
        return run_or_die(lambda: part(Record(arguments.out), models=models, rehearse=arguments.rehearse))


def measure(case: Case) -> Case:
    """In the child.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal).
    """
    from tools.bench.gpu.device import require
    from tools.bench.gpu.roles import measure_engine, measure_trainer

    require(rehearse=case["rehearse"])
    return {"trainer": measure_trainer, "engine": measure_engine}[case["what"]](case)


def part(record: Record, *, models: Path, rehearse: bool) -> list[str]:
    """Measure and record. Returns the failures."""
    common = {**(REHEARSED if rehearse else ON_GPU), "rehearse": rehearse, "models": str(models)}
    backend = "pytorch" if rehearse else "vllm"
    cases = [{**common, "what": "trainer"}, {**common, "what": "engine", "backend": backend}]
    failures = []
    for case, found in measure_apart("tools.bench.gpu.memory", cases, seconds=CASE_SECONDS, together=rehearse):
        name = f"{'PPO trainer' if case['what'] == 'trainer' else backend + ' engine'}, {shape_name(case['shape'])}, bfloat16"
        if isinstance(found, str):
            record.add(name, "GiB", [], f"failed: {found}")
            failures.append(f"{name}: {found}")
        elif case["what"] == "trainer":
            add_trainer(record, name, case, found)
        else:
            add_engine(record, name, case, found)
    return failures


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
    """The planner's bytes by role and kind."""
    shape, mean = SHAPES[case["shape"]], lambda span: sum(span) / 2
    work = Workload(
        policy=shape,
        critic=shape,
        reference=True,
        reward_models=(shape,),
        samples=case["samples"],
        group_size=1,
        minibatch=case["samples"],
        epochs=1,
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
    sys.exit(main())
