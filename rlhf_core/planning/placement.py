"""The GPU of each actor of an RL job, and the share of it that the actor gets.

rl.trainer.gpus_per_rank and rl.rollout.gpus_per_engine set the shares, at most 1. A rank uses one GPU, an engine
rl.rollout.tensor_parallel_size of one node, with its share of each. `auto` gives each actor whole GPUs if there are enough. With fewer,
each rank has one and engines share the rest; without a rest, each rank shares its GPU with engines. Ranks of different groups share a GPU
only where gpus_per_rank says so; two ranks of a group never do: NCCL refuses that.

GPUs are numbered, those of a node one after the other. An engine on several has a block of them: each node is divided into blocks of
tensor_parallel_size. Such a block is reserved as a whole, since that alone keeps it on one node.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from rlhf_core.config import RlConfig, number_of

RANK_SHARE = 0.6  # of a GPU that a rank shares with engines; more than a half, so that no second rank fits
UNITS = 10_000  # Ray counts ten-thousandths of a GPU


@dataclass(frozen=True)
class GpuPlacement:
    """The GPUs of the trainer ranks and the rollout engines of an RL job.

    gpus: the cluster's number of GPUs. per_rank, per_engine: share of a GPU that each actor gets; 0 without GPUs.
    ranks: number of each rank's GPU, by group. engines: number of each engine's first GPU. Both are empty without GPUs.
    tensor_parallel_size: GPUs of an engine, numbered from its first one on.
    """

    gpus: int
    per_rank: float
    per_engine: float
    ranks: tuple[tuple[int, ...], ...] = ()
    engines: tuple[int, ...] = ()
    tensor_parallel_size: int = 1

    def engine_gpus(self, first: int) -> tuple[int, ...]:
        """Return the GPUs of the engine with this first one."""
        return tuple(range(first, first + self.tensor_parallel_size))

    @property
    def _on_gpus(self) -> list[int]:
        """The GPU of each rank, and each GPU of each engine."""
        return [gpu for group in (*self.ranks, *map(self.engine_gpus, self.engines)) for gpu in group]

    @property
    def actors(self) -> dict[int, int]:
        """Number of actors on each GPU that is used."""
        return dict(sorted(Counter(self._on_gpus).items()))

    @property
    def bundles(self) -> list[tuple[int, ...]]:
        """GPUs that are reserved together, on one node: the GPUs of each engine, and every other used GPU by itself."""
        blocks = dict.fromkeys(map(self.engine_gpus, self.engines))
        of_engines = {gpu for block in blocks for gpu in block}
        return sorted([*blocks, *((gpu,) for gpu in self.actors if gpu not in of_engines)])

    def share(self, gpu: int, wanted: float) -> float:
        """Return the share of a GPU that Ray counts for an actor on it: all of it if it is the only actor, or the only rank beside larger
        engines.
        """
        if self.tensor_parallel_size > 1:
            return 1.0 if sum(group.count(gpu) for group in self.ranks) == 1 else wanted
        return 1.0 if self.actors[gpu] == 1 else wanted

    def is_alone(self, first: int) -> bool:
        """Return whether the engine with this first GPU shares none of its GPUs."""
        return all(self.actors[gpu] == 1 for gpu in self.engine_gpus(first))

    def engines_on(self, gpu: int) -> int:
        return sum(gpu in self.engine_gpus(first) for first in self.engines)

    def engines_beside_ranks(self, group: int = 0) -> int:
        """Return the largest number of engines on a GPU that also has a rank of this group."""
        return max(map(self.engines_on, self.ranks[group]), default=0) if self.ranks else 0

    def groups_beside(self, group: int) -> list[int]:
        """Return the other groups that have a rank on a GPU of this group."""
        return [k for k, gpus in enumerate(self.ranks) if k != group and set(gpus) & set(self.ranks[group])]

    def takes_turns(self, rl: RlConfig) -> bool:
        """Return `rl.rollout.take_turns` with auto resolved."""
        if rl.rollout.take_turns != "auto":
            return rl.rollout.take_turns
        beside = any(map(self.engines_beside_ranks, range(len(self.ranks))))
        return beside and not rl.rollout.max_lag

    def engine_share(self, rl: RlConfig) -> float:
        """Return the share of a GPU's memory of which an engine may take its fraction. By turns the engines of a GPU divide all of it."""
        if not self.gpus:
            return 1.0
        most = max(map(self.engines_on, self.engines))
        return 1.0 / most if self.takes_turns(rl) else self.per_engine

    @property
    def shares_engine_gpus(self) -> bool:
        """Whether an engine shares its GPU with other actors."""
        return 0 < self.per_engine < 1

    def describe(self, rl: RlConfig) -> str:
        of = f" ({', '.join(f'{group.ranks} {group.name}' for group in rl.role_groups)})" * (len(rl.role_groups) > 1)
        several = f", of {self.tensor_parallel_size} GPUs each" * (self.tensor_parallel_size > 1)
        ranks, engines = number_of(rl.ranks, "trainer rank"), number_of(rl.rollout.engines, "rollout engine")
        return (
            f"{number_of(self.gpus, 'GPU')}: {self.per_rank:g} for each of {ranks}{of}, "
            f"{self.per_engine:g} for each of {engines}{several}{', by turns' * self.takes_turns(rl)}"
        )

    def as_json(self) -> dict[str, float | int]:
        """Return the cluster's number of GPUs, and the share of one that each rank and engine has."""
        return {"gpus": self.gpus, "per_rank": self.per_rank, "per_engine": self.per_engine}


