"""Compares what the processes of a stage take with the memory of a machine.

A prediction of a decoder with gated MLPs is within 10% of what processes took on a CPU (docs/planning.md). Models of other architectures
aren't predicted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_core.config import Params, number_of
from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.machine import Machine
from rlhf_core.planning.memory import ENGINE_PROCESS, element_bytes
from rlhf_core.planning.online import rl_engine, rl_ranks
from rlhf_core.planning.placement import GpuPlacement, place
from rlhf_core.planning.stages import ALLOCATOR, PLANS, RAY_HOST, TRAINER_GPU, Models, Moments, Process

ERROR = 0.1  # of a prediction
RESERVED = 0.03  # of the available memory, for fragmentation and other processes
GPU_HOST = 3 * GIB  # of a process on a GPU: libraries and pinned buffers


@dataclass(frozen=True)
class Shortage:
    """A process that lacks memory, or all processes of a host together.

    needed, available: bytes. where: the name of the memory. parts: bytes by role and kind, the largest phase included.
    """

    name: str
    section: str
    needed: float
    available: float
    where: str
    parts: Mapping[str, float]

    @property
    def ratio(self) -> float:
        """Needed over available bytes."""
        return self.needed / max(self.available, 1.0)

    @property
    def is_certain(self) -> bool:
        return self.ratio > 1 + ERROR


@dataclass(frozen=True)
class Plan:
    """The processes of a stage on a machine, moment by moment, and the shortages, the worst first.

    turns: bytes on a GPU in each turn of processes that take turns on it; the largest counts.
    remedy: settings with which the stage fits, empty if none of those tried does; None: not looked for.
    """

    stage: str
    moments: Moments
    shortages: list[Shortage]
    turns: Mapping[str, float] = field(default_factory=dict)
    remedy: Mapping[str, Any] | None = None


def check(stage: str, params: Params, models: Models, machine: Machine) -> Plan:
    """Return the plan of a stage of dvc.yaml or rounds/dvc.yaml.

    Raises:
        Unpredictable: a model's size or architecture isn't known.
        ValueError: settings don't suit the model or the number of GPUs.
    """
    if stage == "train_policy" and params.alignment.method == "rl":
        return _check_rl(params, models, machine)
    name = params.alignment.method if stage == "train_policy" else stage
    if name not in PLANS:
        return Plan(stage, [], [])
    moments = PLANS[name](params, models, on_gpu=bool(machine.gpus))
    if not machine.gpus:  # several ranks train in a job of Ray
        moments = [[*moment, _ray(stage)] if any(p.count > 1 for p in moment) else moment for moment in moments]
    found = [shortage for moment in moments for shortage in _shortages(moment, machine)]
    return Plan(stage, moments, sorted(found, key=lambda s: -s.ratio))


def _check_rl(params: Params, models: Models, machine: Machine) -> Plan:
    rl, on_gpu = params.rl, bool(machine.gpus)
    placement = place(rl, len(machine.gpus), machine.nodes)
    ranks = rl_ranks(rl, params.model, models, on_gpu=on_gpu)
    rollouts = rl_engine(rl, params.model, models, on_gpu=on_gpu, per_engine=placement.engine_share(rl))
    if on_gpu and placement.takes_turns(rl):
        return _check_turns(placement, ranks, rollouts, machine, layer=_largest_layer(params, models))
    moment = [*ranks, rollouts]
    if not on_gpu:
        weights = rollouts.parts["engine: weights"]
        moment.append(_ray("train_policy", 2 * weights))
    beside = {}
    for number, process in enumerate(ranks if on_gpu else ()):
        engines = placement.engines_beside_ranks(number) * (rollouts.share or 0.0) * min(gpu.total for gpu in machine.gpus)
        beside[process.name] = engines + sum(ranks[other].needed + TRAINER_GPU for other in placement.groups_beside(number))
    found = _shortages(moment, machine, beside=beside)
    return Plan("train_policy", [moment], sorted(found, key=lambda s: -s.ratio))


def _largest_layer(params: Params, models: Models) -> float:
    """Return the bytes of the weights that are gathered and sent at once: a decoder layer, the token embedding, or the head."""
    shape = models.start.shape
    return element_bytes(params.model.dtype) * max(shape.embedding, shape.trunk / shape.layers)


def _check_turns(placement: GpuPlacement, ranks: list[Process], engines: Process, machine: Machine, *, layer: float) -> Plan:
    """Return the plan of engines and ranks that take turns on GPUs: a process that waits keeps its context there, and ranks move the rest
    to the host.

    Args:
        layer: bytes of the policy's largest layer, which exists twice: gathered, and in the buffer that engines read.
    """
    ranks = [replace(rank, host=rank.host + sum(rank.parts.values())) for rank in ranks]
    at_once = max(map(placement.engines_beside_ranks, range(len(ranks))))
    of_engines = {gpu for first in placement.engines for gpu in placement.engine_gpus(first)}
    contexts = TRAINER_GPU * max(sum(gpu in group for group in placement.ranks) for gpu in of_engines)
    beside, turns = {engines.name: contexts}, {}
    for number, rank in enumerate(ranks):
        others = sum(ranks[other].needed + TRAINER_GPU for other in placement.groups_beside(number))
        beside[rank.name] = placement.engines_beside_ranks(number) * ENGINE_PROCESS + others
        turns[f"the turn of {rank.name}"] = rank.needed + TRAINER_GPU + beside[rank.name]
    weights = {
        "policy: weights": max(rank.parts.get("policy: weights", 0.0) for rank in ranks),
        "engine: weights": at_once * engines.parts["engine: weights"],
        "a layer, gathered and sent": 2 * layer,
        "processes": contexts + at_once * ENGINE_PROCESS,
    }
    sent = sum(weights.values())
    turns = {"the engines' turn": at_once * engines.needed + contexts, "weights on their way": sent, **turns}
    where = {
        p.name: f"its GPU, in {turn}," for p, turn in ((engines, "the engines' turn"), *((rank, "the trainer's turn") for rank in ranks))
    }
    found = _shortages([*ranks, engines], machine, beside=beside, where=where)
    free = _usable(min(gpu.free for gpu in machine.gpus))
    if sent > free:
        name = "train_policy: weights on their way to the engines"
        found.append(Shortage(name, "rl.rollout", sent, free, "a GPU of engine and rank", weights))
    return Plan("train_policy", [[*ranks, engines]], sorted(found, key=lambda s: -s.ratio), turns)


def _ray(stage: str, weights: float = 0.0) -> Process:
    """Return the processes of Ray itself.

    Args:
        weights: bytes of weights on their way to rollout engines.
    """
    return Process(f"{stage}: Ray", "cluster", {"Ray: weights on their way to the engines": weights} if weights else {}, base=RAY_HOST)


def _shortages(
    moment: list[Process], machine: Machine, *, beside: Mapping[str, float] | None = None, where: Mapping[str, str] | None = None
) -> list[Shortage]:
    """Return the shortages at one moment.

    Args:
        beside: bytes that others take of a process's GPU, by the process's name.
        where: what messages call a process's GPU, by the process's name.
    """
    beside, where = beside or {}, where or {}
    if not machine.gpus:
        parts = {f"{p.count} x {p.name}" if p.count > 1 else p.name: p.count * (p.needed + without_models(p)) + p.once for p in moment}
        largest = max(moment, key=lambda p: p.count * p.needed)
        host = _usable(machine.host)
        needed = sum(parts.values())
        told = parts if len(parts) > 1 else _parts(largest)
        return [Shortage(largest.name, largest.section, needed, host, "this machine", told)] if needed > host else []
    found = []
    smallest = min(machine.gpus, key=lambda gpu: gpu.free)
    for process in moment:
        if process.share is not None:
            own = TRAINER_GPU if process.count > 1 and process.ranks_key is not None else 0.0  # the rank's own process
            left = smallest.free - own - beside.get(process.name, 0.0)
            available, needed = _usable(min(process.share * smallest.total, left)), process.needed
        else:
            available, needed = _usable(smallest.free - beside.get(process.name, 0.0)), process.needed + TRAINER_GPU
        if needed > available:
            found.append(Shortage(process.name, process.section, needed, available, where.get(process.name, "its GPU"), _parts(process)))
        if process.count > len(machine.gpus) and (process.share is None or process.ranks_key is not None):
            key, there = process.ranks_key or f"{process.section}.ranks", len(machine.gpus)
            why = "because two ranks can't share a GPU"
            count = process.count * process.gpus
            gpus = number_of(there, "GPU that is", "GPUs that are")
            raise ValueError(f"{key}: expected at most the {gpus} there, got {count}; lower it, {why}")
    per_host = machine.gpus_per_host or len(machine.gpus)
    parts = {p.name: min(p.count, per_host // p.gpus) * (p.host + GPU_HOST * _processes(p)) + p.once for p in moment}
    needed, available = sum(parts.values()), _usable(machine.host)
    if needed > available:
        largest = max(moment, key=lambda p: parts[p.name])
        found.append(Shortage(largest.name, largest.section, needed, available, "a host of the GPUs", parts))
    return found


def without_models(process: Process) -> float:
    """Return the bytes of a process on a CPU besides its models: its libraries, and freed memory that it keeps."""
    return process.base + ALLOCATOR


def _processes(process: Process) -> int:
    """Return the number of operating-system processes: an engine on several GPUs has one for each GPU and one of its own."""
    return 1 + process.gpus if process.gpus > 1 else 1


def _usable(available: float) -> float:
    return max(0.0, available * (1 - RESERVED))


def _parts(process: Process) -> dict[str, float]:
    peak = {process.peak: process.phases[process.peak]} if process.phases else {}
    return {**process.parts, **peak}
