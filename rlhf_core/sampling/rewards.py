"""The one reward of a response, from the scores of every scorer: normalised, weighted and summed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from rlhf_core.config import ScoreConfig, ScorerConfig
from rlhf_core.types import RewardComponents


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
        """Biased; 0 without scores."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


class RewardNormalizer:
    """One reward per response: the weighted sum of the scorers' scores, each normalised to mean 0 and std 1 if so configured.

    Normalisation `initial` uses the initial policy's samples (Ziegler et al. 2019, section 2.2, https://arxiv.org/abs/1909.08593);
    `running` uses all samples so far.

    moments: by the name of each normalised scorer; the state that checkpoints save.
    """

    def __init__(self, config: ScoreConfig):
        self._config = config
        self._rewarded = config.rewarded
        self.moments = {s.name: Moments() for s in self._rewarded if s.normalization != "none"}

    def trial(self) -> RewardNormalizer:
        """Return a copy whose moments can change independently."""
        other = RewardNormalizer(self._config)
        other.moments = dict(self.moments)
        return other

    @property
    def needs_calibration(self) -> bool:
        return any(s.normalization == "initial" for s in self._rewarded)

    def calibrate(self, components: RewardComponents | None) -> None:
        """Set the moments of `initial` normalisation from the initial policy's scores, by scorer's name. None: nothing to set.

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
                    "is finite; see that scorer's warnings, and whether model.max_length is long enough for a reward model"
                )

    def location_and_spread(self, scorer: ScorerConfig) -> tuple[float, float]:
        """Mean that is subtracted from a scorer's scores, and std that they are then divided by."""
        if scorer.normalization == "none":
            return 0.0, 1.0
        moments = self.moments[scorer.name]
        return moments.mean, max(moments.std, 1e-6)

    def __call__(self, components: RewardComponents, *, learn: bool = True) -> torch.Tensor:
        """Rewards [B], the sum clipped; NaN where a scorer with a weight has no finite score.

        Args:
            learn: False: don't update running statistics.
        """
        for scorer in self._rewarded:
            if scorer.normalization == "running" and learn:
                self.moments[scorer.name] = self.moments[scorer.name].merge(components[scorer.name])
        total = sum(scorer.weight * scores for scorer, scores in zip(self._rewarded, self.normalized(components), strict=True))
        limit = self._config.clip
        return total if limit is None else total.clamp(-limit, limit)

    def normalized(self, components: RewardComponents) -> list[torch.Tensor]:
        """Return each rewarded scorer's normalised scores [B], unweighted; NaN where it has no finite score."""
        scaled = [(_known(components[s.name]), *self.location_and_spread(s), s) for s in self._rewarded]
        return [scores if s.normalization == "none" else (scores - mean) / std for scores, mean, std, s in scaled]


def weighted_score(components: RewardComponents, scorers: list[ScorerConfig], *, count: int = 0) -> torch.Tensor:
    """Weighted sum [B] of raw scores, neither normalised nor clipped; NaN where a scorer with a weight has no finite score.

    Args:
        count: B, of NaN where no scorer has a weight.
    """
    if not any(s.weight for s in scorers):
        return torch.full((count,), torch.nan)
    return sum(s.weight * _known(components[s.name].float()) for s in scorers if s.weight)


def _known(scores: torch.Tensor) -> torch.Tensor:
    return scores.where(scores.isfinite(), torch.nan)
