"""The Ray cluster of a job: joined, its memory, and resources reserved for actors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.planning.machine import Machine, whole


class RoleLost(RuntimeError):
    """An actor died, or didn't answer by its deadline. The message names role and rank.

    ranks: the lost ones; empty if a call failed without losing a rank.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)


@dataclass(frozen=True)
class Bundle:
    """Where an actor is placed: a bundle of a placement group, and the actor's share of the bundle's GPU."""

    group: PlacementGroup
    index: int
    gpus: float


def join_cluster(*, output: bool = True) -> int:
    """Connect to the cluster that this job runs on. Returns how many GPUs it has.

    Args:
        output: print what the job's actors print.
    """
    ray.init(address="auto", logging_level="ERROR", log_to_driver=output)
    return int(ray.cluster_resources().get("GPU", 0))


def cluster_memory(timeout: float) -> list[Machine]:
    """Memory of each node, and of the GPUs that it has for Ray's actors.

    Raises:
        RoleLost: a node doesn't answer within `timeout` seconds.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    look = ray.remote(num_cpus=0, max_retries=0)(whole)
    where = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    try:
        found = ray.get([look.options(scheduling_strategy=there).remote() for there in where], timeout=timeout)
    except RayError as error:
        raise RoleLost(f"cluster: expected {len(nodes)} nodes to tell their memory within {timeout:.0f} s, got {error}") from error
    counts = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    return [replace(machine, gpus=machine.gpus[:count]) for machine, count in zip(found, counts, strict=True)]


def leave_cluster() -> None:
    ray.shutdown()


def reserve(what: str, bundles: list[dict[str, float]], *, deadline: float) -> PlacementGroup:
    """Reserve resources for actors, close together.

    Raises:
        RoleLost: no room within `deadline` seconds.
    """
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(timeout_seconds=deadline):
        remove_placement_group(group)
        raise RoleLost(
            f"{what}: expected room for {len(bundles)} x {bundles[0]} within {deadline:.0f} s, got none "
            f"(cluster has {ray.cluster_resources()}, free {ray.available_resources()}); add nodes or lower its ranks"
        )
    return group


def reserve_gpus(what: str, count: int, *, cpus: int, deadline: float) -> list[tuple[PlacementGroup, int]]:
    """Reserve whole GPUs in one placement group. Returns the bundle of each; those of a node are adjacent.

    Args:
        cpus: beside each GPU.
    Raises:
        ValueError: the nodes don't have them, free or not.
        RoleLost: no room within `deadline` seconds.
    """
    nodes = [(node["NodeManagerHostname"], node["Resources"]) for node in ray.nodes() if node["Alive"]]
    if sum(int(min(has.get("GPU", 0), has.get("CPU", 0) // cpus)) for _, has in nodes) < count:
        there = ", ".join(f"{name} with {has.get('GPU', 0):g} GPUs and {has.get('CPU', 0):g} CPUs" for name, has in nodes)
        raise ValueError(f"{what}: expected nodes with {count} times a GPU and {cpus} CPUs, got {there}; add nodes, or lower its ranks")
    group = reserve(what, [{"GPU": 1.0, "CPU": float(cpus)}] * count, deadline=deadline)
    node_of = list(placement_group_table(group)["bundles_to_node_id"].values())
    return [(group, index) for index in sorted(range(count), key=lambda k: (-node_of.count(node_of[k]), node_of.index(node_of[k]), k))]


def release(bundles: Sequence[tuple[PlacementGroup, int]]) -> None:
    """Remove the placement groups of bundles."""
    for group in {group.id: group for group, _ in bundles}.values():
        remove_placement_group(group)
