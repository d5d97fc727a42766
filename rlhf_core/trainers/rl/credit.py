"""From raw scores to advantages: normalisation, length penalties, KL, the estimator. Of a whole rollout batch, all ranks together."""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from rlhf_core.algorithms.advantages import decoupled_rewards, overlong_penalty, token_rewards
from rlhf_core.algorithms.corrections import importance_weights
from rlhf_core.algorithms.kl import KL_ESTIMATORS
from rlhf_core.algorithms.turns import placed_rewards
from rlhf_core.config import RlConfig, ScorerConfig
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.shares import scorer_shares
from rlhf_core.types import Baseline, RewardComponents, RolloutBatch, TrainBatch

Metrics = dict[str, float]

log = logging.getLogger("rlhf")


def compute_advantages(batch: RolloutBatch, rl: RlConfig, normalizer: RewardNormalizer, *, kl_coef: float) -> tuple[TrainBatch, Metrics]:
    """Advantages, and returns for the critic, by `rl.algorithm`.

    The estimator gets the quantities that its parameters name: rewards and baseline_rewards [B], token_rewards, values and response_mask
    [B, R], group_ids [B], and the keys of its section of params.yaml; scores [B, K] and weights [K] of the K rewarded scorers, and
    penalties [B], of which rewards are the sum; turns [B, R] with rl.environment.credit `turn`.

    A response without a finite reward is masked: neither policy nor critic learns from it, and no statistic counts it. A truncated
    response is masked too, with rl.reward.mask_truncated.

    Args:
        normalizer: running statistics are updated.
        kl_coef: of the KL in the reward; unused where the KL is a term of the loss.
    """
    if not rl.learns_from_reward:
        return without_reward(batch, rl)
    rewards = shaped_rewards(batch.components, batch.finished, batch.lengths, rl, normalizer)
    mask = batch.response_mask & rewards.isfinite()[:, None]
    kl = token_kl(sampling_logprobs(batch, batch.old_logprobs, rl), batch.ref_logprobs, mask, rl)
    quantities = {
        "rewards": rewards - kl_coef * kl.sum(1),
        "token_rewards": token_rewards(rewards, kl, mask, kl_coef=kl_coef),
        "turns": batch.turns,
        "values": batch.values,
        "response_mask": mask,
        "group_ids": batch.group_ids,
        **_by_scorer(batch.components, rl, normalizer),
        "penalties": _length_penalties(batch.finished, batch.lengths, rl) + kl_coef * kl.sum(1),
        "baseline_rewards": batch.baseline and baseline_rewards(batch.baseline, rl, normalizer, kl_coef=kl_coef),
        **rl.own.model_dump(),
    }
    if rl.by_turn or batch.step_rewards:
        early = early_rewards(batch, mask, rl, normalizer)
        quantities["token_rewards"] = token_rewards(rewards - early.sum(1), kl, mask, kl_coef=kl_coef) + early
    estimator = rl.spec.estimate(by_turn=rl.by_turn)
    estimate = estimator(**_named(estimator, quantities))
    advantages, returns = estimate if isinstance(estimate, tuple) else (estimate, torch.zeros_like(estimate))
    compared = decoupled_rewards(**_named(decoupled_rewards, quantities)) if rl.spec.decoupled else quantities["rewards"]
    learned, known = mask.any(1), quantities["rewards"].isfinite()
    if not learned.any():
        _tell_nothing_is_learned()
    metrics = {
        "reward_mean": float(quantities["rewards"][known].mean()),
        "advantage_zero_fraction": float((advantages[learned] == 0).all(1).float().mean()),
        **scorer_shares(advantages, mask, quantities["scores"], compared, batch.group_ids, rl),
    }
    if rl.critic is not None:
        metrics["explained_variance"] = explained_variance(batch.values, returns, mask)
    return _train_batch(batch, mask, advantages, returns, metrics, rl)


def without_reward(batch: RolloutBatch, rl: RlConfig) -> tuple[TrainBatch, Metrics]:
    """Return the batch of a policy that learns from teachers alone: advantages are 0, and no length penalty applies.

    With rl.reward.mask_truncated a truncated response is masked.
    """
    mask, nothing = batch.response_mask, torch.zeros(batch.response_mask.shape)
    if rl.reward.mask_truncated:
        mask = mask & batch.finished[:, None]
    if not mask.any():
        _tell_nothing_is_learned()
    return _train_batch(batch, mask, nothing, nothing, {}, rl)


