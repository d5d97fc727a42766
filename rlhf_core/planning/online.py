"""Counts what each process of online RL takes: a trainer rank with its models, and a rollout engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlhf_core.config import ModelConfig, RlConfig
from rlhf_core.planning.memory import Training, frozen_model, head_forward, head_kept, mask_bytes, trunk_activations
from rlhf_core.planning.models import Model
from rlhf_core.planning.stages import Models, Process, add_frozen, engine, frozen_pass, known, pass_tokens, shape_of, trained_role, training


def rl_ranks(rl: RlConfig, config: ModelConfig, models: Models, *, on_gpu: bool) -> list[Process]:
    """Return the trainer ranks of each group of rl.placement, as rlhf_core/trainers/rl/roles.py builds them."""
    return [_rl_rank(rl.of_group(group), group.roles, config, models, on_gpu=on_gpu) for group in rl.role_groups]


def _rl_rank(rl: RlConfig, roles: Sequence[str], config: ModelConfig, models: Models, *, on_gpu: bool) -> Process:
    policy, dtype, length = known(models.start, "the policy"), config.dtype, config.max_length
    trainer = rl.trainer
    setup = training(RlTraining(rl), policy, dtype, ranks=trainer.ranks, on_gpu=on_gpu)
    setup = replace(setup, packed=setup.packed and trainer.ranks == 1 and trainer.zero_stage == 0)
    plain = replace(setup, adapters=None, quantized=False)
    of_group, tokens = pass_tokens(trainer.microbatch_tokens, length, rl.minibatch_size, setup)
    _, scored = pass_tokens(trainer.microbatch_tokens, length, rl.samples_per_step, setup)
    more_graphs = _graphs_at_once(rl, length, tokens) - 1 if setup.packed else 0
    offload = trainer.offload_frozen and on_gpu
    parts, phases, host = {}, {}, 0.0
    if "policy" in roles:
        parts, phases, host = trained_role("policy", policy, setup, tokens)
        own = next(iter(phases))
        if rl.group_size > 1 and rl.critic is None and not on_gpu and not setup.packed:
            phases[own] += mask_bytes(of_group, of_group, dtype)
        if rl.entropy_coef or not rl.rollout.samples_any_token:  # all logits exist at once (rlhf_core/models/head.py)
            phases[own] += tokens * shape_of(policy).vocab * (setup.element + 16)
        phases[own] += more_graphs * (trunk_activations(shape_of(policy), tokens, setup) + head_kept(shape_of(policy), tokens, setup))
    if "critic" in roles:
        critic = known(models.reward if rl.critic_starts_from_reward_model else models.start, "the critic")
        more, critic_phases, more_host = trained_role("critic", critic, plain, tokens, scalar=True)
        critics = next(iter(critic_phases))
        if setup.packed and "policy" in roles:  # both are computed at the same time
            phases[f"policy and critic: {own.partition(': ')[2]}"] = phases[own] + (1 + more_graphs) * critic_phases[critics]
        elif setup.packed:
            critic_phases[critics] *= 1 + more_graphs
        parts, phases, host = parts | more, phases | critic_phases, host + more_host
    if "reference" in roles and (rl.lora is None or rl.kl.refresh_reference_every is not None or "policy" not in roles):
        one = frozen_pass(policy, scored, dtype)
        host += add_frozen(parts, phases, "reference", frozen_model(policy.parameters, plain, offload=offload), one)
    for number, found in enumerate(models.scorers if "reward_models" in roles else ()):
        model = known(found, "a reward model")
        one = frozen_pass(model, scored, dtype, scalar=True)
        host += add_frozen(parts, phases, f"reward model {number}", frozen_model(model.scalar_parameters, plain, offload=offload), one)
    teachers = [known(found, "a teacher") for found in (models.teachers if "teachers" in roles else ())]
    frozen = [frozen_model(teacher.parameters, plain, offload=offload) for teacher in teachers]
    for number, (teacher, sizes) in enumerate(zip(teachers, frozen, strict=True)):
        one = frozen_pass(teacher, scored, dtype)
        host += add_frozen(parts, phases, f"teacher {number}", sizes, one)
        if trainer.zero_stage < 3:  # all are in use at once
            phases[f"teacher {number}: a pass"] += sum(other.passing for other in frozen) - sizes.passing
        if rl.teaches_whole_distributions:  # in use while the policy learns, with their states and a piece's logits
            shape = shape_of(teacher)
            phases[own] += sizes.passing + tokens * shape.hidden * setup.element + head_forward(shape, tokens, dtype)
            phases[own] += setup.element * shape.embedding * (trainer.zero_stage == 3)  # its head, gathered
        elif rl.teaches_distributions and trainer.zero_stage == 3:  # all heads, gathered for the likeliest tokens
            phases[f"teacher {number}: a pass"] += setup.element * sum(shape_of(of).embedding for of in teachers)
    copies = 1 + (rl.rollout.max_lag > 0)  # for the exported policy, and for a replaced rollout engine
    once = 0.0
    if "policy" in roles:  # rank 0 alone sends
        exported = copies * setup.element * policy.parameters if on_gpu else 0.0
        once = _likeliest_tokens(rl) + _kept_by_transfer(rl, setup, policy) + exported
    name = "trainer rank" if len(rl.role_groups) == 1 else f"rank of {'+'.join(roles)}"
    return Process(f"train_policy: {name}", "rl.trainer", parts, phases, host=host, once=once, count=trainer.ranks)


def _kept_by_transfer(rl: RlConfig, setup: Training, policy: Model) -> float:
    """Return the bytes of what was last sent to engines, which rl.rollout.send_changes keeps in the host's memory at each end."""
    sent = policy.parameters if setup.adapters is None else setup.adapters
    return setup.element * sent if rl.rollout.send_changes else 0.0


