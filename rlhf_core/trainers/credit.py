"""From raw scores to advantages: normalisation, penalties, KL, the estimator, whitening. The whole batch, all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from rlhf_core.algorithms.advantages import gae, grpo, rloo, token_rewards, whiten
from rlhf_core.algorithms.kl import KL_ESTIMATORS
from rlhf_core.config import RlConfig, ScoreConfig
from rlhf_core.types import RolloutBatch, TrainBatch


@dataclass(frozen=True)
class Moments:
    """Count, mean and summed squared deviation of scores, merged batch by batch (Chan et al. 1979)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def merge(self, scores: torch.Tensor) -> Moments:
        known = scores[scores.isfinite()].double()
        if len(known) == 0:
            return self
        count, mean = len(known), float(known.mean())
        delta, total = mean - self.mean, self.count + len(known)
        squares = self.squares + float(((known - mean) ** 2).sum()) + delta**2 * self.count * count / total
        return replace(self, count=total, mean=self.mean + delta * count / total, squares=squares)

    @property
    def std(self) -> float:
        """Biased; 0 before anything was seen."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RewardNormalizer:
    """Scores to rewards of mean 0 and std 1, by the initial policy's samples or by all so far.

    `initial` is the normalisation of Ziegler et al. 2019, section 2.2 (https://arxiv.org/abs/1909.08593).
    """

    def __init__(self, config: ScoreConfig):
        self._config = config
        self.moments = Moments()

    def calibrate(self, scores: torch.Tensor | None) -> None:
        """Take the statistics of the initial policy's scores; None where the configuration needs none.

        Raises:
            ValueError: no score is finite.
        """
        if scores is None:
            return
        self.moments = Moments().merge(scores)
        if self.moments.count == 0:
            raise ValueError(
                f"reward normalisation: expected scores of the initial policy's {len(scores)} samples, got none that is finite; "
                "see what the reward model says, and whether model.max_length is long enough for it"
            )

    def __call__(self, scores: torch.Tensor) -> torch.Tensor:
        """Normalised and clipped rewards [B]; NaN where the score isn't finite."""
        scores = scores.where(scores.isfinite(), torch.nan)
        if self._config.normalization == "running":
            self.moments = self.moments.merge(scores)
        if self._config.normalization != "none":
            scores = (scores - self.moments.mean) / max(self.moments.std, 1e-6)
        limit = self._config.clip
        return scores if limit is None else scores.clamp(-limit, limit)


def assign_credit(batch: RolloutBatch, rl: RlConfig, normalizer: RewardNormalizer) -> tuple[TrainBatch, dict[str, float]]:
    """Advantages (and returns, for the critic) of a batch by `rl.algorithm`. The normaliser may move on.

    A response that could not be scored (its score isn't finite) is masked: neither policy nor critic learns from it.
    """
    mask = batch.response_mask & batch.scores.isfinite()[:, None]
    rewards = normalizer(batch.scores) - rl.reward.no_eos_penalty * (~batch.finished).float()
    kl_coef = rl.kl.coef if rl.kl.placement == "reward" else 0.0
    kl = torch.where(mask, KL_ESTIMATORS[rl.kl.estimator](batch.old_logprobs, batch.ref_logprobs), 0.0)
    returns = torch.zeros_like(batch.values)
    metrics = {}
    if rl.algorithm == "ppo":
        per_token = token_rewards(rewards, kl, mask, kl_coef=kl_coef)
        advantages, returns = gae(per_token, batch.values, mask, gamma=rl.ppo.gamma, gae_lambda=rl.ppo.gae_lambda)
        metrics["explained_variance"] = explained_variance(batch.values, returns, mask)
        if rl.ppo.whiten_advantages:
            advantages = whiten(advantages, mask)
    else:
        sequence_rewards = rewards - kl_coef * kl.sum(1)
        if rl.algorithm == "grpo":
            advantages = grpo(sequence_rewards, batch.group_ids, mask, normalize_std=rl.grpo.normalize_std)
        else:
            advantages = rloo(sequence_rewards, batch.group_ids, mask)
    scored = rewards - kl_coef * kl.sum(1)
    metrics["reward_mean"] = float(scored[scored.isfinite()].mean())
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
    )
    return train_batch, metrics


def explained_variance(values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor) -> float:
    """1 - Var(returns - values) / Var(returns) over the response tokens: 1 is a perfect critic, 0 a constant one."""
    spread = returns[mask].var(correction=0)
    return float(1 - (returns - values)[mask].var(correction=0) / spread) if spread > 0 else 0.0
