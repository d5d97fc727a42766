"""Compares the peak memory of training processes with the planner's prediction: python -m tools.memory --out docs/tables/memory.csv [--only
WORDS].

Each case runs real training processes on the CPU: a model with random weights is loaded from its folder, the stage's trainer makes two
optimizer steps of two micro-batches each, and saves a checkpoint and the weights. The figure is the peak of the resident set, less that of
the same process after its imports and the same training of a tiny model. Tensors are mapped one by one (MALLOC_MMAP_THRESHOLD_), so that
freed memory doesn't count.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable
from pathlib import Path

from tools.memory.cases import Case, cases, predict
from tools.memory.processes import MIB, begin_with_imports, measure
from tools.memory.savings import COLUMNS as SAVINGS
from tools.memory.savings import savings

COLUMNS = ("stage", "shape", "dtype", "tokens", "settings", "predicted_mib", "measured_mib", "ratio")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="CSV file for the table, continued where it has rows")
    parser.add_argument("--only", nargs="+", default=[], help="cases whose text (stage, shape, dtype, settings) has all of these")
    parser.add_argument("--predict", action="store_true", help="measure nothing: predict the table's cases anew")
    parser.add_argument("--savings", type=Path, help="measure only what checkpointing, pieces and shards save, into this CSV file")
    given = parser.parse_args()
    if given.savings is not None:
        begin_with_imports()
        write(given.savings, SAVINGS, savings())
        return 0
    rows = read_rows(given.out)
    if not given.predict:
        begin_with_imports()
    for case in cases():
        row = rows.get(case.name)
        if given.predict and row is not None:
            row |= {"predicted_mib": f"{predict(case) / MIB:.0f}"}
        elif row is not None or given.predict or not all(word in case.name for word in given.only):
            continue
        else:
            row = rows[case.name] = facts(case) | measure(case)
        row["ratio"] = f"{int(row['predicted_mib']) / int(row['measured_mib']):.3f}"
        print(*row.values(), sep="  ", flush=True)
        if given.out is not None:
            write(given.out, COLUMNS, (rows[case.name] for case in cases() if case.name in rows))
    return 0


def facts(case: Case) -> dict[str, str]:
    """The columns that identify a case."""
    return {"stage": case.stage, "shape": case.shape, "dtype": case.dtype, "tokens": str(case.tokens), "settings": case.settings}


def read_rows(path: Path | None) -> dict[str, dict[str, str]]:
    """The rows of a table by the names of their cases."""
    if path is None or not path.exists():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {" ".join(row[key] for key in COLUMNS[:5]): row for row in csv.DictReader(file)}


def write(path: Path, columns: tuple[str, ...], rows: Iterable[dict[str, str]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    sys.exit(main())
