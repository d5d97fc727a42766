"""Search for the fastest placement that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from rlhf_core.planning.hardware import Cluster, Efficiency
from rlhf_core.planning.phases import predict
from rlhf_core.planning.plan import CRITIC, ENGINE, POLICY, REFERENCE, REWARD, Group, Placement, Prediction, Workload

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the GPUs for engines, if they don't share the trainer's
TENSOR_PARALLEL = (1, 2, 4, 8)


def colocated(work: Workload, gpus: int) -> tuple[Group, ...]:
    """All roles on all GPUs."""
    return (Group(gpus, work.roles),)


def apart(work: Workload, gpus: int, engines: int) -> tuple[Group, ...]:
    """Engines on separate GPUs."""
    return (Group(engines, (ENGINE,)), Group(gpus - engines, work.roles[1:]))


def three_parts(work: Workload, gpus: int, engines: int) -> tuple[Group, ...]:
    """Three groups: engines; policy and reference; critic and reward models, which train in parallel with the policy."""
    half = (gpus - engines) // 2
    first = tuple(role for role in (POLICY, REFERENCE) if role in work.roles)
    second = tuple(role for role in (CRITIC, REWARD) if role in work.roles)
    return (Group(engines, (ENGINE,)), Group(half, first), Group(half, second))


def layouts(work: Workload, gpus: int) -> Iterator[tuple[Group, ...]]:
    yield colocated(work, gpus)
    for engines in sorted({max(1, round(gpus * share)) for share in SHARES}):
        if gpus - engines >= 1:
            yield apart(work, gpus, engines)
        if work.critic is not None and (gpus - engines) // 2 >= 1:
            yield three_parts(work, gpus, engines)


def candidates(
    work: Workload, cluster: Cluster, *, checkpointing: bool | None = None, sleep: bool = True, max_concurrent: int = 256
) -> Iterator[Placement]:
    """All placements to try. checkpointing: None tries both."""
    recompute = (False, True) if checkpointing is None else (checkpointing,)
    stages = [(stage, offload) for stage, offload in product(range(4), (False, True)) if stage or not offload]
    for groups, (stage, offload), width, again in product(layouts(work, cluster.gpus), stages, TENSOR_PARALLEL, recompute):
        placement = Placement(groups, stage, offload, width, again, sleep, max_concurrent)
        engines = placement.group_of(ENGINE).gpus
        if width <= cluster.gpus_per_node and engines % width == 0 and work.policy.heads % width == 0:
            yield placement


def propose(
    work: Workload,
    cluster: Cluster,
    efficiency: Efficiency,
    *,
    checkpointing: bool | None = None,
    sleep: bool = True,
    max_concurrent: int = 256,
) -> Prediction:
    """The fastest placement that fits, or else the one that lacks least memory; of equal ones the simplest."""
    tried = candidates(work, cluster, checkpointing=checkpointing, sleep=sleep, max_concurrent=max_concurrent)
    return min((predict(work, placement, cluster, efficiency) for placement in tried), key=lambda found: (found.missing, found.step))
