"""The Ray cluster of a job: joining it, its memory, and resources reserved for actors."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlhf_core.config import RlConfig, number_of
from rlhf_core.planning.machine import Machine, whole
from rlhf_core.storage.address import StorageRefused
from rlhf_core.storage.node import JobFiles
from rlhf_core.storage.packages import differences, found_here, refusal

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOK_SECONDS = 5  # between two looks at what else may have happened while there is no room

log = logging.getLogger("rlhf")


class RoleLost(RuntimeError):
    """An actor died, or didn't answer by its deadline. The message names role and rank.

    ranks: the lost ranks; empty if a call failed without losing one. cause: the exception that such a call raised.
    """

    def __init__(self, message: str, ranks: Sequence[int] = (), *, cause: Exception | None = None):
        super().__init__(message)
        self.ranks, self.cause = list(ranks), cause


@dataclass(frozen=True)
class Bundle:
    """Where an actor is placed: a bundle of a placement group, and the number of GPUs that Ray counts for the actor.

    visible: ids of the GPUs that the actor sees if Ray counts none for it.
    """

    group: PlacementGroup
    index: int
    gpus: float
    visible: tuple[str, ...] = ()


def join_cluster(*, output: bool = True) -> int:
    """Connect to the cluster that this job runs on, and return its number of GPUs.

    Args:
        output: whether this process prints what the job's actors print.
    """
    ray.init(address="auto", logging_level="ERROR", log_to_driver=output)
    return int(ray.cluster_resources().get("GPU", 0))


def node_cpus() -> list[int]:
    """Return the number of CPUs that each node of the cluster has for Ray's actors."""
    return [int(node["Resources"].get("CPU", 0)) for node in ray.nodes() if node["Alive"]]


