"""Which checkpoints a store keeps and loads, and the work that they belong to."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain


@dataclass(frozen=True)
class Origin:
    """The work that a checkpoint belongs to: hashes of its configuration, data and code."""

    config: str = ""
    data: str = ""
    code: str = ""


@dataclass(frozen=True)
class StoreSettings:
    """Which checkpoints a store keeps and loads.

    keep_last: number of the newest complete checkpoints; at least 2, so that there is one before a damaged newest one.
    keep_best: number of checkpoints with the best scores that are kept too. Of equal scores the earlier is better.
    origin: this work's origin. accepted: further origins whose checkpoints are loaded; the work of each resumed from the one before it.
    begun_anew: for each accepted origin the fields of its state that mean something else in the work that resumed from it (carried.py).
    world_size, zero_stage: ranks and ZeRO stage of the engines, for the manifest. engine_ranks: ranks of engines with another number, by
    name.
    save_timeout: seconds for publishing a checkpoint.
    """

    keep_last: int = 2
    keep_best: int = 0
    origin: Origin = Origin()
    accepted: tuple[Origin, ...] = ()
    world_size: int = 1
    zero_stage: int = 0
    save_timeout: float = 1800.0
    engine_ranks: dict[str, int] = field(default_factory=dict)
    begun_anew: tuple[tuple[str, ...], ...] = ()

    def changed_since(self, origin: Origin) -> frozenset[str]:
        """Return the fields of the state of an origin's checkpoint that mean something else in this work."""
        if origin == self.origin or origin not in self.accepted:
            return frozenset()
        return frozenset(chain.from_iterable(self.begun_anew[self.accepted.index(origin) :]))

    def __post_init__(self) -> None:
        if self.keep_last < 2:
            raise ValueError(
                f"checkpoints.keep_last: expected at least 2, so that one is before a damaged newest one, got {self.keep_last}; raise it"
            )
