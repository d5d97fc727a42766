"""Part turns: a sleeping engine's memory, and RL jobs whose engine and trainer take turns on a GPU, GRPO beside TRL.

python -m tools.bench.gpu.turns --out FILE.json [--rehearse]
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.planning.hardware import GIB
from tools.bench.gpu.cases import Case as Measurement
from tools.bench.gpu.cases import measure_apart, measure_here
from tools.bench.gpu.online import Case, Outcome, head, run, weight_bytes
from tools.bench.gpu.peer import compare
from tools.bench.gpu.processes import Budget, begin, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.rl import GRPO, REHEARSED, add
from tools.bench.gpu.shapes import models_folder, shape_name

BUDGET_SECONDS = 480.0
SWITCHES = ("sleep", "wake", "offload", "reload")  # of rlhf_core/trainers/rl/turns.py, which imports Ray
ENGINE_SECONDS = 150.0
TRL_SECONDS = 150.0  # that must be left for a round with TRL
TURNS = replace(GRPO, shape="1.5B", microbatch_tokens=8 * 520, steps=6, turns=True)
JOBS = [TURNS, replace(TURNS, algorithm="ppo", prompts=256, group=1)]
REHEARSAL = [
    replace(REHEARSED, backend="pytorch", turns=True),
    replace(REHEARSED, backend="pytorch", turns=True, algorithm="ppo", prompts=16, group=1),
]


def main() -> None:
    if sys.argv[1:2] == ["--cases"]:
        measure_here(sys.argv[2], measure)
        return
    arguments = begin(__doc__)
    budget, record = Budget(BUDGET_SECONDS), Record(arguments.out)
    jobs = REHEARSAL if arguments.rehearse else JOBS
    with models_folder(arguments.models) as models:
        failures = sleeping_engine(jobs[0], models, record, rehearse=arguments.rehearse)
        failures += run_jobs(jobs, models, record, budget)
        if not arguments.rehearse and budget.left > TRL_SECONDS:  # the part trl rehearses it
            failures += compare(TURNS, 1, models, record, budget)
    sys.exit("\n".join(failures) or 0)


# An engine alone


def sleeping_engine(job: Case, models: Path, record: Record, *, rehearse: bool) -> list[str]:
    case = {"shape": job.shape, "backend": job.backend, "models": str(models), "rehearse": rehearse}
    name = f"{job.backend} engine, {shape_name(job.shape)}, bfloat16"
    failures = []
    for _, found in measure_apart("tools.bench.gpu.turns", [case], seconds=ENGINE_SECONDS, together=rehearse):
        if isinstance(found, str):
            record.add(name, "s", [], f"failed: {found}")
            failures.append(f"{name}: {found}")
            continue
        for what, seconds in found["seconds"].items():
            record.add(f"{name}: {what}", "s", [seconds])
        for what, size in found["bytes"].items():
            record.add(f"{name}: {what}", "GiB", [] if size is None else [size / GIB], "" if size is not None else "no GPU here")
    return failures


def measure(case: Measurement) -> Measurement:
    """In the child: seconds of each call, and bytes that each frees on the GPU; None without one.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal), or responses after a sleep differ.
    """
    from rlhf_core.models.build import read_state_dict
    from rlhf_core.sampling.requests import SamplingSettings
    from tools.bench.gpu.device import require
    from tools.bench.gpu.shapes import model_folder

    require(rehearse=case["rehearse"])
    folder = model_folder(case["shape"], Path(case["models"]))
    engine, weights = open_engine(case["backend"], str(folder)), read_state_dict(folder)

    def responses() -> list[list[int]]:
        settings = SamplingSettings(16, 1.0, min_new_tokens=16)
        drawn = engine.generate([[5, 6, 7 + i] for i in range(8)], [0] * 8, settings, stop_ids=(1,), group_size=1)
        return [sample.response_ids for (sample,) in drawn]

    seconds: dict[str, float] = {}
    freed: dict[str, float | None] = {}

    def timed(what: str, call: Callable[[], Any]) -> None:
        before, began = in_use(), time.perf_counter()
        call()
        seconds[what] = time.perf_counter() - began
        after = in_use()
        freed[f"freed by {what}"] = None if before is None or after is None else before - after

    expected = responses()
    for level in (1, 2):
        timed(f"sleep of level {level}", lambda level=level: engine.sleep(level))
        timed(f"wake up of weights after level {level}", lambda: engine.wake_up(["weights"]))
        if level == 2:
            timed("new weights after level 2", lambda: engine.load_weights(weights, 1))
        timed(f"wake up of the cache after level {level}", lambda: engine.wake_up(["kv_cache"]))
        if (found := responses()) != expected:
            raise RuntimeError(f"sleep of level {level}: expected the responses of before, got {found[0]} in place of {expected[0]}")
    return {"seconds": seconds, "bytes": freed}


def open_engine(backend: str, folder: str) -> Any:
    from rlhf_core.engines.in_process import open_here
    from tools.bench.gpu.online import ENGINE_MEMORY

    settings = {"max_length": 512, "max_concurrent_sequences": 256, "threads": 2, "seed": 0, "trust_remote_code": False}
    return open_here(
        backend, folder, **settings, dtype="bfloat16", gpu_memory_fraction=ENGINE_MEMORY, shares_gpu=True, sleeps=backend == "vllm"
    )


def in_use() -> int | None:
    """Bytes in use on the GPU, by all processes."""
    from rlhf_core.engines.gpu_memory import memory_in_use

    return memory_in_use().get("used")


# Jobs


def run_jobs(jobs: list[Case], models: Path, record: Record, budget: Budget) -> list[str]:
    failures: list[str] = []
    with tempfile.TemporaryDirectory(prefix="turns-", dir=models) as folder, head(jobs) as address:
        for case in jobs:
            own = Path(folder) / case.algorithm
            own.mkdir()
            with noted(record, case.name, failures):
                outcome = run(case, models, own, address, budget)
                add(record, case, outcome, weight_bytes(case))
                add_switches(record, case, outcome)
            shutil.rmtree(own)
    return failures


def add_switches(record: Record, case: Case, outcome: Outcome) -> None:
    for switch in SWITCHES:
        record.add(f"{case.name}: {switch}", "s", outcome.of(switch, warmup=case.warmup))
    steps = outcome.memory[case.warmup :]
    for name in steps[0] if steps else ():
        record.add(f"{case.name}: {name.replace('_', ' ')}", "GiB", [step[name] / GIB for step in steps])


if __name__ == "__main__":
    main()
