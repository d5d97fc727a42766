"""Runs simulations: python -m tools.simulate [PART ...] [--replications N] [--seed N] [--write]

Each part is a module of this folder with `simulate(replications, rng) -> Iterable[Row]`. --write replaces docs/tables/simulated-<part>.csv.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import sys
from pathlib import Path

import numpy as np

from tools.simulate.rows import HEADER

PARTS = ("intervals", "rounds", "gate", "prompts", "looks")
TABLES = Path("docs/tables")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.simulate", description="How often each decision is wrong, and how often it finds a gain."
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; without any, all")
    parser.add_argument("--replications", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help=f"write the tables into {TABLES}")
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"PART: expected some of {', '.join(PARTS)}, got {', '.join(sorted(unknown))}")
    for part in arguments.parts or PARTS:
        simulate = importlib.import_module(f"tools.simulate.{part}").simulate
        rows = [HEADER, *(row.cells() for row in simulate(arguments.replications, np.random.default_rng(arguments.seed)))]
        csv.writer(sys.stdout, lineterminator="\n").writerows(rows)
        sys.stdout.flush()
        if arguments.write:
            with (TABLES / f"simulated-{part}.csv").open("w", encoding="utf-8", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    main()
