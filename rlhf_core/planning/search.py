"""Searches for the fastest placement that fits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from rlhf_core.config import RlConfig, RoleGroup, number_of
from rlhf_core.planning.hardware import Cluster, Efficiency
from rlhf_core.planning.phases import predict
from rlhf_core.planning.plan import CRITIC, ENGINE, POLICY, REFERENCE, REWARD, Group, Placement, Prediction, Workload
from rlhf_core.planning.shortages import ERROR

SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)  # of the GPUs for engines, if they don't share the trainer's
TENSOR_PARALLEL = (1, 2, 4, 8)
LAYOUTS = ("colocated", "apart", "three-parts")


def colocated(work: Workload, gpus: int) -> tuple[Group, ...]:
    """Return one group: all roles on all GPUs."""
    return (Group(gpus, work.roles),)


def apart(work: Workload, gpus: int, engines: int) -> tuple[Group, ...]:
    """Return two groups: the engines, and all other roles."""
    return (Group(engines, (ENGINE,)), Group(gpus - engines, work.roles[1:]))


def three_parts(work: Workload, gpus: int, engines: int) -> tuple[Group, ...]:
    """Return three groups: engines; policy and reference; critic and reward models. The last two train in parallel."""
    half = (gpus - engines) // 2
    first = tuple(role for role in (POLICY, REFERENCE) if role in work.roles)
    second = tuple(role for role in (CRITIC, REWARD) if role in work.roles)
    return (Group(engines, (ENGINE,)), Group(half, first), Group(half, second))


def of_params(work: Workload, gpus: int, rl: RlConfig) -> tuple[Group, ...]:
    """Return the groups of `rl.placement`, each rank on its own GPU, and the engines; or all on the same GPUs if both need the same number.

    Raises:
        ValueError: there are too few GPUs, so that processes of several groups would share one.
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
    """Return the roles of the workload that a group of `rl.placement` has."""
    named = {POLICY: "policy", CRITIC: "critic", REFERENCE: "reference", REWARD: "reward_models"}
    return tuple(role for role in work.roles if named.get(role) in group.roles)


@dataclass(frozen=True)
class Search:
    """Bounds of the search. None: all values are tried.

    layouts: some of LAYOUTS. engine_gpus: GPUs of the engines in layouts that separate them. sleep, max_concurrent, gloo: as in
    `Placement`.
    """

    layouts: tuple[str, ...] = LAYOUTS
    engine_gpus: int | None = None
    zero_stage: int | None = None
    offload: bool | None = None
    tensor_parallel: int | None = None
    checkpointing: bool | None = None
    sleep: bool = True
    max_concurrent: int = 256
    gloo: bool = False


def groups_of(layout: str, work: Workload, gpus: int, engine_gpus: int | None = None) -> Iterator[tuple[Group, ...]]:
    """Yield all divisions of the GPUs by a layout; none if there are too few GPUs, or for three parts no critic."""
    if layout == "colocated":
        yield colocated(work, gpus)
        return
    build, parts = (apart, 1) if layout == "apart" else (three_parts, 2)
    if layout == "three-parts" and work.critic is None:
        return
    shares = {max(1, round(gpus * share)) for share in SHARES} if engine_gpus is None else {engine_gpus}
    yield from (build(work, gpus, engines) for engines in sorted(shares) if gpus - engines >= parts)


def impossible(layout: str, work: Workload, gpus: int) -> str:
    """Return why no placement of the layout exists, whatever its settings; empty if there is one."""
    if layout == "three-parts" and work.critic is None:
        return "needs a critic"
    return "" if any(groups_of(layout, work, gpus)) else f"needs more than {number_of(gpus, 'GPU')}"


def candidates(work: Workload, cluster: Cluster, search: Search, layout: str) -> Iterator[Placement]:
    """Yield all placements of a layout to be tried."""
    recompute = (False, True) if search.checkpointing is None else (search.checkpointing,)
    stages = range(4) if search.zero_stage is None else (search.zero_stage,)
    offload = (False, True) if search.offload is None else (search.offload,)
    widths = TENSOR_PARALLEL if search.tensor_parallel is None else (search.tensor_parallel,)
    divisions = groups_of(layout, work, cluster.gpus, search.engine_gpus)
    for groups, stage, on_host, width, again in product(divisions, stages, offload, widths, recompute):
        placement = Placement(groups, stage, on_host, width, again, search.sleep, search.max_concurrent, gloo=search.gloo)
        engines = placement.group_of(ENGINE).gpus
        divides = width <= cluster.gpus_per_node and engines % width == 0 and work.policy.heads % width == 0
        if divides and (stage or not on_host):
            yield placement


def best_of_layouts(work: Workload, cluster: Cluster, efficiency: Efficiency, search: Search) -> dict[str, Prediction]:
    """Return the best placement of each possible layout, the best layout first, ranked as `propose` says.

    Raises:
        ValueError: no layout is possible.
    """
    rank = _rank(work, cluster)
    found = {}
    for layout in search.layouts:
        tried = [predict(work, placement, cluster, efficiency) for placement in candidates(work, cluster, search, layout)]
        if tried:
            found[layout] = _narrowest(min(tried, key=rank), tried, rank)
    if not found:
        raise ValueError(
            f"placement: expected one that {number_of(cluster.gpus, 'GPU')} and the model's {number_of(work.policy.heads, 'head')} allow, "
            "got none; drop --layout, --engine-gpus, --tensor-parallel or --offload"
        )
    return dict(sorted(found.items(), key=lambda item: rank(item[1])))


def _narrowest(best: Prediction, tried: list[Prediction], rank: Callable[[Prediction], tuple]) -> Prediction:
    """Return the placement that equals the best one but has engines on the fewest GPUs, and is as fast within the prediction's error."""

    def is_as_good(other: Prediction) -> bool:
        same = replace(other.placement, tensor_parallel=best.placement.tensor_parallel) == best.placement
        return same and rank(other)[:-1] == rank(best)[:-1] and other.step <= best.step * (1 + ERROR)

    return min(filter(is_as_good, tried), key=lambda other: other.placement.tensor_parallel)


def _rank(work: Workload, cluster: Cluster) -> Callable[[Prediction], tuple[float, bool, bool, float]]:
    def rank(found: Prediction) -> tuple[float, bool, bool, float]:
        return found.missing, not divides_minibatch(work, found.placement), not found.keeps_margin(cluster), found.step

    return rank


def propose(work: Workload, cluster: Cluster, efficiency: Efficiency, search: Search | None = None) -> Prediction:
    """Return the fastest placement that fits, or else the one that lacks least memory.

    Among those that fit, placements whose ranks divide the minibatch come first, and among these the ones with a margin of the prediction's
    error. Engines are on the fewest GPUs that are as good (`_narrowest`).

    Raises:
        ValueError: no placement is possible.
    """
    return next(iter(best_of_layouts(work, cluster, efficiency, search or Search()).values()))


def divides_minibatch(work: Workload, placement: Placement) -> bool:
    """Return whether each group of ranks can divide a minibatch, as rl.minibatch_size requires."""
    return not any(work.minibatch % group.gpus for group in _trainers(placement))


def _trainers(placement: Placement) -> list[Group]:
    return [group for group in placement.groups if group.roles != (ENGINE,)]


def settings(placement: Placement) -> dict[str, Any]:
    """Return the keys of params.yaml that a placement of `propose` decides, from which `of_params` makes its groups again."""
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
