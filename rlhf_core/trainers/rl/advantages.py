"""From raw scores to advantages: normalisation, penalties, KL, the estimator, whitening. The whole batch, all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlhf_core.algorithms.advantages import (
    dr_grpo,
    gae,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    token_rewards,
    whiten,
)
from rlhf_core.algorithms.corrections import importance_weights
from rlhf_core.algorithms.kl import KL_ESTIMATORS
from rlhf_core.algorithms.shaping import overlong_penalty
from rlhf_core.config import RlConfig
from rlhf_core.sampling.scoring import RewardNormalizer
from rlhf_core.types import Baseline, RolloutBatch, TrainBatch


def compute_advantages(
    batch: RolloutBatch, rl: RlConfig, normalizer: RewardNormalizer, *, kl_coef: float
) -> tuple[TrainBatch, dict[str, float]]:
    """Advantages (and returns, for the critic) of a batch by `rl.algorithm`. The normaliser may move on.

    A response that could not be scored (a score that counts isn't finite) is masked: neither policy nor critic learns from it, and no
    statistic sees it. So is one that was cut off, where rl.reward.mask_truncated says so.

    Args:
        kl_coef: of the KL in the reward; unused where it is a term of the loss.
    """
    rewards = shaped_rewards(batch.components, batch.finished, batch.response_mask.sum(1), rl, normalizer)
    mask = batch.response_mask & rewards.isfinite()[:, None]
    if rl.kl.placement == "loss":
        kl_coef = 0.0
    kl = _kl(batch, mask, rl)
    with_kl = rewards - kl_coef * kl.sum(1)
    advantages, returns, metrics = _advantages(batch, rl, normalizer, rewards=rewards, kl=kl, kl_coef=kl_coef, mask=mask)
    weights, correction_metrics = correct(batch, mask, rl)
    learned = mask.any(1)
    metrics |= correction_metrics
    metrics["reward_mean"] = float(with_kl[with_kl.isfinite()].mean())
    metrics["advantage_zero_fraction"] = float((advantages[learned] == 0).all(1).float().mean())
    train_batch = TrainBatch(
        prompt_ids=batch.prompt_ids,
        prompt_mask=batch.prompt_mask,
        response_ids=batch.response_ids,
        response_mask=mask,
        old_logprobs=batch.old_logprobs,
        ref_logprobs=batch.ref_logprobs,
        old_values=batch.values,
        advantages=advantages,
        returns=returns,
        importance_weights=weights,
    )
    return train_batch, metrics


def correct(batch: RolloutBatch, mask: torch.Tensor, rl: RlConfig) -> tuple[torch.Tensor, dict[str, float]]:
    """Importance weights [B, R] of the tokens in a mask, and how far the sampling engine is from the trainer; see importance_weights.

    Of a batch in which the engine's log-probabilities stand in for the trainer's, 1 and nothing.
    """
    if batch.old_logprobs is batch.rollout_logprobs:
        return torch.ones_like(batch.old_logprobs), {}
    how = rl.correction
    return importance_weights(batch.sampler_logprobs, batch.rollout_logprobs, mask, kind=how.kind, low=how.low, high=how.high)


def shaped_rewards(
    components: dict[str, torch.Tensor], finished: torch.Tensor, lengths: torch.Tensor, rl: RlConfig, normalizer: RewardNormalizer
) -> torch.Tensor:
    """Normalised and clipped rewards less the penalties for length [B], before any KL; NaN: nothing is to be learned from the response.

    Args:
        components: scorer's name -> [B] raw scores.
        finished: [B] bool.    lengths: [B], tokens of each response.
    """
    if rl.reward.mask_truncated:
        components = {name: scores.where(finished, torch.nan) for name, scores in components.items()}
    return normalizer(components) - _penalties(finished, lengths, rl)


def _penalties(finished: torch.Tensor, lengths: torch.Tensor, rl: RlConfig) -> torch.Tensor:
    """For the length of a response and a missing end [B], in normalised units."""
    config = rl.reward
    penalties = config.no_eos_penalty * (~finished).float()
    if config.overlong is None:
        return penalties
    how = {"buffer": config.overlong.buffer, "penalty": config.overlong.penalty}
    return penalties + overlong_penalty(lengths, max_new_tokens=rl.rollout.max_new_tokens, **how)


def _kl(responses: RolloutBatch | Baseline, mask: torch.Tensor, rl: RlConfig) -> torch.Tensor:
    """Of each response token [B, R], 0 where masked."""
    return torch.where(mask, KL_ESTIMATORS[rl.kl.estimator](responses.old_logprobs, responses.ref_logprobs), 0.0)


def baseline_rewards(baseline: Baseline, rl: RlConfig, normalizer: RewardNormalizer, *, kl_coef: float) -> torch.Tensor:
    """What the greedy responses get [B], by the same measure as the sampled ones: a sample that is its prompt's greedy response has
    exactly its baseline. The normaliser doesn't move. A greedy response that was cut off is a baseline too, whatever mask_truncated says.

    Args:
        kl_coef: of the KL in the reward.
    """
    rewards = normalizer(baseline.components, learn=False) - _penalties(baseline.finished, baseline.response_mask.sum(1), rl)
    return rewards - kl_coef * _kl(baseline, baseline.response_mask, rl).sum(1)


def _advantages(
    batch: RolloutBatch,
    rl: RlConfig,
    normalizer: RewardNormalizer,
    *,
    rewards: torch.Tensor,
    kl: torch.Tensor,
    kl_coef: float,
    mask: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, dict[str, float]]:
    """Advantages and returns [B, R] by the algorithm, and its metrics. Returns are zeros where there is no critic.

    With a baseline per response the KL is subtracted from the rewards before the baseline is.
    """
    zeros = torch.zeros_like(batch.values)
    per_token = token_rewards(rewards, kl, mask, kl_coef=kl_coef)
    per_response = rewards - kl_coef * kl.sum(1)
    match rl.algorithm:
        case "ppo":
            advantages, returns = gae(per_token, batch.values, mask, gamma=rl.ppo.gamma, gae_lambda=rl.ppo.gae_lambda)
            if rl.ppo.whiten_advantages:
                advantages = whiten(advantages, mask)
            return advantages, returns, {"explained_variance": explained_variance(batch.values, returns, mask)}
        case "grpo":
            return grpo(per_response, batch.group_ids, mask, normalize_std=rl.grpo.normalize_std), zeros, {}
        case "dr_grpo":
            return dr_grpo(per_response, batch.group_ids, mask), zeros, {}
        case "rloo":
            return rloo(per_response, batch.group_ids, mask), zeros, {}
        case "reinforce_pp":
            return reinforce_pp(per_token, mask, gamma=1.0), zeros, {}
        case "reinforce_pp_baseline":
            return reinforce_pp_baseline(per_response, batch.group_ids, mask), zeros, {}
        case "remax":
            return remax(per_response, baseline_rewards(batch.baseline, rl, normalizer, kl_coef=kl_coef), mask), zeros, {}


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens: 1 is a perfect critic, 0 a constant one."""
    spread = returns[mask].var(correction=0)
    return float(1 - (returns - values)[mask].var(correction=0) / spread) if spread > 0 else 0.0


@dataclass(frozen=True)
class ValueUnits:
    """From what a critic says to values in the units of the rewards: scale * output + offset.

    A critic that starts as the reward model speaks in raw scores, and its head has no bias that could take the offset.
    """

    scale: float = 1.0
    offset: float = 0.0

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self == ValueUnits() else self.scale * outputs + self.offset


def value_units(rl: RlConfig, normalizer: RewardNormalizer) -> ValueUnits:
    """Of a critic that starts as the reward model: what that one's scores are in the reward, by the initial policy's statistics.

    What other scorers add isn't known to it. A critic with a new head starts at 0 in any units.
    """
    if rl.ppo.critic_init != "reward_model":
        return ValueUnits()
    scale = offset = 0.0
    for scorer in rl.reward.own_reward_models:
        mean, std = normalizer.location_and_spread(scorer)
        scale += scorer.weight / std
        offset -= scorer.weight * mean / std
    return ValueUnits(scale, offset)
