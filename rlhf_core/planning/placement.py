"""The GPU of each actor of an RL job, and the share of it that the actor gets.

rl.trainer.gpus_per_rank and rl.rollout.gpus_per_engine set the shares, at most 1: a rank and an engine use one GPU each. `auto` gives each
actor a GPU if there are enough. With fewer GPUs, each rank has one and engines share the rest; without a rest, each rank shares its GPU
with engines. Ranks of different groups share a GPU only where gpus_per_rank says so; two ranks of a group never do: NCCL refuses that.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rlhf_core.config import RlConfig

RANK_SHARE = 0.6  # of a GPU that a rank shares with engines; more than a half, so that no second rank fits
UNITS = 10_000  # Ray counts ten-thousandths of a GPU


@dataclass(frozen=True)
class Placement:
    """gpus: of the cluster.    per_rank, per_engine: share of each actor; 0 without GPUs.
    ranks: number of the GPU of each rank, group by group.    engines: of each rollout engine. Empty without GPUs.
    """

    gpus: int
    per_rank: float
    per_engine: float
    ranks: tuple[tuple[int, ...], ...] = ()
    engines: tuple[int, ...] = ()

    @property
    def actors(self) -> list[int]:
        """Number of actors on each GPU that is used."""
        where = [*(gpu for group in self.ranks for gpu in group), *self.engines]
        return [where.count(gpu) for gpu in range(max(where, default=-1) + 1)]

    def share(self, gpu: int, wanted: float) -> float:
        """An actor's share of its GPU: all of it where it is alone."""
        return 1.0 if self.actors[gpu] == 1 else wanted

    def engines_beside_ranks(self, group: int = 0) -> int:
        """The most engines on a GPU that has a rank of this group too."""
        return max((self.engines.count(gpu) for gpu in self.ranks[group]), default=0) if self.ranks else 0

    def groups_beside(self, group: int) -> list[int]:
        """Other groups with a rank on a GPU of this one."""
        return [k for k, gpus in enumerate(self.ranks) if k != group and set(gpus) & set(self.ranks[group])]

    def takes_turns(self, rl: RlConfig) -> bool:
        """`rl.rollout.take_turns` with auto resolved."""
        if rl.rollout.take_turns != "auto":
            return rl.rollout.take_turns
        beside = any(map(self.engines_beside_ranks, range(len(self.ranks))))
        return beside and not rl.rollout.one_step_off_policy

    def engine_share(self, rl: RlConfig) -> float:
        """Of a GPU's memory that an engine may take a fraction of: by turns all of it, which engines on one GPU divide."""
        if not self.gpus:
            return 1.0
        most = max(map(self.engines.count, self.engines))
        return 1.0 / most if self.takes_turns(rl) else self.per_engine

    @property
    def shares_engine_gpus(self) -> bool:
        """Whether an engine shares its GPU with other actors."""
        return 0 < self.per_engine < 1

    def describe(self, rl: RlConfig) -> str:
        of = f" ({', '.join(f'{group.ranks} {group.name}' for group in rl.role_groups)})" * (len(rl.role_groups) > 1)
        return (
            f"{self.gpus} GPU{'s' * (self.gpus != 1)}: {self.per_rank:g} for each of {rl.ranks} trainer ranks{of}, "
            f"{self.per_engine:g} for each of {rl.rollout.engines} rollout engines{', by turns' * self.takes_turns(rl)}"
        )

    def as_json(self, rl: RlConfig) -> dict[str, float | int | dict[str, int]]:
        shares = {"gpus": self.gpus, "per_rank": self.per_rank, "per_engine": self.per_engine}
        return {**shares, "ranks": rl.ranks, "engines": rl.rollout.engines}


