"""The workload of a step, its placement on GPUs, and the prediction: memory of each group and seconds of each phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rlhf_core.planning.hardware import Cluster
from rlhf_core.planning.memory import (
    States,
    Training,
    element_bytes,
    forward_activations,
    frozen_model,
    head_forward,
    head_training,
    kv_bytes_per_token,
    kv_capacity,
    kv_parts,
    training_states,
    trunk_activations,
)
from rlhf_core.planning.shape import ModelShape
from rlhf_core.planning.shortages import ERROR, GPU_HOST, RESERVED

ENGINE, POLICY, CRITIC, REFERENCE, REWARD = "engine", "policy", "critic", "reference", "reward"


def usable_host(cluster: Cluster) -> float:
    """Return the bytes of a node's memory without those that the preflight keeps free."""
    return cluster.host_memory * (1 - RESERVED)


@dataclass(frozen=True)
class Workload:
    """One step of online RL. Lengths are mean tokens; `longest` is the longest response.

    critic: None for an algorithm without a critic. reference: False if the KL divergence isn't measured. samples: responses per step, of
    which each prompt has group_size. minibatch: samples per optimizer step. microbatch_tokens: tokens of a forward pass on one GPU.
    max_length: limit of prompt and response together; None: the mean prompt with the longest response.
    """

    policy: ModelShape
    critic: ModelShape | None
    reference: bool
    reward_models: tuple[ModelShape, ...]
    samples: int
    group_size: int
    minibatch: int
    ppo_epochs: int
    prompt_length: float
    response_length: float
    longest: float
    microbatch_tokens: int
    dtype: str = "bfloat16"
    max_length: float | None = None

    @property
    def longest_sample(self) -> float:
        return self.max_length or self.prompt_length + self.longest

    @property
    def sequence(self) -> float:
        return self.prompt_length + self.response_length

    @property
    def pass_tokens(self) -> int:
        """Tokens of a micro-batch, which has room for the longest sample."""
        return max(self.microbatch_tokens, math.ceil(self.longest_sample))

    @property
    def roles(self) -> tuple[str, ...]:
        there = {CRITIC: self.critic is not None, REFERENCE: self.reference, REWARD: bool(self.reward_models)}
        return (ENGINE, POLICY, *(role for role, is_there in there.items() if is_there))

    def micro_batches(self, samples: float, ranks: float) -> int:
        """Return the forward passes of each rank, or of each group of ranks that share sequences, over all `samples`."""
        return max(1, math.ceil(samples * self.sequence / ranks / self.pass_tokens))


@dataclass(frozen=True)
class Group:
    """GPUs with the same roles. Each role is data-parallel over all of them; engines may be tensor-parallel over parts."""

    gpus: int
    roles: tuple[str, ...]

    @property
    def name(self) -> str:
        return "+".join(self.roles)


@dataclass(frozen=True)
class Placement:
    """Groups of GPUs with their roles, and how these train and generate.

    sleep: engines and roles that share GPUs take turns, while the others' memory is on the host.
    max_concurrent: concurrent responses per engine.
    sequence_parallel: GPUs that share each sequence in training and scoring.
    gloo: weights go to the engines through the hosts' memory.
    """

    groups: tuple[Group, ...]
    zero_stage: int = 0
    offload: bool = False
    tensor_parallel: int = 1
    checkpointing: bool = False
    sleep: bool = True
    max_concurrent: int = 256
    sequence_parallel: int = 1
    gloo: bool = False

    def group_of(self, role: str) -> Group:
        return next(group for group in self.groups if role in group.roles)


@dataclass(frozen=True)
class GroupMemory:
    """Bytes on each GPU of a group.

    parts: bytes by role and kind. needed: the peak, with one response in the engine. missing: bytes too few; 0 if the group fits.
    cache: bytes left for an engine's keys and values. host: bytes of the node's memory per GPU.
    """

    group: Group
    parts: dict[str, float]
    needed: float
    missing: float
    cache: float
    host: float

    def keeps_margin(self, cluster: Cluster) -> bool:
        """Return whether the group fits even if it needs more than predicted by the error that the preflight allows."""
        return self.needed * (1 + ERROR) <= cluster.available


def group_memory(work: Workload, group: Group, placement: Placement, cluster: Cluster) -> GroupMemory:
    parts: dict[str, float] = {}
    working, host = 0.0, 0.0
    for role in group.roles:
        if role in (POLICY, CRITIC):
            working = max(working, _training_parts(parts, work, role, group, placement))
            host += _states(work, role, group, placement).host
        elif role in (REFERENCE, REWARD):
            working = max(working, _frozen_parts(parts, work, role, group, placement))
    static = sum(parts.values())
    if working:
        parts["one pass or optimizer step"] = working
    shared = ENGINE in group.roles and len(group.roles) > 1
    resident = 0.0 if shared and placement.sleep else static + working
    room = cluster.available - resident
    engine = _engine_minimum(work, placement) if ENGINE in group.roles else 0.0
    if engine:
        parts[f"{ENGINE}: weights"] = work.policy.parameters * element_bytes(work.dtype) / placement.tensor_parallel
        parts[f"{ENGINE}: one response"] = engine - parts[f"{ENGINE}: weights"]
    sent = parts.get(f"{POLICY}: weights", 0.0) + parts.get(f"{ENGINE}: weights", 0.0)  # both are there while weights are sent
    needed = max(static + working, resident + engine, sent)
    if shared and placement.sleep:
        host += static
    cache = max(0.0, room - parts.get(f"{ENGINE}: weights", 0.0)) if engine else 0.0
    return GroupMemory(group, parts, needed, max(0.0, needed - cluster.available), cache, host)


