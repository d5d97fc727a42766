"""Reserves the GPUs of an RL job in one placement group, and gives them to its actors as its placement says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.config import number_of
from rlhf_core.engines.ray.places import Bundle, RoleLost, release, reserve
from rlhf_core.engines.ray.processes import Place
from rlhf_core.planning.placement import GpuPlacement, check_gpus


def node_gpus() -> list[int]:
    """Return the number of GPUs of each node of the cluster that this job has joined."""
    return [int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"]]


class ReservedGpus:
    """The reserved GPUs of a placement. If the placement has none, nothing is reserved.

    Args:
        deadline: seconds in which they must be reserved, and in which a node must answer.
    Raises:
        ValueError: the nodes don't have these GPUs, free or not.
        RoleLost: the GPUs weren't free within the deadline.
    """

    def __init__(self, placement: GpuPlacement, *, deadline: float):
        self._placement, self._deadline = placement, deadline
        self._bundles: dict[int, tuple[PlacementGroup, int]] = {}  # by a GPU's number
        if placement.bundles:
            reserved = reserve_gpus("rl", list(map(len, placement.bundles)), cpus=max(placement.actors.values()), deadline=deadline)
            self._bundles = {gpu: bundle for gpus, bundle in zip(placement.bundles, reserved, strict=True) for gpu in gpus}

    def of_ranks(self, group: int) -> list[Bundle] | None:
        """Return the place of each rank of a group; None without GPUs."""
        if not self._bundles:
            return None
        share, wanted = self._placement.share, self._placement.per_rank
        return [Bundle(*self._bundles[gpu], share(gpu, wanted)) for gpu in self._placement.ranks[group]]

    def of_engines(self) -> list[Bundle] | None:
        """Return the place of each rollout engine; None without GPUs. Call it before ranks are started."""
        if not self._bundles:
            return None
        ids = {first: self._ids(first) for first in dict.fromkeys(self._placement.engines) if self._needs_ids(first)}
        return [Bundle(*self._bundles[first], self._counted(first), ids.get(first, ())) for first in self._placement.engines]

    def _needs_ids(self, first: int) -> bool:
        """Return whether an engine on several GPUs shares them. Ray counts no parts of several, so the engine gets their ids instead."""
        return self._placement.tensor_parallel_size > 1 and not self._placement.is_alone(first)

    def _counted(self, first: int) -> float:
        placement = self._placement
        if placement.tensor_parallel_size == 1:
            return placement.share(first, placement.per_engine)
        return 0.0 if self._needs_ids(first) else float(placement.tensor_parallel_size)

    def _ids(self, first: int) -> tuple[str, ...]:
        return bundle_gpus("rollout", *self._bundles[first], self._placement.tensor_parallel_size, deadline=self._deadline)

    def check(self, ranks: Sequence[Mapping[str, Place]], engines: Mapping[str, Place] | None) -> None:
        """Check that each process has as many GPUs as planned and shares none that the placement gives to one process.

        Args:
            ranks: places of each group's ranks by their names.
            engines: places of the engines by their names; None: they aren't checked; empty: there are none.
        Raises:
            ValueError: processes share a GPU that they shouldn't, or one has another number of GPUs.
        """
        if not self._bundles:
            return
        where = [[(gpu,) for gpu in gpus] for gpus in self._placement.ranks]
        where.append(list(map(self._placement.engine_gpus, self._placement.engines)))
        found = [*ranks, *([engines] if engines else [])]
        planned = {name: gpus for names, of_group in zip(found, where, strict=False) for name, gpus in zip(names, of_group, strict=True)}
        ids = {name: [f"{at.host} (node {at.node[:8]}) GPU {gpu}" for gpu in at.gpus] for names in found for name, at in names.items()}
        check_gpus(planned, ids)

    def release(self) -> None:
        release(list(self._bundles.values()))


def reserve_gpus(what: str, sizes: Sequence[int], *, cpus: int, deadline: float) -> list[tuple[PlacementGroup, int]]:
    """Reserve whole GPUs in one placement group.

    Args:
        sizes: number of GPUs of each bundle; a bundle's GPUs are on one node.
        cpus: number of CPUs reserved with each GPU.
    Returns:
        A bundle for each size. Equally large bundles of one node are adjacent.
    Raises:
        ValueError: the nodes don't have these GPUs, free or not.
        RoleLost: the GPUs weren't free within `deadline` seconds.
    """
    nodes = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if not _have_room([int(min(has.get("GPU", 0), has.get("CPU", 0) // cpus)) for _, has in nodes], sizes):
        there = ", ".join(
            f"{name} with {number_of(has.get('GPU', 0), 'GPU')} and {number_of(has.get('CPU', 0), 'CPU')}" for name, has in nodes
        )
        raise ValueError(f"{what}: expected nodes with {_listed(sizes, cpus)}, got {there}; add nodes, or lower its ranks")
    group = reserve(what, [{"GPU": float(size), "CPU": float(size * cpus)} for size in sizes], deadline=deadline)
    node_of = list(placement_group_table(group)["bundles_to_node_id"].values())
    adjacent = sorted(range(len(sizes)), key=lambda k: (-node_of.count(node_of[k]), node_of.index(node_of[k]), k))
    by_size = {size: iter([index for index in adjacent if sizes[index] == size]) for size in set(sizes)}
    return [(group, next(by_size[size])) for size in sizes]


def _have_room(nodes: list[int], sizes: Sequence[int]) -> bool:
    """Return whether nodes with these numbers of GPUs hold bundles of these sizes: large ones first, on the node with least room."""
    free = list(nodes)
    for size in sorted(sizes, reverse=True):
        room = [node for node, left in enumerate(free) if left >= size]
        if not room:
            return False
        free[min(room, key=lambda node: free[node])] -= size
    return True


def _listed(sizes: Sequence[int], cpus: int) -> str:
    counts = sorted(Counter(sizes).items())
    return " and ".join(f"{n} times {number_of(size, 'GPU')} and {number_of(size * cpus, 'CPU')}" for size, n in counts)


def bundle_gpus(what: str, group: PlacementGroup, index: int, count: int, *, deadline: float) -> tuple[str, ...]:
    """Return the ids of a bundle's GPUs on its node. No actor may have any of them yet.

    Raises:
        RoleLost: the node doesn't answer within `deadline` seconds.
    """
    there = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    look = ray.remote(_own_gpus).options(num_cpus=0, num_gpus=count, max_retries=0, scheduling_strategy=there)
    try:
        return ray.get(look.remote(), timeout=deadline)
    except RayError as error:
        raise RoleLost(
            f"{what}: expected a node to tell the ids of {number_of(count, 'GPU')} within {deadline:.0f} s, got {error}"
        ) from error


def _own_gpus() -> tuple[str, ...]:
    return tuple(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))