def place(rl: RlConfig, gpus: int) -> Placement:
    """Where the actors of a job go on a cluster with this number of GPUs.

    Raises:
        ValueError: the job needs more GPUs.
    """
    groups, engines = [group.ranks for group in rl.role_groups], rl.rollout.engines
    if not gpus:
        return Placement(0, 0.0, 0.0)
    if rl.most_ranks > gpus:
        raise ValueError(
            f"rl.trainer.ranks: expected at most the cluster's {gpus} GPUs, got {rl.most_ranks}; two ranks can't share one: lower it or "
            "add GPUs"
        )
    tried = list(_candidates(rl, gpus))
    for per_rank, per_engine in tried:
        if (found := _places(groups, per_rank, engines, per_engine, gpus)) is not None:
            return Placement(gpus, per_rank, per_engine, *found)
    per_rank, per_engine = tried[-1]
    hint = "put roles together in rl.placement, let groups share GPUs by gpus_per_rank, " if len(groups) > 1 else ""
    raise ValueError(
        f"rl: expected a cluster with room for {rl.ranks} x {per_rank:g} (rl.trainer.ranks x gpus_per_rank) and {engines} x {per_engine:g} "
        f"(rl.rollout.engines x gpus_per_engine) GPUs, got {gpus}; that is {rl.ranks * per_rank + engines * per_engine:g} together: lower "
        f"one of these, set gpus_per_rank and gpus_per_engine to auto, {hint}or add GPUs"
    )


def _candidates(rl: RlConfig, gpus: int) -> Iterator[tuple[float, float]]:
    """Shares of a rank and of an engine, larger ones first."""
    rank, engine, engines = rl.trainer.gpus_per_rank, rl.rollout.gpus_per_engine, rl.rollout.engines
    per_rank = [rank]
    if rank == "auto":
        per_rank = [1.0, RANK_SHARE]
        if engine != "auto":
            left = 1 - engine * math.ceil(engines / gpus)
            per_rank += [left] * (left > 0.5 or (rl.ranks == 1 and left > 0))
    for share in per_rank:
        if engine != "auto":
            yield _rounded(share), engine
            continue
        for room in dict.fromkeys((1.0, 1 - share)):
            yield from ((_rounded(share), _rounded(room / n)) for n in range(1, engines + 1) if room > 0)


def _rounded(share: float) -> float:
    """Rounded down to Ray's unit, so that shares never add up to more than a GPU."""
    return math.floor(share * UNITS + 1e-6) / UNITS


def _places(
    groups: Sequence[int], per_rank: float, engines: int, per_engine: float, gpus: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] | None:
    """GPUs of the ranks, group by group, and of the engines; None: one finds no room."""
    free = [UNITS] * gpus
    ranks = []
    for count in groups:
        taken: list[int] = []
        for _ in range(count):
            if (gpu := _take(free, per_rank, apart_from=taken)) is None:
                return None
            taken.append(gpu)
        ranks.append(tuple(taken))
    found = [_take(free, per_engine) for _ in range(engines)]
    return None if None in found else (tuple(ranks), tuple(gpu for gpu in found if gpu is not None))


def _take(free: list[int], share: float, *, apart_from: Sequence[int] = ()) -> int | None:
    """Take a share of the emptiest GPU in use that has room, or else of a new one."""
    units = round(share * UNITS)
    room = [gpu for gpu, left in enumerate(free) if left >= units and gpu not in apart_from]
    used = [gpu for gpu in room if free[gpu] < UNITS]
    if not room:
        return None
    gpu = max(used, key=lambda gpu: free[gpu]) if used else room[0]
    free[gpu] -= units
    return gpu


def check_gpus(planned: Mapping[str, int], found: Mapping[str, Sequence[str]]) -> None:
    """Check that processes share a GPU only where that is planned.

    Args:
        planned: a process's name -> the number of its GPU in the placement.
        found: a process's name -> the GPUs that it sees.
    Raises:
        ValueError: two processes have one GPU, or one has none or several.
    """
    by_gpu: dict[str, list[str]] = {}
    for name, gpus in found.items():
        if len(gpus) != 1:
            raise ValueError(f"{name}: expected one GPU, got {list(gpus) or 'none'}; is CUDA_VISIBLE_DEVICES set on its node?")
        by_gpu.setdefault(gpus[0], []).append(name)
    for gpu, names in by_gpu.items():
        if len({planned[name] for name in names}) > 1:
            raise ValueError(
                f"{gpu}: expected processes that the placement puts on one GPU, got {' and '.join(names)}; does Ray know each GPU of the "
                "node once (ray start --num-gpus)?"
            )
