"""Formats rows of docs/tables/simulated-*.csv."""

from __future__ import annotations

import math
from dataclasses import dataclass

HEADER = ("simulated", "expected", "found", "standard error", "replications")


@dataclass(frozen=True)
class Row:
    """A simulated share beside its expected value.

    case: the simulated case. wanted: the expected share ("0.95", "at most 0.05"). hits of n replications.
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
        """The standard error of the share."""
        return math.sqrt(self.share * (1 - self.share) / self.n)

    def cells(self) -> tuple[str, ...]:
        """The row's cells in the order of HEADER."""
        return (self.case, self.wanted, f"{self.share:.3f}", f"{self.error:.3f}", str(self.n))
