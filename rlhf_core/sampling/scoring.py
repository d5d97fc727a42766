"""From raw scores to one reward: the weighted sum of the scorers' scores, normalised where so configured."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from rlhf_core.config import ScoreConfig, ScorerConfig


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
    """Scores to one reward: the weighted sum of the scorers' scores, each of mean 0 and std 1 if so configured.

    `initial` is the normalisation of Ziegler et al. 2019, section 2.2 (https://arxiv.org/abs/1909.08593): by the initial policy's
    samples. `running` is by all samples so far.

    moments: of each scorer that is normalised, by name; state to be saved and set again.
    """

    def __init__(self, config: ScoreConfig):
        self._config = config
        self._rewarded = [s for s in config.scorers if s.weight]
        self.moments = {s.name: Moments() for s in self._rewarded if s.normalization != "none"}

    def trial(self) -> RewardNormalizer:
        """Another one with the same moments, which may move on by themselves."""
        other = RewardNormalizer(self._config)
        other.moments = dict(self.moments)
        return other

    @property
    def needs_calibration(self) -> bool:
        return any(s.normalization == "initial" for s in self._rewarded)

    def calibrate(self, components: dict[str, torch.Tensor] | None) -> None:
        """Take the statistics of the initial policy's scores, by scorer's name; None where the configuration needs none.

        Raises:
            ValueError: a scorer has no finite score.
        """
        if components is None:
            return
        for scorer in self._rewarded:
            if scorer.normalization != "initial":
                continue
            scores = components[scorer.name]
            self.moments[scorer.name] = Moments().merge(scores)
            if self.moments[scorer.name].count == 0:
                raise ValueError(
                    f"reward normalisation of {scorer.name}: expected scores of the initial policy's {len(scores)} samples, got none that "
                    "is finite; see what that scorer says, and whether model.max_length is long enough for a reward model"
                )

    def location_and_spread(self, scorer: ScorerConfig) -> tuple[float, float]:
        """What a scorer's scores are shifted by, and then divided by."""
        if scorer.normalization == "none":
            return 0.0, 1.0
        moments = self.moments[scorer.name]
        return moments.mean, max(moments.std, 1e-6)

    def __call__(self, components: dict[str, torch.Tensor], *, learn: bool = True) -> torch.Tensor:
        """Rewards [B], clipped as a whole; NaN where one of the scores that count isn't finite.

        Args:
            components: scorer's name -> [B] raw scores.
            learn: False leaves running statistics as they are.
        """
        total = 0.0
        for scorer in self._rewarded:
            scores = _known(components[scorer.name])
            if scorer.normalization == "running" and learn:
                self.moments[scorer.name] = self.moments[scorer.name].merge(scores)
            if scorer.normalization != "none":
                mean, std = self.location_and_spread(scorer)
                scores = (scores - mean) / std
            total = total + scorer.weight * scores
        limit = self._config.clip
        return total if limit is None else total.clamp(-limit, limit)


def weighted_score(components: dict[str, torch.Tensor], scorers: list[ScorerConfig]) -> torch.Tensor:
    """The raw scores' weighted sum [B], neither normalised nor clipped; NaN where one of the scores that count isn't finite."""
    return sum(s.weight * _known(components[s.name]) for s in scorers if s.weight)


def _known(scores: torch.Tensor) -> torch.Tensor:
    return scores.where(scores.isfinite(), torch.nan)