def place(rl: RlConfig, gpus: int, nodes: Sequence[int] = ()) -> GpuPlacement:
    """Choose the GPUs of a job's actors on a cluster with this number of GPUs.

    Args:
        nodes: number of GPUs of each node; empty: there is one node.
    Raises:
        ValueError: the job needs more GPUs, or more on one node.
    """
    groups, engines, size = [group.ranks for group in rl.role_groups], rl.rollout.engines, rl.rollout.tensor_parallel_size
    if not gpus:
        if rl.rollout.quantization is not None:
            raise ValueError(
                f"rl.rollout.quantization: expected null on a cluster without GPUs, got {rl.rollout.quantization}; change it, since vLLM "
                "computes in 8 bits on GPUs only"
            )
        return GpuPlacement(0, 0.0, 0.0, tensor_parallel_size=size)
    nodes = sorted(filter(None, nodes)) or [gpus]  # ranks fill the small ones
    if size > nodes[-1]:
        raise ValueError(
            f"rl.rollout.tensor_parallel_size: expected at most the {number_of(nodes[-1], 'GPU')} of the largest node, got {size}; lower "
            "it, since an engine's GPUs are on one node"
        )
    if rl.most_ranks > gpus:
        raise ValueError(
            f"rl.trainer.ranks: expected at most the cluster's {number_of(gpus, 'GPU')}, got {rl.most_ranks}; two ranks can't share one: "
            "lower it or add GPUs"
        )
    tried = list(_candidates(rl, gpus))
    for per_rank, per_engine in tried:
        if (found := _places(groups, per_rank, engines, per_engine, _blocks(nodes, size), sum(nodes))) is not None:
            return GpuPlacement(gpus, per_rank, per_engine, *found, size)
    per_rank, per_engine = tried[-1]
    hint = "put roles together in rl.placement, let groups share GPUs by gpus_per_rank, " if len(groups) > 1 else ""
    several, counted = (f" x {size}", " x tensor_parallel_size") if size > 1 else ("", "")
    on_nodes = f" on nodes of {', '.join(map(str, nodes))}" if size > 1 and len(nodes) > 1 else ""
    raise ValueError(
        f"rl: expected a cluster with room for {rl.ranks} x {per_rank:g} (rl.trainer.ranks x gpus_per_rank) and {engines} x {per_engine:g}"
        f"{several} (rl.rollout.engines x gpus_per_engine{counted}) GPUs, got {gpus}{on_nodes}; that is "
        f"{rl.ranks * per_rank + engines * per_engine * size:g} together: lower one of these, set gpus_per_rank and gpus_per_engine to "
        f"auto, {hint}or add GPUs"
    )


def unused_shares(rl: RlConfig) -> list[str]:
    """Return warnings about shares of GPUs that params set for a cluster without GPUs."""
    shares = {"rl.trainer.gpus_per_rank": rl.trainer.gpus_per_rank, "rl.rollout.gpus_per_engine": rl.rollout.gpus_per_engine}
    return [f"{key}: {share:g} has no effect, because the cluster has no GPU" for key, share in shares.items() if share != "auto"]


def _blocks(nodes: Sequence[int], size: int) -> list[tuple[int, ...]]:
    """Return the blocks of `size` GPUs that engines may have. The first GPUs of a node, which ranks take first, are left over."""
    starts = [sum(nodes[:k]) for k in range(len(nodes))]
    firsts = (first for start, count in zip(starts, nodes, strict=True) for first in range(start + count % size, start + count, size))
    return [tuple(range(first, first + size)) for first in firsts]


def _candidates(rl: RlConfig, gpus: int) -> Iterator[tuple[float, float]]:
    """Yield pairs of shares, of a rank and of an engine, larger ones first."""
    rank, engine, engines = rl.trainer.gpus_per_rank, rl.rollout.gpus_per_engine, rl.rollout.engines
    per_rank = [rank]
    if rank == "auto":
        per_rank = [1.0, RANK_SHARE]
        if engine != "auto":
            left = 1 - engine * math.ceil(engines * rl.rollout.tensor_parallel_size / gpus)
            per_rank += [left] * (left > 0.5 or (rl.ranks == 1 and left > 0))
    for share in per_rank:
        if engine != "auto":
            yield _rounded(share), engine
            continue
        for room in dict.fromkeys((1.0, 1 - share)):
            yield from ((_rounded(share), _rounded(room / n)) for n in range(1, engines + 1) if room > 0)


