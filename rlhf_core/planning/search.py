"""Search for the fastest placement that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from rlhf_core.config import RlConfig, RoleGroup, number_of
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


def of_params(work: Workload, gpus: int, rl: RlConfig) -> tuple[Group, ...]:
    """The groups of `rl.placement`, each rank on a GPU, and the engines on theirs; or all on the same GPUs if there are no more.

    Raises:
        ValueError: there are fewer GPUs than that, so that processes of several groups would share one.
    """
    groups = [Group(group.ranks or rl.trainer.ranks, _roles(work, group)) for group in rl.placement]
    groups = [group for group in groups if group.roles]
    engines, ranks = rl.rollout.engines * rl.rollout.tensor_parallel_size, sum(group.gpus for group in groups)
    if ranks + engines <= gpus:
        return (Group(engines, (ENGINE,)), *groups)
    if len(groups) == 1 and max(ranks, engines) <= gpus and ranks == engines:
        return colocated(work, ranks)
    raise ValueError(
        f"rl.placement: expected at least {ranks + engines} GPUs for {number_of(ranks, 'rank')} and engines on {engines}, or ranks of one "
        f"group on the engines' GPUs, got {number_of(gpus, 'GPU')}; a step on shared ones isn't predicted (--stages counts their memory)"
    )


def _roles(work: Workload, group: RoleGroup) -> tuple[str, ...]:
    """Of the workload's, those of a group of `rl.placement`."""
    named = {POLICY: "policy", CRITIC: "critic", REFERENCE: "reference", REWARD: "reward_models"}
    return tuple(role for role in work.roles if named.get(role) in group.roles)


def layouts(work: Workload, gpus: int) -> Iterator[tuple[Group, ...]]:
    yield colocated(work, gpus)
    for engines in sorted({max(1, round(gpus * share)) for share in SHARES}):
        if gpus - engines >= 1:
            yield apart(work, gpus, engines)
        if work.critic is not None and (gpus - engines) // 2 >= 1:
            yield three_parts(work, gpus, engines)


def candidates(
    work: Workload,
    cluster: Cluster,
    *,
    checkpointing: bool | None = None,
    sleep: bool = True,
    max_concurrent: int = 256,
    gloo: bool = False,
) -> Iterator[Placement]:
    """All placements to try. checkpointing: None tries both."""
    recompute = (False, True) if checkpointing is None else (checkpointing,)
    stages = [(stage, offload) for stage, offload in product(range(4), (False, True)) if stage or not offload]
    for groups, (stage, offload), width, again in product(layouts(work, cluster.gpus), stages, TENSOR_PARALLEL, recompute):
        placement = Placement(groups, stage, offload, width, again, sleep, max_concurrent, gloo=gloo)
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
    gloo: bool = False,
) -> Prediction:
    """The fastest placement that fits, or else the one that lacks least memory; of equal ones the simplest.

    Of those that fit, ones whose ranks divide the minibatch come first, and among these ones with a margin of the prediction's error.
    """
    tried = candidates(work, cluster, checkpointing=checkpointing, sleep=sleep, max_concurrent=max_concurrent, gloo=gloo)

    def rank(found: Prediction) -> tuple[float, bool, bool, float]:
        return found.missing, not divides_minibatch(work, found.placement), not found.keeps_margin(cluster), found.step

    return min((predict(work, placement, cluster, efficiency) for placement in tried), key=rank)


def divides_minibatch(work: Workload, placement: Placement) -> bool:
    """Whether each group of ranks can divide a minibatch, as rl.minibatch_size must be."""
    return not any(work.minibatch % group.gpus for group in _trainers(placement))


def _trainers(placement: Placement) -> list[Group]:
    return [group for group in placement.groups if group.roles != (ENGINE,)]


def settings(placement: Placement) -> dict[str, Any]:
    """The keys of params.yaml that a placement of `propose` decides; `of_params` gives its groups again."""
    engines, policy = placement.group_of(ENGINE), placement.group_of(POLICY)
    turns = {"rl.rollout.take_turns": placement.sleep} if engines is policy else {}
    return {
        "rl.placement": "together" if len(_trainers(placement)) == 1 else "two_groups",
        "rl.trainer.ranks": policy.gpus,
        "rl.trainer.sequence_parallel": placement.sequence_parallel,
        "rl.trainer.zero_stage": placement.zero_stage,
        "rl.trainer.offload_optimizer": placement.offload,
        "rl.trainer.gradient_checkpointing": placement.checkpointing,
        "rl.rollout.engines": engines.gpus // placement.tensor_parallel,
        "rl.rollout.tensor_parallel_size": placement.tensor_parallel,
        **turns,
    }
