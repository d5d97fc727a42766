"""What rl.distillation needs of the other settings of RL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_core.config.rl import RlConfig


def distillation_conflicts(rl: RlConfig) -> Iterator[str]:
    """Conflicts, with keys relative to `rl`. A run without a scorer with a weight learns from teachers alone."""
    if rl.distillation is None:
        return
    loss, apart = rl.distillation.loss, [g.name for g in rl.role_groups if "teachers" in g.roles and "policy" not in g.roles]
    if rl.teaches_whole_distributions and apart:
        yield (
            f"placement: expected teachers in the policy's group with distillation.loss {loss}, got group {apart[0]}; name groups with "
            "policy and teachers together, or set distillation.top_k, for whole distributions aren't sent between ranks"
        )
    if rl.distillation.services and rl.rollout.temperature != 1:
        yield (
            f"rollout.temperature: expected 1.0 with a service in distillation.teachers, got {rl.rollout.temperature}; set it to 1.0, "
            "for a service's log-probabilities are those at temperature 1"
        )
    if rl.distillation.teacher_template is not None and rl.environment is not None:
        yield (
            "distillation.teacher_template: expected null with environment, got a template; remove one of them, for an episode begins "
            "with what the environment writes"
        )
    if rl.teaches_distributions and rl.trainer.sequence_parallel > 1:
        yield (
            f"distillation.loss: expected sampled with trainer.sequence_parallel={rl.trainer.sequence_parallel}, got {loss}; change "
            "one of them, because a rank has the states of its own positions only"
        )
    if rl.learns_from_reward:
        return
    without = "without a scorer with a weight in reward.scorers"
    if rl.spec.critic or rl.spec.greedy_baseline:
        yield f"algorithm: expected grpo {without}, got {rl.algorithm}; set it to grpo, for its critic or baseline has no reward"
    if rl.dynamic_sampling.enabled:
        yield f"dynamic_sampling.enabled: expected false {without}, got true; set it to false, for no group's rewards differ"
    if rl.measures_success and rl.curriculum.scorer == "score":
        yield f"curriculum.scorer: expected a scorer's name {without}, got score; name one of weight 0"
    if rl.kl.in_reward:
        yield f"kl.placement: expected loss {without}, got reward; set it to loss, or kl.coef to 0"
    if rl.teaches_distributions and rl.correction.kind != "none":
        yield (
            f"correction.kind: expected none {without} and with distillation.loss {loss}, got {rl.correction.kind}; set it to none, "
            "for it weights losses of sampled tokens"
        )
    if rl.teaches_distributions and rl.rollout.quantization is not None:
        yield (
            f"rollout.quantization: expected null {without} and with distillation.loss {loss}, got {rl.rollout.quantization}; set it to "
            "null, or distillation.loss to sampled, for there is no correction of losses of distributions"
        )
    if rl.evaluation.every is not None and rl.evaluation.metric == "score":
        yield f"evaluation.metric: expected a scorer's name {without}, got score; name one of weight 0, or set evaluation.every to null"
