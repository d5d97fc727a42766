"""Runs RL jobs with trainer and engine on one GPU: python -m tools.bench.gpu.jobs --out FILE.json [--rehearse] -- turns | ppo |
fp8 | tensor_parallel

Each job is the Ray job of the stage train_policy with its driver, actors, loop and weight sync. Weights are random, so scores mean nothing.
turns also runs GRPO by TRL with vLLM in its trainer's process: the same shape with the same weights, prompts, groups, length of responses,
steps, reward, reference and optimizer settings. TRL's trainer has float32 weights and computes in bfloat16; this project's has bfloat16
weights and float32 masters. Both take one optimizer step per batch, without importance correction. Tokens are response tokens.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path

from rlhf_core.planning.hardware import GIB
from tools.bench.gpu.online import PHASES, Case, Outcome, head, run, weight_bytes
from tools.bench.gpu.processes import Budget, begin, cores, measure_apart, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import TINY, model_folder, models_folder

BUDGET_SECONDS = 460.0
GPUS = 2  # of the divided engine
SWITCHES = ("sleep", "wake", "offload", "reload")  # of rlhf_core/trainers/rl/turns.py, which imports Ray
GRPO = Case(
    algorithm="grpo", shape="1.5B", dtype="bfloat16", steps=5, warmup=2, prompts=32, group=8, prompt=(128, 256), response=256,
    microbatch_tokens=8 * 520, threads=cores(8),
)  # fmt: skip
REHEARSED = Case(
    algorithm="grpo", shape=TINY, dtype="float32", steps=2, warmup=1, prompts=4, group=4, prompt=(6, 12), response=16,
    microbatch_tokens=512, threads=cores(2),
)  # fmt: skip


def cases(base: Case, *, rehearse: bool) -> dict[str, Case]:
    """Return the jobs by their names. In a rehearsal only PyTorch's engines take turns, since vLLM's CPU build can't sleep."""
    by_turns = replace(base, turns=True, backend="pytorch" if rehearse else "vllm")
    ppo = replace(by_turns, algorithm="ppo", prompts=base.samples, group=1)
    fp8 = replace(by_turns, fp8=not rehearse, steps=3, warmup=1)  # the CPU has none
    return {"turns": by_turns, "ppo": ppo, "fp8": fp8, "tensor_parallel": replace(base, tensor_parallel=GPUS)}


def main() -> None:
    arguments = begin(__doc__)
    (name,) = arguments.arguments
    case = cases(REHEARSED if arguments.rehearse else GRPO, rehearse=arguments.rehearse)[name]
    record, failures, budget = Record(arguments.out), [], Budget(BUDGET_SECONDS)
    if name == "tensor_parallel" and not arguments.rehearse and (there := gpus()) < GPUS:
        record.add(f"{case.name}: a step", "s", [], f"left out: {GPUS} GPUs are wanted, {there} is there")
        return
    with models_folder(arguments.models) as models, tempfile.TemporaryDirectory(prefix=f"{name}-", dir=models) as folder:
        speeds: list[float] = []
        with noted(record, case.name, failures), head(case.threads) as address:
            outcome = run(case, models, Path(folder), address, budget)
            add(record, case, outcome, weight_bytes(case))
            speeds = outcome.speeds(case)
        if name == "turns":
            with noted(record, f"{case.name}: TRL", failures):
                add_trl(record, case, speeds, model_folder(case.shape, models), budget)
    sys.exit("\n".join(failures) or 0)


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def add(record: Record, case: Case, outcome: Outcome, weights: int) -> None:
    """Record the figures of a job."""
    steps = outcome.of("", warmup=case.warmup)
    record.add(f"{case.name}: a step", "s", steps)
    record.add(f"{case.name}: samples", "1/s", [case.samples / s for s in steps])
    record.add(f"{case.name}: generated tokens over the whole step", "1/s", outcome.speeds(case))
    for phase in PHASES:
        record.add(f"{case.name}: {phase}", "s", outcome.of(phase, warmup=case.warmup))
    generated = zip(outcome.tokens[case.warmup :], outcome.of("generate", warmup=case.warmup), strict=True)
    record.add(f"{case.name}: generated tokens while it generates", "1/s", [t / s for t, s in generated])
    record.add(f"{case.name}: weights of a sync", "bytes", [weights])
    record.add(f"{case.name}: entropy of the policy", "nats", outcome.entropy)
    for size in outcome.mismatch[0]:
        values = [step[size] for step in outcome.mismatch]
        record.add(f"{case.name}: log-probabilities of engine and trainer apart, {size}", "nats", values, "of each step's tokens")
    record.add(f"{case.name}: start, from submission to first step", "s", [outcome.start])
    for where, peaks in (("GPU memory", outcome.peaks.device), ("resident set", outcome.peaks.host)):
        for role, size in sorted(peaks.items()):
            record.add(f"{case.name}: most {where} of the {role}", "GiB", [size / GIB])
    if outcome.peaks.whole:
        record.add(f"{case.name}: most GPU memory of all processes", "GiB", [outcome.peaks.whole / GIB])
    if case.turns:
        add_switches(record, case, outcome)


def add_switches(record: Record, case: Case, outcome: Outcome) -> None:
    for switch in SWITCHES:
        record.add(f"{case.name}: {switch}", "s", outcome.of(switch, warmup=case.warmup))
    steps = outcome.memory[case.warmup :]
    for name in steps[0] if steps else ():
        record.add(f"{case.name}: {name.replace('_', ' ')}", "GiB", [step[name] / GIB for step in steps])


def add_trl(record: Record, case: Case, ours: list[float], model: Path, budget: Budget) -> None:
    """Record TRL's steps, and the ratio to ours if ours were measured.

    Raises:
        RuntimeError: TRL failed, or exceeded its time.
    """
    given = {"what": "grpo", "case": asdict(case), "model": str(model)}
    found = measure_apart("tools.bench.gpu.trl_side", given, seconds=budget.left)
    steps = list(zip(found["tokens"], found["seconds"], strict=True))[case.warmup :]
    theirs = [tokens / seconds for tokens, seconds in steps]
    record.add(f"{case.name}: generated tokens over the whole step by TRL", "1/s", theirs, found["note"])
    record.add(f"{case.name}: start of TRL, to its first step", "s", [found["start"]], found["note"])
    if ours:
        ratio = statistics.median(ours) / statistics.median(theirs)
        record.add(f"{case.name}: our speed over TRL's", "ratio", [ratio], "of the medians")


if __name__ == "__main__":
    main()
