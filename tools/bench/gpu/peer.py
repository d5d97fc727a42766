"""GRPO here and by TRL with vLLM in its trainer's process, alternating: python -m tools.bench.gpu.peer --out FILE.json [--rehearse]

The same shape with the same random weights, prompts, groups, length of responses, steps, reward, reference and optimizer settings. TRL's
trainer has float32 weights and computes in bfloat16; this project's has bfloat16 weights and float32 masters. Both take one optimizer step
per batch, without importance correction. Tokens are response tokens.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.bench.gpu.lively import lively_folder
from tools.bench.gpu.online import Case, head, run
from tools.bench.gpu.processes import Budget, begin, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.rl import GRPO, REHEARSED
from tools.bench.gpu.shapes import models_folder

BUDGET_SECONDS = 450.0
ROUNDS = 2  # as many as time allows


@dataclass(frozen=True)
class Side:
    """start: seconds to the first step. speeds: tokens per second of each timed step."""

    start: float
    speeds: list[float]
    note: str = ""


def main() -> None:
    arguments = begin(__doc__)
    case, rounds = (REHEARSED, 1) if arguments.rehearse else (replace(GRPO, steps=8), ROUNDS)
    with models_folder(arguments.models) as models:
        failures = compare(case, rounds, models, Record(arguments.out), Budget(BUDGET_SECONDS))
    sys.exit("\n".join(failures) or 0)


def compare(case: Case, rounds: int, models: Path, record: Record, budget: Budget) -> list[str]:
    """As many rounds as the budget allows, at most `rounds`. Returns failures with reasons."""
    failures: list[str] = []
    ratios, longest = [], 0.0
    with tempfile.TemporaryDirectory(prefix="peer-", dir=models) as folder:
        for number in range(1, rounds + 1):
            began = time.monotonic()
            if failures or budget.left < 1.2 * longest:
                break
            own = Path(folder) / str(number)
            own.mkdir()
            medians = in_turn(case, number, models, own, record, budget, failures)
            if not failures:
                ratios.append(medians["ours"] / medians["TRL"])
            longest = max(longest, time.monotonic() - began)
    record.add(f"{case.name}: our speed over TRL's", "ratio", ratios, "of each round's medians")
    return failures


def in_turn(case: Case, number: int, models: Path, folder: Path, record: Record, budget: Budget, failures: list[str]) -> dict[str, float]:
    """A round, in reverse order every second time: tokens per second of each side that didn't fail."""
    medians, name = {}, f"{case.name}, round {number}"
    for side in ("ours", "TRL")[:: 1 if number % 2 else -1]:
        measure = {"ours": ours, "TRL": theirs}[side]
        with noted(record, f"{name}: {side}", failures):
            found = measure(case, models, folder, budget)
            record.add(f"{name}: tokens by {side}", "1/s", found.speeds, found.note)
            record.add(f"{name}: start of {side}, to its first step", "s", [found.start], found.note)
            medians[side] = statistics.median(found.speeds)
    return medians


def ours(case: Case, models: Path, folder: Path, budget: Budget) -> Side:
    own = folder / "ours"
    own.mkdir()
    with head([case]) as address:
        outcome = run(case, models, own, address, budget)
    steps = zip(outcome.tokens[case.warmup :], outcome.of("", warmup=case.warmup), strict=True)
    return Side(outcome.start, [tokens / seconds for tokens, seconds in steps])


def theirs(case: Case, models: Path, folder: Path, budget: Budget) -> Side:
    """TRL in its own process.

    Raises:
        RuntimeError: it failed, or exceeded its time.
    """
    described, found = folder / "case.json", folder / "found.json"
    described.write_text(json.dumps(asdict(case)))
    model = lively_folder(case.shape, models)
    command = [sys.executable, "-m", "tools.bench.gpu.trl_side", str(described), str(model), str(found), str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=max(1.0, budget.left))
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"TRL: expected its steps within the time that was left, got none; {str(late.stderr)[-2000:]}") from late
    if done.returncode:
        raise RuntimeError(f"TRL: expected exit code 0, got {done.returncode}:\n{done.stderr[-4000:]}")
    result = json.loads(found.read_text())
    steps = list(zip(result["tokens"], result["seconds"], strict=True))[case.warmup :]
    return Side(result["start"], [tokens / seconds for tokens, seconds in steps], result["note"])


if __name__ == "__main__":
    main()