def _rounded(share: float) -> float:
    """Return a share rounded down to Ray's unit, so that shares never add up to more than a GPU."""
    return math.floor(share * UNITS + 1e-6) / UNITS


def _places(
    groups: Sequence[int], per_rank: float, engines: int, per_engine: float, blocks: Sequence[tuple[int, ...]], gpus: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]] | None:
    """Return the GPUs of the ranks by group, and each engine's first GPU; None if an actor finds no room.

    An engine on several GPUs avoids GPUs with ranks of several groups, because Ray doesn't say to which GPU of a block a share belongs.
    """
    free = [UNITS] * gpus
    ranks = []
    for count in groups:
        taken: list[int] = []
        for _ in range(count):
            if (gpu := _take(free, per_rank, [(gpu,) for gpu in range(gpus) if gpu not in taken])) is None:
                return None
            taken.append(gpu)
        ranks.append(tuple(taken))
    on_gpu = Counter(gpu for taken in ranks for gpu in taken)
    fit = [block for block in blocks if len(block) == 1 or max(on_gpu[gpu] for gpu in block) <= 1]
    found = [_take(free, per_engine, fit) for _ in range(engines)]
    return None if None in found else (tuple(ranks), tuple(gpu for gpu in found if gpu is not None))


def _take(free: list[int], share: float, blocks: Iterable[tuple[int, ...]]) -> int | None:
    """Take a share of each GPU of a block and return the block's first GPU: the emptiest used block with room, else a new one."""
    units = round(share * UNITS)
    left = {block: min(free[gpu] for gpu in block) for block in blocks}
    room = [block for block in left if left[block] >= units]
    used = [block for block in room if left[block] < UNITS]
    if not room:
        return None
    chosen = max(used, key=lambda block: left[block]) if used else room[0]
    for gpu in chosen:
        free[gpu] -= units
    return chosen[0]


def transfer_ways(rl: RlConfig, placement: GpuPlacement) -> list[str]:
    """Return how each engine gets weights: rl.rollout.weight_transfer with auto resolved.

    Raises:
        ValueError: the way that is set isn't possible where the engines are.
    """
    wanted, engines = rl.rollout.weight_transfer, rl.rollout.engines
    if not placement.engines:
        if wanted not in ("auto", "gloo"):
            raise ValueError(f"rl.rollout.weight_transfer: expected auto or gloo on a cluster without GPUs, got {wanted}; change it")
        return ["gloo"] * engines
    (group,) = [k for k, group in enumerate(rl.role_groups) if "policy" in group.roles]
    ranks, found = placement.ranks[group], []
    for engine, gpus in enumerate(map(placement.engine_gpus, placement.engines)):
        # NCCL refuses two processes on one GPU, and only rank 0 sends. By ipc the engine reads the buffer of the rank on its GPU.
        possible = ["gloo"]
        if rl.rollout.backend == "vllm":
            possible += ["ipc"] if set(gpus) <= set(ranks) and not rl.rollout.max_lag else []
            possible += ["nccl"] if ranks[0] not in gpus else []
        if wanted not in ("auto", *possible):
            raise ValueError(
                f"rl.rollout.weight_transfer: expected auto or one of {possible} for rollout engine {engine} on GPU {list(gpus)}, with the "
                f"policy's ranks on {list(ranks)}, got {wanted}; change one of them"
            )
        best = next(way for way in ("ipc", "nccl", "gloo") if way in possible)
        found.append(best if wanted == "auto" else wanted)
    if rl.rollout.send_changes and "gloo" not in found:
        raise ValueError(
            f"rl.rollout.send_changes: expected false where no rollout engine gets weights by gloo, got true with {sorted(set(found))}; "
            "change it, or set rl.rollout.weight_transfer to gloo"
        )
    return found


def check_gpus(planned: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[str]]) -> None:
    """Check that each process has as many GPUs as planned, and that processes share one only where that is planned.

    Args:
        planned: the numbers of each process's GPUs in the placement, by its name.
        found: the GPUs that each process sees, by its name.
    Raises:
        ValueError: processes share a GPU that they shouldn't, or one has another number of GPUs than planned.
    """
    by_gpu: dict[str, list[str]] = {}
    for name, gpus in found.items():
        count = len(planned[name])
        if len(set(gpus)) != count or len(gpus) != count:
            raise ValueError(
                f"{name}: expected {number_of(count, 'GPU')}, got {list(gpus) or 'none'}; is CUDA_VISIBLE_DEVICES set on its node?"
            )
        for gpu in gpus:
            by_gpu.setdefault(gpu, []).append(name)
    for gpu, names in by_gpu.items():
        if any(not set(planned[one]) & set(planned[other]) for one, other in combinations(names, 2)):
            raise ValueError(
                f"{gpu}: expected processes that the placement puts on one GPU, got {' and '.join(names)}; does Ray know each GPU of the "
                "node once (ray start --num-gpus)?"
            )
