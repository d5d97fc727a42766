"""Ranks and ZeRO stages against one rank: python -m tools.ranks_matrix [--ranks N ...] [--only WORD ...] [--table FILE].

Trains tiny models by SFT, reward, DPO and KTO on each number of ranks with each ZeRO stage, and compares losses, held-out losses, gradient
norms and final weights with those of one rank without ZeRO. Ranks are processes of this machine with gloo between them. Writes
docs/tables/ranks.csv; docs/gpu.md describes it. Exits with 1 if a difference exceeds its limit.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rlhf_core.process import configure_process

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from supervised_ranks import STEPS, Case, loss_difference, run_ranks
from tiny_models import largest_difference, save_tiny_models, tiny_tokenizer

TABLE = Path(__file__).parents[1] / "docs/tables/ranks.csv"
KINDS = ("sft", "reward", "dpo", "kto")
ZERO_STAGES = (0, 1, 2, 3)
DEADLINE = 1800.0  # seconds for all cases on one number of ranks
MAX_LOSS_DIFFERENCE = 1e-4  # relative
MAX_WEIGHT_DIFFERENCE = 3e-4  # a tenth of a step, since Adam divides tiny gradients by their own size
COLUMNS = ("method", "ranks", "zero_stage", "steps", "loss_difference", "weight_difference")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks to compare with one rank without ZeRO")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS), help="methods")
    parser.add_argument("--table", type=Path, default=TABLE, help="CSV file of the differences")
    given = parser.parse_args()
    configure_process()  # of the ranks too, which inherit it
    with tempfile.TemporaryDirectory() as folder:
        rows = compare(Path(folder), given.ranks, given.only)
    given.table.parent.mkdir(parents=True, exist_ok=True)
    with given.table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    beyond = [row for row in rows if not within(row)]
    for row in beyond:
        print(f"{row['method']} on {row['ranks']} ranks with ZeRO {row['zero_stage']}: differs from one rank")
    return 1 if beyond else 0


def compare(folder: Path, numbers: list[int], kinds: list[str]) -> list[dict[str, Any]]:
    """A row of the table for each method, number of ranks and ZeRO stage."""
    start, _ = save_tiny_models(folder, tiny_tokenizer())
    baseline = dict(zip(kinds, results(folder / "baseline", start, 1, [(kind, 0) for kind in kinds]), strict=True))
    rows = []
    for ranks in numbers:
        cells = [(kind, stage) for kind in kinds for stage in ZERO_STAGES]
        began = time.monotonic()
        for (kind, stage), result in zip(cells, results(folder / str(ranks), start, ranks, cells), strict=True):
            expected = baseline[kind]
            rows.append(
                {
                    "method": kind,
                    "ranks": ranks,
                    "zero_stage": stage,
                    "steps": len(result["curves"]),
                    "loss_difference": f"{loss_difference(expected['curves'], result['curves']):.1e}",
                    "weight_difference": f"{largest_difference(result['weights'], expected['weights']):.1e}",
                }
            )
            print(rows[-1], flush=True)
        print(f"{ranks} ranks: {len(cells)} trainings of at least {STEPS} steps in {time.monotonic() - began:.0f} s", flush=True)
    return rows


def results(folder: Path, start: Path, ranks: int, cells: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """Rank 0's results of each training."""
    cases = [Case(kind, str(folder / f"{kind}-{stage}"), {"zero_stage": stage}) for kind, stage in cells]
    return run_ranks(ranks, start, cases, folder, deadline=DEADLINE)[0]


def within(row: dict[str, Any]) -> bool:
    return float(row["loss_difference"]) <= MAX_LOSS_DIFFERENCE and float(row["weight_difference"]) <= MAX_WEIGHT_DIFFERENCE


if __name__ == "__main__":
    sys.exit(main())
