"""Predicts the seconds of a step's phases: generate, score, update, sync, and with engines that share GPUs the turns."""

from __future__ import annotations

import math

from rlhf_core.config import number_of
from rlhf_core.planning.hardware import Cluster, Efficiency
from rlhf_core.planning.memory import element_bytes
from rlhf_core.planning.plan import (
    CRITIC,
    ENGINE,
    POLICY,
    REFERENCE,
    REWARD,
    Group,
    Placement,
    Prediction,
    Workload,
    concurrency,
    group_memory,
    host_bytes,
    trained_parameters,
    usable_host,
)
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.timing import (
    Requests,
    compute_seconds,
    exchange_traffic,
    forward_flops,
    gather_traffic,
    generation,
    gradient_traffic,
    offload_seconds,
    traffic_seconds,
    update_flops,
)


def predict(work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency) -> Prediction:
    """Return the memory and time of one step.

    Raises:
        ValueError: a role is missing or repeated, the groups don't fit the cluster, or tensor parallelism or offloading is impossible.
    """
    _check(work, placement, cluster)
    memory = tuple(group_memory(work, group, placement, cluster) for group in placement.groups)
    engines = next(m for m in memory if ENGINE in m.group.roles)
    at_a_time = concurrency(work, placement, engines)
    host = host_bytes(work, placement, memory, cluster)
    missing = max(0.0, host - usable_host(cluster))
    return Prediction(placement, memory, phase_seconds(work, placement, cluster, efficiency, at_a_time), at_a_time, host, missing)


def _check(work: Workload, placement: Placement, cluster: Cluster) -> None:
    held = sorted(role for group in placement.groups for role in group.roles)
    if held != sorted(work.roles):
        raise ValueError(f"groups: expected each of {', '.join(work.roles)} once, got {', '.join(held)}; correct the placement")
    used = sum(group.gpus for group in placement.groups)
    if used > cluster.gpus or any(group.gpus < 1 for group in placement.groups):
        raise ValueError(f"groups: expected at least one GPU each and {cluster.gpus} in all, got {used}; change the sizes")
    engines = placement.group_of(ENGINE).gpus
    if engines % placement.tensor_parallel or work.policy.heads % placement.tensor_parallel:
        raise ValueError(
            f"tensor_parallel: expected a divisor of {number_of(engines, 'GPU')} and {number_of(work.policy.heads, 'head')}, got "
            f"{placement.tensor_parallel}; change it"
        )
    shared, trained = placement.sequence_parallel, [g.gpus for g in placement.groups if g.roles != (ENGINE,)]
    if any(gpus % shared for gpus in trained) or work.policy.heads % shared:
        raise ValueError(
            f"sequence_parallel: expected a divisor of {trained} GPUs and {number_of(work.policy.heads, 'head')}, got {shared}; "
            "change one of them"
        )
    if placement.offload and placement.zero_stage == 0:
        raise ValueError("offload: expected zero_stage 1 to 3 with it, got 0; DeepSpeed moves only a split optimizer to the host")


def phase_seconds(work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency, at_a_time: float) -> dict[str, float]:
    """Return the seconds of each phase. `at_a_time` is the number of concurrent responses per engine."""
    arguments = (work, placement, cluster, efficiency)
    turns = {"turns": seconds} if (seconds := turn_seconds(*arguments)) else {}
    return {
        "generate": generate_seconds(*arguments, at_a_time),
        **turns,
        "score": max(score_seconds(group, *arguments) for group in placement.groups),
        "update": max(update_seconds(group, *arguments) for group in placement.groups),
        "sync": sync_seconds(*arguments),
    }


def turn_seconds(work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency) -> float:
    """Return the seconds in which the roles beside an engine move their memory to the host and back, once a step. The engine drops its
    weights.
    """
    group = placement.group_of(ENGINE)
    if len(group.roles) == 1 or not placement.sleep:
        return 0.0
    parts = group_memory(work, group, placement, cluster).parts
    moved = sum(size for name, size in parts.items() if ": " in name and not name.startswith(ENGINE))
    return 2 * moved / (cluster.host_link * efficiency.network)


def generate_seconds(work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency, at_a_time: float) -> float:
    """Return the seconds of generation. Engines share the prompts evenly, and a prompt's samples stay together."""
    engines = placement.group_of(ENGINE).gpus // placement.tensor_parallel
    prompts = math.ceil(work.samples / work.group_size / engines)
    requests = Requests(prompts, prompts * work.group_size, work.prompt_length, work.response_length, work.longest)
    times = generation(
        work.policy,
        requests,
        cluster,
        efficiency,
        tensor_parallel=placement.tensor_parallel,
        concurrency=at_a_time,
        dtype=work.dtype,
    )
    return times.prefill + times.decode


