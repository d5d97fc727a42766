"""What the settings of RL need of each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config.base import RENAMED_COLUMNS, RENAMED_KEYS, did_you_mean
from rlhf_core.config.curves import DEFAULT_LIMITS, KL_COLUMNS, curve_columns
from rlhf_core.config.dead import dead_settings
from rlhf_core.config.distillation import distillation_conflicts
from rlhf_core.config.model import data_parallel_keys, sequence_conflicts

if TYPE_CHECKING:
    from rlhf_core.config.rl import RlConfig


def rl_conflicts(rl: RlConfig) -> Iterator[str]:
    """Conflicts of the section's settings with each other, with keys relative to `rl`."""
    yield from _placement_conflicts(rl)
    yield from _batch_conflicts(rl)
    yield from _loss_conflicts(rl)
    yield from _correction_conflicts(rl)
    yield from _environment_conflicts(rl)
    yield from _curriculum_conflicts(rl)
    yield from _group_conflicts(rl)
    yield from _reward_conflicts(rl)
    yield from _critic_conflicts(rl)
    yield from distillation_conflicts(rl)
    yield from _limit_conflicts(rl)
    yield from dead_settings(rl)


def _takers(rl: RlConfig, ranks: int) -> str:
    """Return what minibatches of so many ranks are divided by, as keys and values."""
    return data_parallel_keys(ranks, rl.trainer.sequence_parallel, section="trainer." if ranks == rl.trainer.ranks else "placement.")


def _placement_conflicts(rl: RlConfig) -> Iterator[str]:
    placed = [role for group in rl.placement for role in group.roles]
    if several := sorted({role for role in placed if placed.count(role) > 1}):
        yield f"placement: expected each role in one group, got {several} in several; keep one of each"
    if missing := [role for role in rl.roles if role not in placed]:
        yield f"placement: expected a group for each role of the run, got none for {missing}; add them to a group"
    for ranks in {group.ranks for group in rl.role_groups} - {rl.trainer.ranks}:
        yield from (f"trainer.{conflict}" for conflict in sequence_conflicts(ranks, rl.trainer.sequence_parallel))


def _batch_conflicts(rl: RlConfig) -> Iterator[str]:
    for what, divisor in (
        (f"{rl.algorithm}.group_size", rl.group_size),
        ("minibatch_size", rl.minibatch_size),
    ):
        if rl.samples_per_step % divisor:
            yield (f"samples_per_step: expected a multiple of {what}={divisor}, got {rl.samples_per_step}; change one of them")
    for what, divided in (
        ("minibatch_size", rl.minibatch_size),
        *((("ptx.batch_size", rl.ptx.batch_size),) if rl.ptx.coef else ()),
    ):
        for group in rl.learning_groups:
            if divided % rl.of_group(group).trainer.data_parallel_size:
                yield f"{what}: expected a multiple of {_takers(rl, group.ranks)}, got {divided}; change one of them"
                break


def _loss_conflicts(rl: RlConfig) -> Iterator[str]:
    """Conflicts of the optimizer, the policy loss and LoRA."""
    if rl.steps is not None:
        yield from rl.warmup_conflicts("warmup_steps", min(1.0, rl.warmup_steps / max(1, rl.policy_steps)))
    yield from rl.offload_conflicts("trainer.offload_optimizer", offload_optimizer=rl.trainer.offload_optimizer)
    if rl.policy_loss == "gspo" and rl.aggregation != "sequence_mean":
        yield (
            f"loss_aggregation: expected sequence_mean or auto with policy_loss gspo, got {rl.loss_aggregation}; GSPO has one "
            "ratio per sequence, and another mean would weight long responses twice"
        )
    if rl.dual_clip is not None and rl.policy_loss != "ppo_clip":
        yield f"dual_clip: expected null with policy_loss {rl.policy_loss}, got {rl.dual_clip}; only ppo_clip has it, so remove it"
    if rl.lora is not None and rl.lora.dropout:
        yield (
            f"lora.dropout: expected 0 in rl, got {rl.lora.dropout}; set it to 0, because dropout changes the log-probabilities "
            "that the ratio compares"
        )


