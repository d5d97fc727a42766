"""The placement that fits and takes the least time, of those that are tried."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from tools.planning.hardware import Cluster, Efficiency
from tools.planning.phases import predict
from tools.planning.plan import CRITIC, ENGINE, POLICY, REFERENCE, REWARD, Group, Placement, Prediction, Workload, lacking

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the GPUs, for engines apart from the trainer
TENSOR_PARALLEL = (1, 2, 4, 8)


def colocated(work: Workload, gpus: int) -> tuple[Group, ...]:
    """All roles on all GPUs."""
    return (Group(gpus, work.roles),)


def apart(work: Workload, gpus: int, engines: int) -> tuple[Group, ...]:
    """Engines on GPUs of their own."""
    return (Group(engines, (ENGINE,)), Group(gpus - engines, work.roles[1:]))


def three_parts(work: Workload, gpus: int, engines: int) -> tuple[Group, ...]:
    """Engines; policy and reference; critic and reward models, which learn at the same time as the policy."""
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
    """Args: checkpointing: None tries both."""
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
    only_built: bool = False,
) -> Prediction:
    """The quickest placement that fits; where none does, the one that lacks least. Of equal ones the simplest, which comes first.

    Args:
        only_built: nothing that this pipeline can't do.
    """
    tried = candidates(work, cluster, checkpointing=checkpointing, sleep=sleep and not only_built, max_concurrent=max_concurrent)
    wanted = (placement for placement in tried if not (only_built and lacking(placement)))
    return min((predict(work, placement, cluster, efficiency) for placement in wanted), key=lambda found: (found.missing, found.step))
