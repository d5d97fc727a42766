"""Processes of actors on any node: where they are, their state, and their end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

MEANWHILE_SECONDS = 1.0
LOOK_SECONDS = 15.0  # seconds to inspect or kill a process on another node, including a worker's start


@dataclass(frozen=True)
class Place:
    """Node and id of an actor's process, and the ids of its GPUs on the node."""

    node: str
    host: str
    pid: int
    gpus: tuple[str, ...]


def place_of_process(_: Any) -> Place:
    """Return the place of this process, which is an actor's."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU") or [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
    return Place(context.get_node_id(), ray.util.get_node_ip_address(), os.getpid(), tuple(gpus))


def by_node(places: Mapping[str, Place]) -> list[str]:
    """Return a line for each node: its address, and the names, ids and GPUs of its processes.

    Args:
        places: places of the processes by their names.
    """
    nodes: dict[str, list[str]] = {}
    for name, place in places.items():
        gpus = f", GPU {' and '.join(place.gpus)}" * bool(place.gpus)
        nodes.setdefault(f"{place.host} (node {place.node[:8]})", []).append(f"{name} (pid {place.pid}{gpus})")
    return [f"{node}: {', '.join(processes)}" for node, processes in nodes.items()]


def get(references: list[ray.ObjectRef], timeout: float, meanwhile: Callable[[], None] | None) -> list[Any]:
    """As `ray.get`; `meanwhile` is called every MEANWHILE_SECONDS, and may raise what ends the wait."""
    until = time.monotonic() + timeout
    while meanwhile is not None and time.monotonic() + MEANWHILE_SECONDS < until:
        try:
            return ray.get(references, timeout=MEANWHILE_SECONDS)
        except GetTimeoutError:
            meanwhile()
    return ray.get(references, timeout=max(0.0, until - time.monotonic()))


def on_nodes(look: Callable[[int], str], places: Sequence[Place | None]) -> list[str | None]:
    """Call `look` for the process at each place, all at the same time, and return the results.

    A result is None if there is no place, or its node doesn't answer in time.
    """
    here, pending = ray.get_runtime_context().get_node_id(), {}
    for number, place in enumerate(places):
        if place is not None and place.node != here:
            there = NodeAffinitySchedulingStrategy(place.node, soft=False)
            pending[number] = ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(place.pid)
    found: list[str | None] = [look(place.pid) if place is not None and place.node == here else None for place in places]
    if pending:
        ray.wait(list(pending.values()), num_returns=len(pending), timeout=LOOK_SECONDS)
    for number, reference in pending.items():
        with suppress(RayError):
            found[number] = ray.get(reference, timeout=0)
    return found


def process_state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def kill_worker(pid: int) -> str:
    """Send SIGKILL to a process if it is a Ray worker, since its id may have been reused, and return its state."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if psutil.Process(pid).cmdline()[:1] and psutil.Process(pid).cmdline()[0].startswith("ray::"):
            os.kill(pid, signal.SIGKILL)
    return process_state(pid)