def _correction_conflicts(rl: RlConfig) -> Iterator[str]:
    """Conflicts of the log-probabilities that the ratio compares, and of their correction."""
    if rl.correction.kind != "none" and rl.rollout.recomputed_fraction < 1:
        yield (
            f"rollout.recomputed_fraction: expected 1 with a correction, got {rl.rollout.recomputed_fraction}; set it to 1, "
            "because a correction needs the trainer's log-probabilities of every sample"
        )
    corrects = rl.learns_from_reward or not rl.teaches_distributions
    if corrects and rl.rollout.quantization is not None and rl.correction.kind == "none":
        yield (
            f"correction.kind: expected tis, icepop, sequence_tis or sequence_mask with rollout.quantization "
            f"{rl.rollout.quantization}, got none; set it to tis, because the engine samples from the rounded weights' distribution "
            "and not from the policy's"
        )
    if rl.rollout.max_lag and rl.old_logprobs_source(0) == "from_engine" and not rl.rollout.samples_whole_distribution:
        yield (
            f"rollout.max_lag: expected 0 with top_p, top_k or min_new_tokens and without a correction, got {rl.rollout.max_lag}; "
            "set correction.kind, because the ratio would compare with the engine's probabilities, which are then those of another "
            "distribution"
        )


def _group_conflicts(rl: RlConfig) -> Iterator[str]:
    """Conflicts of groups of samples, and of ranks that share them."""
    if rl.dynamic_sampling.enabled and rl.group_size < 2:
        yield (
            f"dynamic_sampling: expected {rl.algorithm}.group_size of at least 2, got {rl.group_size}; raise it, because a "
            "group of one has no variance"
        )
    if rl.spec.greedy_baseline and rl.kl.in_reward and rl.rollout_batch_size < rl.most_ranks // rl.trainer.sequence_parallel:
        yield (
            f"{rl.algorithm}.group_size: expected at least {_takers(rl, rl.most_ranks)} prompts a step, got "
            f"{rl.rollout_batch_size}; lower it, because each rank computes the KL of some greedy responses"
        )
    if rl.moe_aux_coef and rl.trainer.sequence_parallel > 1:
        yield (
            f"moe_aux_coef: expected 0 with trainer.sequence_parallel={rl.trainer.sequence_parallel}, got {rl.moe_aux_coef}; "
            "change one of them, because a rank routes its own positions only"
        )


def _reward_conflicts(rl: RlConfig) -> Iterator[str]:
    """Conflicts of penalties, and of the names of scorers, metrics and sources."""
    if rl.reward.overlong is not None and rl.reward.overlong.buffer > rl.rollout.max_new_tokens:
        yield (
            f"reward.overlong.buffer: expected at most rollout.max_new_tokens={rl.rollout.max_new_tokens}, got "
            f"{rl.reward.overlong.buffer}; lower it"
        )
    if rl.kl.target is not None and rl.kl.horizon <= rl.samples_per_step / 5:
        yield (
            f"kl.horizon: expected more than a fifth of samples_per_step={rl.samples_per_step} with a target, got {rl.kl.horizon}; "
            "raise it, because one step could make the coefficient 0"
        )
    known = ("score", *(s.name for s in rl.reward.scorers))
    if rl.evaluation.metric not in known:
        yield (f"evaluation.metric: expected one of {list(known)}, got {rl.evaluation.metric!r}; name the score or a scorer")
    if taken := {s.name for s in rl.reward.scorers} & {column.removeprefix("eval_") for column in rl.evaluation.columns}:
        yield f"reward.scorers: expected names that no figure of the evaluation has, got {sorted(taken)}; rename them"
    if any(weight < 0 for weight in rl.prompt_weights.values()):
        yield f"prompt_weights: expected weights of at least 0, got {rl.prompt_weights}; 0 leaves a source to evaluation.sources"


def _critic_conflicts(rl: RlConfig) -> Iterator[str]:
    if rl.critic is None or rl.critic.critic_init != "reward_model":
        return
    key, own = f"{rl.algorithm}.critic_init: expected reward_model_trunk or sft", rl.reward.own_reward_models
    if not own:
        yield (
            f"{key} where no rewarded scorer is the chain's reward model, got reward_model; its scores would not be in units of the reward"
        )
    if running := [s.name for s in own if s.normalization == "running"]:
        yield (
            f"{key} with normalization running of {running}, got reward_model; the scale between its scores and the rewards is "
            "unknown before the first step and changes later"
        )
    if ensembles := [s.name for s in own if s.members > 1]:
        yield (
            f"{key} with several members of {ensembles}, got reward_model; a critic is one model, and the rewards are in units of all "
            "members' scores together; reward_model_trunk starts from the first member's layers"
        )