def _train_batch(
    batch: RolloutBatch, mask: torch.Tensor, advantages: torch.Tensor, returns: torch.Tensor, metrics: Metrics, rl: RlConfig
) -> tuple[TrainBatch, Metrics]:
    """Return the batch with the weights of the correction, and its metrics beside the others."""
    weights, mismatch = torch.ones_like(batch.rollout_logprobs), {}
    if batch.old_logprobs_source == "recompute":
        weights, mismatch = correct(batch.sampler_logprobs, batch.rollout_logprobs, mask, rl)
    train_batch = TrainBatch(
        sequences=batch.sequences,
        response_mask=mask,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        old_values=batch.values,
        advantages=advantages,
        returns=returns,
        importance_weights=weights,
        teacher_logprobs=batch.teacher_logprobs,
        teacher_top_logprobs=batch.teacher_top_logprobs,
        teacher_top_ids=batch.teacher_top_ids,
        teacher_sequences=batch.teacher_sequences,
    )
    return train_batch, metrics | mismatch


def _named(function: Callable[..., Any], quantities: dict[str, Any]) -> dict[str, Any]:
    """Return the quantities that a function's parameters name."""
    return {name: quantities[name] for name in inspect.signature(function).parameters if name in quantities}


def early_rewards(batch: RolloutBatch, mask: torch.Tensor, rl: RlConfig, normalizer: RewardNormalizer) -> torch.Tensor:
    """Rewards that are known before a response's end [B, R], in units of the reward, on the last trained token up to where they belong.

    With credit by turn these are what `chat.reward` gave; of a process reward model, what each step adds to the response's score. The rest
    of the reward belongs to the last token, so that the sum is the same as without.
    """

    def per_unit(scorers: Iterable[ScorerConfig]) -> float:
        return sum(s.weight / normalizer.location_and_spread(s)[1] for s in scorers)

    early = torch.zeros(mask.shape)
    if rl.by_turn:
        early = per_unit(s for s in rl.reward.rewarded if s.kind == "environment") * batch.turn_rewards
    for name, rewards in batch.step_rewards.items():
        early = early + per_unit(s for s in rl.reward.rewarded if s.name == name) * rewards
    return placed_rewards(early, mask)


@functools.cache  # once in a run
def _tell_nothing_is_learned() -> None:
    log.warning(
        "rl: expected responses to learn from, got a step whose responses are all masked: truncated, with rl.reward.mask_truncated, or "
        "without a score; nothing is trained in such steps, which skipped_steps shows; raise rl.rollout.max_new_tokens"
    )


def correct(
    sampler_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, mask: torch.Tensor, rl: RlConfig
) -> tuple[torch.Tensor, Metrics]:
    """Importance weights [B, R] by rl.correction, and the mismatch of engine and trainer: see `importance_weights`."""
    correction = rl.correction
    return importance_weights(sampler_logprobs, rollout_logprobs, mask, kind=correction.kind, low=correction.low, high=correction.high)


def shaped_rewards(
    components: RewardComponents,
    finished: torch.Tensor,
    lengths: torch.Tensor,
    rl: RlConfig,
    normalizer: RewardNormalizer,
    *,
    learn: bool = True,
) -> torch.Tensor:
    """Normalised and clipped rewards less the length penalties [B], before any KL; NaN = not trained on, or no scorer has a weight.

    Args:
        finished: [B] bool.    lengths: [B], sampled tokens of each response.
        learn: see `RewardNormalizer`.
    """
    if rl.reward.mask_truncated:
        components = {name: scores.where(finished, torch.nan) for name, scores in components.items()}
    if not rl.learns_from_reward:
        return torch.full(finished.shape, torch.nan)
    return normalizer(components, learn=learn) - _length_penalties(finished, lengths, rl)


def compared_rewards(
    components: RewardComponents,
    finished: torch.Tensor,
    lengths: torch.Tensor,
    group_ids: torch.Tensor,
    rl: RlConfig,
    normalizer: RewardNormalizer,
) -> torch.Tensor:
    """What the estimator compares [B], before any KL: `shaped_rewards`, or with gdpo those that are normalised by scorer and group.

    Arguments as of `shaped_rewards`; group_ids: [B].
    """
    rewards = shaped_rewards(components, finished, lengths, rl, normalizer)
    if not rl.spec.decoupled:
        return rewards
    quantities = {
        "penalties": _length_penalties(finished, lengths, rl),
        "group_ids": group_ids,
        "response_mask": rewards.isfinite()[:, None],
    }
    decoupled = decoupled_rewards(**_by_scorer(components, rl, normalizer), **quantities)
    return decoupled.round(decimals=6)  # scorers that cancel leave a rest of rounding