def _likeliest_tokens(rl: RlConfig) -> float:
    """Return the bytes of a step's rl.distillation.top_k tokens, each a float32 and an int64: in the driver's batch, and for each epoch in
    its plan, on their way to the ranks and there. Of services the driver also keeps the answers as Python's numbers.
    """
    taught = rl.distillation
    if taught is None or taught.top_k is None:
        return 0.0
    each = 12 * (1 + 3 * rl.ppo_epochs) * len(taught.teachers) + 68 * len(taught.services)
    return each * taught.top_k * rl.samples_per_step * rl.rollout.max_new_tokens


def _graphs_at_once(rl: RlConfig, length: int, tokens: int) -> int:
    """Return how many micro-batches' graphs the CPU's fast path keeps from the passes before the update until the update: 1 or 2."""
    everything = rl.samples_per_step * length
    keeps = rl.one_optimizer_step and rl.rollout.samples_any_token and everything <= 2 * rl.trainer.microbatch_tokens
    return 2 if keeps and everything > tokens else 1


class RlTraining:
    """Keys of `rl` and of `rl.trainer` under the names that a supervised section has."""

    def __init__(self, rl: RlConfig):
        trainer = rl.trainer
        self.zero_stage, self.gradient_checkpointing = trainer.zero_stage, trainer.gradient_checkpointing
        self.sequence_parallel = trainer.sequence_parallel
        self.offload_optimizer, self.offload_parameters = trainer.offload_optimizer, trainer.offload_parameters
        self.optimizer, self.ema_decay, self.lora = rl.optimizer, rl.ema_decay, rl.lora


def rl_engine(rl: RlConfig, config: ModelConfig, models: Models, *, on_gpu: bool, per_engine: float) -> Process:
    rollout, policy = rl.rollout, known(models.start, "the policy")
    process = engine(
        "train_policy: rollout engine",
        "rl.rollout",
        policy,
        config,
        backend=rollout.backend,
        on_gpu=on_gpu,
        sequences=rollout.max_concurrent_sequences,
        fraction=rollout.gpu_memory_fraction * (per_engine or 1.0),
        kv_cache_gib=rollout.kv_cache_gib,
        count=rollout.engines,
        gpus=rollout.tensor_parallel_size,
    )
    setup = training(RlTraining(rl), policy, config.dtype, ranks=rl.trainer.ranks, on_gpu=on_gpu)
    if not (kept := _kept_by_transfer(rl, setup, policy) * rollout.tensor_parallel_size):  # in each of its processes
        return process
    return replace(process, host=kept) if on_gpu else replace(process, parts=process.parts | {"engine: as last received": kept})