def _curriculum_conflicts(rl: RlConfig) -> Iterator[str]:
    if not rl.measures_success:
        return
    known = {s.name: [s] for s in rl.reward.scorers} | {"score": rl.reward.rewarded}
    if (name := rl.curriculum.scorer) not in known:
        yield f"curriculum.scorer: expected one of {sorted(known)}, got {name!r}; name the score or a scorer"
    elif unclear := [s.name for s in known[name] if s.kind == "reward_model"]:
        yield (
            f"curriculum.scorer: expected one whose scores say success, got {name}, with the reward model {unclear[0]}; name a scorer "
            "that verifies (it may have weight 0), because a reward model's scores have no fixed level of success"
        )


def _environment_conflicts(rl: RlConfig) -> Iterator[str]:
    if rl.environment is None:
        return
    if rl.rollout.last_tokens is not None:
        yield (
            f"rollout.last_tokens: expected null with environment, got {rl.rollout.last_tokens}; remove it, because an episode would "
            "end in the middle of a turn"
        )
    if rl.by_turn and rl.spec.turn_estimator is None:
        known = [name for name, spec in ALGORITHMS.items() if spec.turn_estimator is not None]
        yield (
            f"environment.credit: expected episode with algorithm {rl.algorithm}, got turn; change one (turns: {', '.join(known)}), "
            "because its baseline is defined for whole episodes only"
        )
    if rl.by_turn and not any(s.kind == "environment" and s.weight for s in rl.reward.scorers):
        yield "environment.credit: expected episode without a rewarded scorer of kind environment, got turn; add one to reward.scorers"
    if rl.environment.command and 2 * rl.environment.agent_timeout >= rl.deadlines.step:  # an episode's, and its successor's
        yield (
            f"environment.agent_timeout: expected less than half of rl.deadlines.step={rl.deadlines.step:g}, which ends the run, got "
            f"{rl.environment.agent_timeout:g}; lower it, or raise rl.deadlines.step"
        )
    in_flight = rl.samples_per_step * (1 + rl.rollout.max_lag)
    if rl.rollout.max_lag and rl.environment.command and rl.environment.at_once < in_flight:
        yield (
            f"environment.processes: expected processes * claims of at least {in_flight} with rollout.max_lag={rl.rollout.max_lag}, "
            f"for the episodes of so many steps, got {rl.environment.at_once}; raise one"
        )
    if rl.by_turn and rl.environment.command:
        yield "environment.credit: expected episode with command, whose score is of a whole episode, got turn; change one"
    if rl.rollout.min_new_tokens:
        yield (
            f"rollout.min_new_tokens: expected 0 with environment, got {rl.rollout.min_new_tokens}; set it to 0, because it would "
            "hold for each turn"
        )


def _limit_conflicts(rl: RlConfig) -> Iterator[str]:
    for name in (name for name, limit in rl.monitor.items() if limit is None and name not in DEFAULT_LIMITS):
        renamed = f"rl.monitor.{name}" in RENAMED_KEYS
        meant = f"rename it to {RENAMED_KEYS[f'rl.monitor.{name}']}" if renamed else did_you_mean(name, DEFAULT_LIMITS)
        yield f"monitor.{name}: expected a limit, got null, which only switches off {list(DEFAULT_LIMITS)}; {meant or 'remove it'}"
    known = [column for column in curve_columns(rl) if column not in ("step", "scorer_metrics")]
    for name, limit in rl.limits.items():
        key = f"monitor.{name}"
        if limit.metric not in known:
            todo = f"rename it to {RENAMED_COLUMNS[limit.metric]}" if limit.metric in RENAMED_COLUMNS else "correct it"
            yield f"{key}.metric: expected a column of the curves, one of {known}, got {limit.metric!r}; {todo}"
        if limit.metric in KL_COLUMNS and not rl.kl.keeps_reference:
            yield (
                f"{key}.metric: expected one that is measured, got {limit.metric} with kl.coef 0 and kl.measure false; set kl.measure "
                f"to true or {key} to null"
            )
        if limit.action == "rollback" and rl.evaluation.every is None:
            yield (f"{key}.action: expected evaluation.every with rollback, got null; set evaluation.every, which finds the best policy")