def _by_scorer(components: RewardComponents, rl: RlConfig, normalizer: RewardNormalizer) -> dict[str, torch.Tensor]:
    """Normalised scores [B, K] and weights [K] of the rewarded scorers."""
    scores = [of_one.double() for of_one in normalizer.normalized(components)]
    return {"scores": torch.stack(scores, 1), "weights": torch.tensor([s.weight for s in rl.reward.rewarded], dtype=torch.float64)}


def _length_penalties(finished: torch.Tensor, lengths: torch.Tensor, rl: RlConfig) -> torch.Tensor:
    """[B], for a missing end token and for lengths near the limit, in units of the normalised reward."""
    penalties = rl.reward.no_eos_penalty * (~finished).float()
    if (overlong := rl.reward.overlong) is not None:
        limit = rl.rollout.max_new_tokens
        penalties = penalties + overlong_penalty(lengths, max_new_tokens=limit, buffer=overlong.buffer, penalty=overlong.penalty)
    return penalties


def sampling_logprobs(batch: RolloutBatch, old_logprobs: torch.Tensor | None, rl: RlConfig) -> torch.Tensor | None:
    """Log-probabilities [B, R] of the policy that sampled the responses, whose KL to the reference they estimate.

    On policy these are the trainer's before the update. With rollouts ahead older policies have sampled, q, and the current one is p: the
    mean of log p - log ref over samples of q is KL(q || ref) - KL(q || p), of either sign. The mean of log q - log ref is KL(q || ref),
    which is never negative in expectation, and of the policy whose scores and lengths the step has too; it is policy_lag updates old.
    The engine's log q is that of the tokens that top-p and top-k leave. Their share is p's, which q's is close to.

    Args:
        old_logprobs: of the policy before the update; None: the update will compute them.
    """
    if not rl.rollout.max_lag:
        return old_logprobs
    return batch.rollout_logprobs + (old_logprobs - batch.sampler_logprobs)


def token_kl(logprobs: torch.Tensor | None, ref_logprobs: torch.Tensor | None, mask: torch.Tensor, rl: RlConfig) -> torch.Tensor:
    """KL estimates of the response tokens for the reward [B, R]; 0 where masked, and everywhere unless the KL is part of the reward.

    Args:
        logprobs, ref_logprobs: [B, R], of the policy that sampled and of the reference.
    """
    if not rl.kl.in_reward:
        return torch.zeros(mask.shape)
    return torch.where(mask, KL_ESTIMATORS[rl.kl.estimator](logprobs, ref_logprobs), 0.0)


def baseline_rewards(baseline: Baseline, rl: RlConfig, normalizer: RewardNormalizer, *, kl_coef: float) -> torch.Tensor:
    """Rewards of the greedy responses [B], computed as those of the samples: a sample that equals the greedy response has advantage 0.

    The normalizer's statistics stay as they are. A truncated greedy response is a baseline even with mask_truncated.
    """
    rewards = normalizer(baseline.components, learn=False) - _length_penalties(baseline.finished, baseline.lengths, rl)
    return rewards - kl_coef * token_kl(baseline.old_logprobs, baseline.ref_logprobs, baseline.response_mask, rl).sum(1)


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens: 1 is a perfect critic, 0 a constant one; NaN without tokens."""
    if not mask.any():
        return math.nan
    spread = returns[mask].var(correction=0)
    return float(1 - (returns - values)[mask].var(correction=0) / spread) if spread > 0 else 0.0


@dataclass(frozen=True)
class ValueUnits:
    """Converts a critic's output to the units of the rewards: value = scale * output + offset.

    A critic that starts as the reward model predicts raw scores, and its head has no bias for the offset.
    """

    scale: float = 1.0
    offset: float = 0.0

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self == ValueUnits() else self.scale * outputs + self.offset


def value_units(rl: RlConfig, normalizer: RewardNormalizer) -> ValueUnits:
    """Units of a critic that starts as the reward model, by the normalisation of that model's scores.

    The critic doesn't know the contribution of other scorers. A critic with a new head predicts 0 in any units.
    """
    if rl.critic.critic_init != "reward_model":
        return ValueUnits()
    scale = offset = 0.0
    for scorer in rl.reward.own_reward_models:
        mean, std = normalizer.location_and_spread(scorer)
        scale += scorer.weight / std
        offset -= scorer.weight * mean / std
    return ValueUnits(scale, offset)