def _scored(work: Workload, group: Group) -> list[tuple[ModelShape, bool, int]]:
    """Return (shape, whether the language-model head is computed, parameters) for each of a group's models that score the samples."""
    models: list[tuple[ModelShape, bool, int]] = []
    models += [(work.policy, True, work.policy.parameters) for role in group.roles if role in (POLICY, REFERENCE)]
    if CRITIC in group.roles and work.critic is not None:
        models.append((work.critic, False, work.critic.scalar_parameters))
    if REWARD in group.roles:
        models += [(shape, False, shape.scalar_parameters) for shape in work.reward_models]
    return models


def score_seconds(group: Group, work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency) -> float:
    """Return the seconds of old and reference log-probabilities, values and rewards: one forward pass of each model over all samples."""
    tokens, shared = work.samples * work.sequence, placement.sequence_parallel
    passes = work.micro_batches(work.samples, group.gpus / shared)
    seconds = 0.0
    for shape, head, parameters in _scored(work, group):
        seconds += compute_seconds(forward_flops(shape, tokens, work.sequence, head=head), group.gpus, cluster, efficiency)
        traffic = gather_traffic(parameters, ranks=group.gpus, zero_stage=placement.zero_stage, micro_batches=passes, dtype=work.dtype)
        seconds += traffic_seconds(traffic, group.gpus, cluster, efficiency)
        exchanged = exchange_traffic(shape, tokens / group.gpus, sequence_parallel=shared, dtype=work.dtype)
        seconds += traffic_seconds(exchanged, shared, cluster, efficiency)
    return seconds


def update_seconds(group: Group, work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency) -> float:
    """Return the seconds of policy's and critic's passes over all epochs, with communication in each optimizer step."""
    tokens, shared = work.ppo_epochs * work.samples * work.sequence, placement.sequence_parallel
    steps = work.ppo_epochs * math.ceil(work.samples / work.minibatch)
    passes = work.micro_batches(min(work.minibatch, work.samples), group.gpus / shared)
    seconds = 0.0
    for role, shape in ((POLICY, work.policy), (CRITIC, work.critic)):
        if role not in group.roles or shape is None:
            continue
        forward = forward_flops(shape, tokens, work.sequence, head=role == POLICY)
        flops = update_flops(forward, checkpointing=placement.checkpointing)
        parameters = trained_parameters(work, role)
        traffic = gradient_traffic(parameters, ranks=group.gpus, zero_stage=placement.zero_stage, micro_batches=passes, dtype=work.dtype)
        seconds += compute_seconds(flops, group.gpus, cluster, efficiency)
        seconds += steps * traffic_seconds(traffic, group.gpus, cluster, efficiency)
        exchanged = exchange_traffic(shape, tokens / group.gpus, sequence_parallel=shared, dtype=work.dtype)
        seconds += (3 if placement.checkpointing else 2) * traffic_seconds(exchanged, shared, cluster, efficiency)
        if placement.offload:
            seconds += steps * offload_seconds(parameters, group.gpus, cluster, efficiency, work.dtype)
    return seconds


def sync_seconds(work: Workload, placement: Placement, cluster: Cluster, efficiency: Efficiency) -> float:
    """Return the seconds to send the policy's weights to the engines once, over the link that both groups share.

    On the same GPUs with unsplit weights (ZeRO 0 to 2), the copy is a read and a write in the GPU's memory. By gloo rank 0 copies the
    weights to its host and sends them to all engines, which share its bandwidth; each GPU of an engine copies them from its host. Engines
    on several GPUs count once, though each of their processes gets all weights.
    """
    weights = work.policy.parameters * element_bytes(work.dtype)
    trainer, engines = placement.group_of(POLICY), placement.group_of(ENGINE)
    if placement.gloo:
        sent = weights * engines.gpus / placement.tensor_parallel
        return 2 * weights / (cluster.host_link * efficiency.network) + sent / min(cluster.gloo, cluster.network * efficiency.network)
    if trainer is engines and (placement.zero_stage < 3 or trainer.gpus == 1):
        return 2 * weights / (cluster.gpu.bandwidth * efficiency.bandwidth)
    apart = 0 if trainer is engines else engines.gpus
    return traffic_seconds(weights, trainer.gpus + apart, cluster, efficiency)
