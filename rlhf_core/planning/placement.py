"""The share of a GPU that each actor of an RL job gets.

rl.trainer.gpus_per_rank and rl.rollout.gpus_per_engine set it, at most 1: a rank and an engine use one GPU each. `auto` gives each actor a
GPU if there are enough. With fewer GPUs, each rank has one and engines share the rest; without a rest, each rank shares its GPU with
engines. Two ranks never share a GPU: NCCL refuses that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from rlhf_core.config import RlConfig

RANK_SHARE = 0.6  # of a GPU that a rank shares with engines; more than a half, so that no second rank fits
UNITS = 10_000  # Ray counts ten-thousandths of a GPU


@dataclass(frozen=True)
class Placement:
    """gpus: of the cluster.    per_rank, per_engine: share of each actor; 0 without GPUs."""

    gpus: int
    per_rank: float
    per_engine: float

    def engines_beside_ranks(self, rl: RlConfig) -> int:
        """The most engines on a GPU that has a rank too."""
        places = _places([self.per_rank] * rl.trainer.ranks + [self.per_engine] * rl.rollout.engines, self.gpus) or []
        ranks, engines = places[: rl.trainer.ranks], places[rl.trainer.ranks :]
        return max((engines.count(gpu) for gpu in ranks), default=0)

    @property
    def shares_engine_gpus(self) -> bool:
        """Whether an engine shares its GPU with other actors."""
        return 0 < self.per_engine < 1

    def describe(self, rl: RlConfig) -> str:
        return (
            f"{self.gpus} GPU{'s' * (self.gpus != 1)}: {self.per_rank:g} for each of {rl.trainer.ranks} trainer ranks, "
            f"{self.per_engine:g} for each of {rl.rollout.engines} rollout engines"
        )

    def as_json(self, rl: RlConfig) -> dict[str, float | int]:
        return {**asdict(self), "ranks": rl.trainer.ranks, "engines": rl.rollout.engines}


def place(rl: RlConfig, gpus: int) -> Placement:
    """The shares of a job on a cluster with this number of GPUs.

    Raises:
        ValueError: the job needs more GPUs.
    """
    ranks, engines = rl.trainer.ranks, rl.rollout.engines
    if not gpus:
        return Placement(0, 0.0, 0.0)
    if ranks > gpus:
        raise ValueError(
            f"rl.trainer.ranks: expected at most the cluster's {gpus} GPUs, got {ranks}; two ranks can't share one: lower it or add GPUs"
        )
    tried = list(_candidates(rl, gpus))
    for per_rank, per_engine in tried:
        if _places([per_rank] * ranks + [per_engine] * engines, gpus) is not None:
            return Placement(gpus, per_rank, per_engine)
    per_rank, per_engine = tried[-1]
    raise ValueError(
        f"rl: expected a cluster with room for {ranks} x {per_rank:g} (rl.trainer.ranks x gpus_per_rank) and {engines} x {per_engine:g} "
        f"(rl.rollout.engines x gpus_per_engine) GPUs, got {gpus}; that is {ranks * per_rank + engines * per_engine:g} together: lower one "
        "of these, set gpus_per_rank and gpus_per_engine to auto, or add GPUs"
    )


def _candidates(rl: RlConfig, gpus: int) -> Iterator[tuple[float, float]]:
    """Shares of a rank and of an engine, larger ones first."""
    rank, engine, engines = rl.trainer.gpus_per_rank, rl.rollout.gpus_per_engine, rl.rollout.engines
    per_rank = [rank]
    if rank == "auto":
        per_rank = [1.0, RANK_SHARE]
        if engine != "auto":
            left = 1 - engine * math.ceil(engines / gpus)
            per_rank += [left] * (left > 0.5 or (rl.trainer.ranks == 1 and left > 0))
    for share in per_rank:
        if engine != "auto":
            yield _rounded(share), engine
            continue
        for room in dict.fromkeys((1.0, 1 - share)):
            yield from ((_rounded(share), _rounded(room / n)) for n in range(1, engines + 1) if room > 0)


def _rounded(share: float) -> float:
    """Rounded down to Ray's unit, so that shares never add up to more than a GPU."""
    return math.floor(share * UNITS + 1e-6) / UNITS


def _places(shares: list[float], gpus: int) -> list[int] | None:
    """Each actor's GPU, if each goes, in this order and as in Ray, to the fullest GPU that has room; None: one finds no room."""
    free, places = [UNITS] * gpus, []
    for share in (round(share * UNITS) for share in shares):
        room = [left for left in free if left >= share]
        if not room:
            return None
        places.append(free.index(min(room)))
        free[places[-1]] -= share
    return places
