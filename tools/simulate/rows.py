"""Rows of the tables of docs/statistics.md."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A share found by simulation, beside its expected value.

    case: the simulated case. wanted: the expected share ("0.95", "at most 0.05"). hits of n replications.
    cell: (table, row, column) of a row that is shown as one cell of a table of its own.
    """

    case: str
    wanted: str
    hits: int
    n: int
    cell: tuple[str, str, str] | None = None

    @property
    def share(self) -> float:
        return self.hits / self.n

    @property
    def error(self) -> float:
        """Standard error of the share."""
        return math.sqrt(self.share * (1 - self.share) / self.n)


def table(rows: list[Row]) -> str:
    """Markdown: one table of the rows without a cell, then one table for each first element of the cells."""
    ((usual, _),) = Counter(row.n for row in rows).most_common(1)
    lines = [f"{usual:,} replications unless stated; ± one standard error.", "", "| simulated | expected | found |", "|---|---|---|"]
    for row in rows:
        if row.cell is None:
            replications = "" if row.n == usual else f" ({row.n:,} replications)"
            lines.append(f"| {row.case}{replications} | {row.wanted} | {row.share:.3f} ± {row.error:.3f} |")
    for title in dict.fromkeys(row.cell[0] for row in rows if row.cell):
        cells = {row.cell[1:]: f"{row.share:.3f}" for row in rows if row.cell and row.cell[0] == title}
        columns = list(dict.fromkeys(column for _, column in cells))
        lines += ["", f"| {title} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
        for name in dict.fromkeys(name for name, _ in cells):
            lines.append(f"| {name} | " + " | ".join(cells.get((name, column), "") for column in columns) + " |")
    return "\n".join(lines)
