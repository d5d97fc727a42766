"""Finds RL settings that other settings leave without any effect, which a run would not show.

A key whose default has an effect can't tell that it was set, so that only keys that are off by default are refused.
`tests/contract/test_dead_settings.py` has a table of all pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rlhf_core.config.curves import DEFAULT_LIMITS, LimitConfig

if TYPE_CHECKING:
    from rlhf_core.config.rl import RlConfig

_OF_CRITIC = ("explained_variance", "value_loss", "critic_grad_norm")
_OF_RATIO = ("clip_frac", "approx_kl", "policy_ratio_max", "policy_ratio_min")


def dead_settings(rl: RlConfig) -> Iterator[str]:
    """Conflicts, with keys relative to `rl`.

    Those that depend on the number of steps are found once it is known (`RlConfig.over_prompts`).
    """
    yield from _dead_in_few_steps(rl)
    if not rl.ratio_moves:
        on_policy = "because a batch has one optimizer step (minibatch_size, ppo_epochs), before which all ratios are 1"
        for key, value in (("max_approx_kl", rl.max_approx_kl), ("dual_clip", rl.dual_clip)):
            if value is not None:
                yield f"{key}: expected null, got {value}; remove it or lower minibatch_size, {on_policy}"
    if rl.rollout.recomputed_fraction < 1 and rl.old_logprobs_source(0) != "recompute":
        where = "rollout engine" if rl.rollout.max_lag else "update, a batch's only optimizer step"
        yield (
            f"rollout.recomputed_fraction: expected 1, got {rl.rollout.recomputed_fraction}; set it to 1, because all old "
            f"log-probabilities come from the {where}"
        )
    if rl.rollout.dispatch == "dynamic" and rl.rollout.engines == 1:
        yield "rollout.dispatch: expected auto or equal with engines=1, got dynamic; change one, since one engine gets all prompts at once"
    if rl.dynamic_sampling.enabled and rl.dynamic_sampling.max_rounds == 1:
        yield "dynamic_sampling.max_rounds: expected at least 2, got 1; raise it, because the first round replaces no group"
    if rl.evaluation.metric != "score" and rl.evaluation.every is None:
        yield (
            f"evaluation.metric: expected score without evaluations, got {rl.evaluation.metric}; set evaluation.every, or leave metric at "
            "score"
        )
    if rl.schedule == "constant" and rl.min_learning_rate_fraction:
        yield (
            f"min_learning_rate_fraction: expected 0 with schedule constant, got {rl.min_learning_rate_fraction}; set it to 0 or choose a "
            "schedule that ends there"
        )
    if rl.trainer.offload_frozen and not {"reference", "reward_models", "teachers"} & set(rl.roles):
        yield (
            "trainer.offload_frozen: expected false, got true; set it to false, because the run has no reference, reward model or teacher"
        )
    for name, limit in rl.limits.items():
        if limit != DEFAULT_LIMITS.get(name):  # the default limits hold for any run
            yield from _dead_limit(rl, f"monitor.{name}", limit)


def _dead_in_few_steps(rl: RlConfig) -> Iterator[str]:
    if rl.steps is None:
        return
    if rl.critic is not None and not rl.policy_steps:
        yield (
            f"{rl.algorithm}.critic_warmup_steps: expected less than steps={rl.steps}, got {rl.critic.critic_warmup_steps}; lower it, "
            "because the policy would never be trained"
        )
    if rl.rollout.max_lag >= rl.steps:
        yield (
            f"rollout.max_lag: expected less than steps={rl.steps}, got {rl.rollout.max_lag}; change one, because the last step is only "
            f"steps - 1 updates after the first"
        )
    if (every := rl.kl.refresh_reference_every) is not None and every >= rl.steps:
        yield (
            f"kl.refresh_reference_every: expected less than steps={rl.steps}, got {every}; lower it or set it to null, because the "
            "reference would never change before the end"
        )


def _dead_limit(rl: RlConfig, key: str, limit: LimitConfig) -> Iterator[str]:
    """Conflicts of a limit that can't be passed, because its metric never changes or has no value, or the run is too short."""
    constant = {
        "a critic": limit.metric in _OF_CRITIC and rl.critic is None,
        "several optimizer steps a batch": limit.metric in _OF_RATIO and not rl.ratio_moves,
        "a loss that clips": limit.metric == "clip_frac" and rl.policy_loss == "sapo",
        "max_approx_kl": limit.metric == "stopped_early" and rl.max_approx_kl is None,
        "kl.target": limit.metric == "kl_coef" and rl.kl.target is None,
    }
    for what in (what for what, is_missing in constant.items() if is_missing):
        yield f"{key}.metric: expected one that can change, got {limit.metric} without {what}; set {key} to null or take another metric"
    if rl.steps is None:
        return
    every = rl.evaluation.every if limit.metric.startswith("eval_") else 1
    values = sum(step % (every or 1) == 0 or step == rl.steps for step in range(limit.from_step, rl.steps + 1))
    if (needed := limit.window + limit.patience - 1) > values:
        yield (
            f"{key}.from_step: expected at least window + patience - 1 = {needed} values of {limit.metric} from it to the last step, got "
            f"{values} of steps={rl.steps}; lower from_step, window or patience, because this limit could never act"
        )