def _shape(work: Workload, role: str) -> ModelShape:
    return work.critic if role == CRITIC and work.critic is not None else work.policy


def trained_parameters(work: Workload, role: str) -> int:
    shape = _shape(work, role)
    return shape.parameters if role == POLICY else shape.scalar_parameters


def _training(work: Workload, group: Group, placement: Placement) -> Training:
    return Training(
        dtype=work.dtype,
        ranks=group.gpus,
        sequence_parallel=placement.sequence_parallel,
        zero_stage=placement.zero_stage,
        offload_optimizer=placement.offload,
        gradient_checkpointing=placement.checkpointing,
    )


def _states(work: Workload, role: str, group: Group, placement: Placement) -> States:
    return training_states(trained_parameters(work, role), _training(work, group, placement))


def _training_parts(parts: dict[str, float], work: Workload, role: str, group: Group, placement: Placement) -> float:
    """Add a trained role's states to `parts`, and return the further bytes of a pass or of the optimizer's step, whichever has more."""
    states, setup, shape = _states(work, role, group, placement), _training(work, group, placement), _shape(work, role)
    for kind, size in zip(("weights", "float32 weights", "optimizer", "gradients", "buffers"), states, strict=False):
        if size:
            parts[f"{role}: {kind}"] = size
    tokens = work.pass_tokens / placement.sequence_parallel
    one_pass = trunk_activations(shape, tokens, setup) + (head_training(shape, tokens, setup) if role == POLICY else 0.0)
    return max(states.one_pass(one_pass), states.step)


def _frozen_parts(parts: dict[str, float], work: Workload, role: str, group: Group, placement: Placement) -> float:
    """Add a frozen role's weights to `parts`, and return the bytes of one pass."""
    shapes = (work.policy,) if role == REFERENCE else work.reward_models
    sizes = [shape.parameters if role == REFERENCE else shape.scalar_parameters for shape in shapes]
    models = [frozen_model(size, _training(work, group, placement)) for size in sizes]
    parts[f"{role}: weights"] = sum(model.weights for model in models)
    tokens = work.pass_tokens / placement.sequence_parallel
    passes = [forward_activations(shape, tokens, work.dtype) for shape in shapes]
    one_pass = max(model.passing + of_pass for model, of_pass in zip(models, passes, strict=True))
    return one_pass + (head_forward(work.policy, tokens, work.dtype) if role == REFERENCE else 0.0)


def _engine_minimum(work: Workload, placement: Placement) -> float:
    """Return the bytes on each GPU of an engine that holds only the longest sample."""
    tokens = work.longest_sample
    weights = work.policy.parameters * element_bytes(work.dtype)
    cache = tokens * kv_bytes_per_token(work.policy, work.dtype)
    return weights / placement.tensor_parallel + cache / kv_parts(work.policy, placement.tensor_parallel)


def concurrency(work: Workload, placement: Placement, memory: GroupMemory) -> float:
    """Return the concurrent responses of one engine: the least of its setting, its share of the samples, and its cache at mean length."""
    engines = max(1, memory.group.gpus // placement.tensor_parallel)
    weights = work.policy.parameters * element_bytes(work.dtype) / placement.tensor_parallel
    tokens = kv_capacity(work.policy, memory.cache + weights, tensor_parallel=placement.tensor_parallel, dtype=work.dtype)
    return max(1.0, min(placement.max_concurrent, work.samples / engines, tokens / work.sequence))


def host_bytes(work: Workload, placement: Placement, memory: Sequence[GroupMemory], cluster: Cluster) -> float:
    """Return the bytes of host memory on the node that needs most, with GPUs numbered group by group.

    These are what roles keep there, each process's libraries and pinned buffers, and once the policy's weights on their way to a file or to
    the engines, as in the preflight.
    """
    of_gpus = []
    for of_group in memory:
        engine = ENGINE in of_group.group.roles
        processes = of_group.group.roles != (ENGINE,)
        width = placement.tensor_parallel
        processes += engine * ((1 + width) / width if width > 1 else 1)
        of_gpus += [of_group.host + GPU_HOST * processes] * of_group.group.gpus
    nodes = [sum(of_gpus[first : first + cluster.gpus_per_node]) for first in range(0, len(of_gpus), cluster.gpus_per_node)]
    return max(nodes) + work.policy.parameters * element_bytes(work.dtype)


@dataclass(frozen=True)
class Prediction:
    """The cost of a placement.

    seconds: by phase (generate, turns if engines take turns, score, update, sync), which follow each other. concurrency: concurrent
    responses per engine. host: bytes of host memory on the node that needs most.
    """

    placement: Placement
    memory: tuple[GroupMemory, ...]
    seconds: dict[str, float]
    concurrency: float
    host: float
    host_missing: float

    @property
    def missing(self) -> float:
        """Missing bytes: on the GPU that lacks most, plus on the node that lacks most."""
        return max(group.missing for group in self.memory) + self.host_missing

    @property
    def fits(self) -> bool:
        return self.missing == 0

    def keeps_margin(self, cluster: Cluster) -> bool:
        return all(group.keeps_margin(cluster) for group in self.memory)

    @property
    def step(self) -> float:
        return sum(self.seconds.values())
