"""One row of a table of docs/statistics.md."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A share that was found by simulation, beside what it should be.

    case: what was simulated, in words. wanted: what the share should be, in words ("0.95", "at most 0.05"). hits of n replications.
    """

    case: str
    wanted: str
    hits: int
    n: int

    @property
    def share(self) -> float:
        return self.hits / self.n

    @property
    def error(self) -> float:
        """Standard error of the share."""
        return math.sqrt(self.share * (1 - self.share) / self.n)


def table(rows: list[Row]) -> str:
    """As Markdown."""
    lines = ["| simulated | wanted | found | standard error | replications |", "|---|---|---|---|---|"]
    lines += [f"| {row.case} | {row.wanted} | {row.share:.3f} | {row.error:.3f} | {row.n:,} |" for row in rows]
    return "\n".join(lines)
