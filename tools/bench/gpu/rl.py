"""RL jobs, GRPO and PPO, trainer and engine on one GPU: python -m tools.bench.gpu.rl --out FILE.json [--rehearse]

Each is the Ray job of the stage train_policy with its driver, actors, loop, weight sync and last checkpoint. Weights are random, so that
scores mean nothing.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from tools.bench.gpu.online import PHASES, Case, Outcome, head, run, weight_bytes
from tools.bench.gpu.processes import Budget, begin, cores, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import TINY, models_folder

BUDGET_SECONDS = 480.0
GRPO = Case(
    algorithm="grpo", shape="0.5B", dtype="bfloat16", steps=10, warmup=2, prompts=32, group=8, prompt=(128, 256), response=256,
    microbatch_tokens=16 * 520, threads=cores(8),
)  # fmt: skip
# The most useful cases first. The number: seconds that must be left to start the case.
CASES = [
    (GRPO, 0.0),
    (replace(GRPO, algorithm="ppo", prompts=256, group=1), 60.0),
    (replace(GRPO, dtype="float32", steps=4, warmup=1, prompts=8), 60.0),
    (replace(GRPO, shape="1.5B", microbatch_tokens=8 * 520), 200.0),
]
REHEARSED = Case(
    algorithm="grpo", shape=TINY, dtype="float32", steps=2, warmup=1, prompts=4, group=4, prompt=(6, 12), response=16,
    microbatch_tokens=512, threads=cores(2),
)  # fmt: skip
REHEARSAL = [(replace(REHEARSED, algorithm="ppo", prompts=16, group=1), 0.0)]  # GRPO is rehearsed by turns and on two GPUs


def main() -> None:
    arguments = begin(__doc__)
    budget, record = Budget(BUDGET_SECONDS), Record(arguments.out)
    with models_folder(arguments.models) as models, tempfile.TemporaryDirectory(prefix="rl-", dir=models) as folder:
        failures = run_all(REHEARSAL if arguments.rehearse else CASES, models, Path(folder), record, budget)
    sys.exit("\n".join(failures) or 0)


def run_all(cases: list[tuple[Case, float]], models: Path, folder: Path, record: Record, budget: Budget) -> list[str]:
    """Run all cases in sequence on one head. Returns failures with reasons."""
    failures: list[str] = []
    with head([case for case, _ in cases]) as address:
        for number, (case, least) in enumerate(cases):
            if budget.left < least:
                record.add(f"{case.name}: a step", "s", [], f"left out: {budget.left:.0f} s were left, {least:.0f} are wanted")
                continue
            own = folder / f"{number}-{case.algorithm}"
            own.mkdir()
            with noted(record, case.name, failures):
                add(record, case, run(case, models, own, address, budget), weight_bytes(case))
            shutil.rmtree(own)  # its checkpoint, the trainer's whole state
    return failures


def add(record: Record, case: Case, outcome: Outcome, weights: int) -> None:
    """Record the figures of a job."""
    steps = outcome.of("", warmup=case.warmup)
    tokens = outcome.tokens[case.warmup :]
    record.add(f"{case.name}: a step", "s", steps)
    record.add(f"{case.name}: samples", "1/s", [case.samples / s for s in steps])
    record.add(f"{case.name}: generated tokens over the whole step", "1/s", [t / s for t, s in zip(tokens, steps, strict=True)])
    for phase in PHASES:
        record.add(f"{case.name}: {phase}", "s", outcome.of(phase, warmup=case.warmup))
    generated = zip(tokens, outcome.of("generate", warmup=case.warmup), strict=True)
    record.add(f"{case.name}: generated tokens while it generates", "1/s", [t / s for t, s in generated])
    record.add(f"{case.name}: weights of a sync", "bytes", [weights])
    record.add(f"{case.name}: entropy of the policy", "nats", outcome.entropy)
    for size in outcome.mismatch[0]:
        values = [step[size] for step in outcome.mismatch]
        record.add(f"{case.name}: log-probabilities of engine and trainer apart, {size}", "nats", values, "of each step's tokens")
    record.add(f"{case.name}: start, from submission to first step", "s", [outcome.start])
    record.add(f"{case.name}: checkpoint of the last step", "s", outcome.of("checkpoint", warmup=case.steps - 1))
    for where, peaks in (("GPU memory", outcome.peaks.device), ("resident set", outcome.peaks.host)):
        for role, size in sorted(peaks.items()):
            record.add(f"{case.name}: most {where} of the {role}", "GiB", [size / 2**30])
    if outcome.peaks.whole:
        record.add(f"{case.name}: most GPU memory of all processes", "GiB", [outcome.peaks.whole / 2**30])


if __name__ == "__main__":
    main()
