"""GRPO by us and by TRL with vLLM in its trainer's process, in turn: python -m bench.gpu.peer --out FILE.json [--rehearse]

The same shape with the same random weights, prompts, groups, length of responses, steps, reward, reference and optimizer settings. TRL's
trainer has float32 weights and computes in bfloat16, ours has bfloat16 weights and float32 masters; both have one optimizer step for each
batch, and no correction of the engine's probabilities. Tokens are those of responses.
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

from bench.gpu.online import Case, head, run
from bench.gpu.processes import Budget, end_tidily
from bench.gpu.record import Record
from bench.gpu.rl import GRPO, REHEARSED
from bench.gpu.shapes import argument_parser, model_folder, models_folder
from rlhf_core.quiet import be_quiet

BUDGET_SECONDS = 510.0
ROUNDS = 2  # as many as there is time for
PEER_SECONDS = 300.0


@dataclass(frozen=True)
class Side:
    """start: seconds to the first step. speeds: tokens per second of each step that counts."""

    start: float
    speeds: list[float]
    note: str = ""


def main() -> None:
    arguments = argument_parser(__doc__).parse_args()
    be_quiet()
    end_tidily()
    case, rounds = (REHEARSED, 1) if arguments.rehearse else (replace(GRPO, steps=8), ROUNDS)
    budget, record, found = Budget(BUDGET_SECONDS), Record(arguments.out), []
    with models_folder(arguments.models) as models, tempfile.TemporaryDirectory(prefix="gpu-check-peer-") as folder:
        longest = 0.0
        for number in range(rounds):
            began = time.monotonic()
            if budget.left < 1.2 * longest:
                break
            own = Path(folder) / str(number)
            own.mkdir()
            found.append((ours(case, models, own, budget), theirs(case, models, own)))
            add(record, case, number + 1, *found[-1])
            longest = max(longest, time.monotonic() - began)
    ratios = [statistics.median(mine.speeds) / statistics.median(peer.speeds) for mine, peer in found]
    record.add(f"{case.name}: our speed over TRL's", "ratio", ratios, "of each round's medians")


def ours(case: Case, models: Path, folder: Path, budget: Budget) -> Side:
    own = folder / "ours"
    own.mkdir()
    with head(case, models) as address:
        outcome = run(case, models, own, address, budget)
    steps = zip(outcome.tokens[case.warmup :], outcome.of("", warmup=case.warmup), strict=True)
    return Side(outcome.start, [tokens / seconds for tokens, seconds in steps])


def theirs(case: Case, models: Path, folder: Path) -> Side:
    """TRL in a process of its own.

    Raises:
        RuntimeError: it failed, or wasn't done in time.
    """
    described, found = folder / "case.json", folder / "found.json"
    described.write_text(json.dumps(asdict(case)))
    model = model_folder(case.shape, models)
    command = [sys.executable, "-m", "bench.gpu.trl_side", str(described), str(model), str(found), str(os.getpid())]
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PEER_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise RuntimeError(f"TRL: expected its steps within {PEER_SECONDS:.0f} s, got none; {str(late.stderr)[-2000:]}") from late
    if done.returncode:
        raise RuntimeError(f"TRL: expected exit code 0, got {done.returncode}:\n{done.stderr[-4000:]}")
    said = json.loads(found.read_text())
    steps = list(zip(said["tokens"], said["seconds"], strict=True))[case.warmup :]
    return Side(said["start"], [tokens / seconds for tokens, seconds in steps], said["note"])


def add(record: Record, case: Case, number: int, mine: Side, peer: Side) -> None:
    for name, side in (("ours", mine), ("TRL", peer)):
        record.add(f"{case.name}, round {number}: tokens by {name}", "1/s", side.speeds, side.note)
        record.add(f"{case.name}, round {number}: start of {name}, to its first step", "s", [side.start], side.note)


if __name__ == "__main__":
    sys.exit(main())