def check_cpus(rl: RlConfig, nodes: Sequence[int]) -> None:
    """Check that on a cluster without GPUs each trainer rank and each process of a rollout engine gets a CPU, an engine's on one node.

    Without this check Ray would wait for CPUs silently.

    Args:
        nodes: number of CPUs of each node.
    Raises:
        ValueError: there are too few.
    """
    size, engines = rl.rollout.tensor_parallel_size, rl.rollout.engines
    if sum(nodes) < rl.cpus or sum(count // size for count in nodes) < engines:
        together, lower = (" (of one node)", "rl.rollout.tensor_parallel_size, ") if size > 1 else ("", "")
        raise ValueError(
            f"rl: expected {rl.cpus} CPUs of the Ray cluster, 1 for each of {number_of(rl.ranks, 'trainer rank')} and {size}{together} for "
            f"each of {number_of(engines, 'rollout engine')}, got {' and '.join(map(str, nodes))}; lower {lower}rl.rollout.engines or the "
            "ranks of rl.placement and rl.trainer, or start Ray with more (--num-cpus)"
        )


def cluster_memory(timeout: float) -> list[Machine]:
    """Return each node's memory, and the memory of the GPUs that it has for Ray's actors.

    Raises:
        RoleLost: a node doesn't answer within `timeout` seconds.
    """
    nodes = [node for node in ray.nodes() if node["Alive"]]
    found = _of_nodes(nodes, whole, "their memory", timeout)
    counts = [int(node["Resources"].get("GPU", 0)) for node in nodes]
    return [replace(machine, gpus=machine.gpus[:count]) for machine, count in zip(found, counts, strict=True)]


def check_nodes(files: JobFiles | None, interface: str | None, *, timeout: float) -> None:
    """Check every node on which actors may be placed, before any is.

    Args:
        files: the job's files, with the versions of packages that a node must have; None: the nodes see the project's folder.
        interface: network interface that a node must have; None: any.
    Raises:
        ValueError: a node lacks a package, the interface or the storage, or has another version.
        RoleLost: a node doesn't answer within `timeout` seconds.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    found = _of_nodes(nodes, partial(_looked_at, files), "their packages", timeout) if files or interface else []
    packages = files.packages if files else {}
    for node, (versions, interfaces, no_storage) in zip(nodes, found, strict=False):
        name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
        if lines := differences(packages, versions):
            raise ValueError(refusal(name, lines))
        if no_storage is not None:
            raise ValueError(f"node {name}: {no_storage}")
        if interface is not None and interface not in interfaces:
            raise ValueError(
                f"cluster.network_interface: expected one that every node has, got {interface}, where node {name} has "
                f"{', '.join(interfaces)}; correct it, or set it to null"
            )


def _looked_at(files: JobFiles | None) -> tuple[dict[str, str], list[str], str | None]:
    """Return this node's packages and network interfaces, and why it can't use the storage (None: it can)."""
    versions, interfaces, no_storage = found_here(files.packages if files else ()), sorted(psutil.net_if_addrs()), None
    try:
        if files is not None:
            files.storage()
    except StorageRefused as error:
        no_storage = str(error)
    return versions, interfaces, no_storage


def _of_nodes(nodes: Sequence[Mapping[str, Any]], look: Callable[[], Any], what: str, timeout: float) -> list[Any]:
    """Return what `look` returns on each node.

    Raises:
        RoleLost: a node doesn't answer within `timeout` seconds.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(lambda: look())
    where = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    try:
        return ray.get([task.options(scheduling_strategy=there).remote() for there in where], timeout=timeout)
    except RayError as error:
        raise RoleLost(f"cluster: expected {number_of(len(nodes), 'node')} to tell {what} within {timeout:.0f} s, got {error}") from error


def use_node_interface() -> None:
    """Have gloo listen at the address by which Ray knows this node, unless an interface is set.

    By default gloo listens at the address of the host's name, which is 127.0.1.1 on a stock Debian.
    """
    address = get_node_ip_address()
    names = [name for name, bound in psutil.net_if_addrs().items() if any(a.address == address for a in bound)]
    if names and not os.environ.get(GLOO_INTERFACE):
        os.environ[GLOO_INTERFACE] = names[0]


def leave_cluster() -> None:
    ray.shutdown()


def reserve(what: str, bundles: list[dict[str, float]], *, deadline: float, meanwhile: Callable[[], None] = lambda: None) -> PlacementGroup:
    """Reserve resources for actors, close together.

    Args:
        meanwhile: function that is called now and then while there is no room; an exception in it ends the wait.
    Raises:
        RoleLost: no room within `deadline` seconds.
    """
    group, until = placement_group(bundles, strategy="PACK"), time.monotonic() + deadline
    wanted = " and ".join(f"{bundles.count(b)} x ({_resources(b)})" for k, b in enumerate(bundles) if b not in bundles[:k])
    told = False
    try:
        while not group.wait(timeout_seconds=max(1, min(LOOK_SECONDS, int(until - time.monotonic())))):  # Ray waits whole seconds
            if time.monotonic() >= until:
                raise RoleLost(
                    f"{what}: expected room for {wanted} within {deadline:.0f} s, got none ({_room()}); add nodes or lower its ranks"
                )
            meanwhile()
            if not told:
                log.warning("%s: no room for %s yet (%s); waiting up to %.0f s", what, wanted, _room(), deadline)
                told = True
    except BaseException:
        remove_placement_group(group)
        raise
    return group


def _resources(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in bundle.items())


def _room() -> str:
    """Return the cluster's CPUs and GPUs, in all and free, as text."""
    has, free = ray.cluster_resources(), ray.available_resources()
    nodes = number_of(sum(node["Alive"] for node in ray.nodes()), "node")
    return f"{nodes}: " + ", ".join(f"{has[name]:g} {name}, {free.get(name, 0.0):g} free" for name in ("CPU", "GPU") if name in has)


def release(bundles: Sequence[tuple[PlacementGroup, int]]) -> None:
    """Remove the placement groups of bundles."""
    for group in {group.id: group for group, _ in bundles}.values():
        remove_placement_group(group)
