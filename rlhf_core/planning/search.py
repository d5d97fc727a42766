"""Search for the fastest placement that fits."""

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


@dataclass(frozen=True)
class Search:
    """What is tried. None: everything.

    layouts: of LAYOUTS. engine_gpus: where engines have separate ones. sleep, max_concurrent, gloo: of each placement.
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
    """All divisions of the GPUs by a layout; none if there are too few or, of three parts, no critic."""
    if layout == "colocated":
        yield colocated(work, gpus)
        return
    build, parts = (apart, 1) if layout == "apart" else (three_parts, 2)
    if layout == "three-parts" and work.critic is None:
        return
    shares = {max(1, round(gpus * share)) for share in SHARES} if engine_gpus is None else {engine_gpus}
    yield from (build(work, gpus, engines) for engines in sorted(shares) if gpus - engines >= parts)


def impossible(layout: str, work: Workload, gpus: int) -> str:
    """Why no placement of the layout exists, whatever its settings; empty: one does."""
    if layout == "three-parts" and work.critic is None:
        return "needs a critic"
    return "" if any(groups_of(layout, work, gpus)) else f"needs more than {number_of(gpus, 'GPU')}"


def candidates(work: Workload, cluster: Cluster, search: Search, layout: str) -> Iterator[Placement]:
    """All placements of a layout to try."""
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
    """Of each layout that is possible the best placement, as `propose` ranks them, the best layout first.

    Raises:
        ValueError: none is possible.
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
    """The same placement with engines on the fewest GPUs that is as good, but for seconds within the prediction's error."""

    def is_as_good(other: Prediction) -> bool:
        same = replace(other.placement, tensor_parallel=best.placement.tensor_parallel) == best.placement
        return same and rank(other)[:-1] == rank(best)[:-1] and other.step <= best.step * (1 + ERROR)

    return min(filter(is_as_good, tried), key=lambda other: other.placement.tensor_parallel)


def _rank(work: Workload, cluster: Cluster) -> Callable[[Prediction], tuple[float, bool, bool, float]]:
    def rank(found: Prediction) -> tuple[float, bool, bool, float]:
        return found.missing, not divides_minibatch(work, found.placement), not found.keeps_margin(cluster), found.step

    return rank


def propose(work: Workload, cluster: Cluster, efficiency: Efficiency, search: Search | None = None) -> Prediction:
    """The fastest placement that fits, or else the one that lacks least memory; of equal ones, as `_narrowest` says, the simplest.

    Of those that fit, ones whose ranks divide the minibatch come first, and among these ones with a margin of the prediction's error.

    Raises:
        ValueError: none is possible.
    """
    return next(iter(best_of_layouts(work, cluster, efficiency, search or Search()).values()))


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
