"""What is measured of an RL step, and what stops the run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import torch

from rlhf_core.config import RlConfig, ScoreConfig
from rlhf_core.sampling.scoring import weighted_score
from rlhf_core.trainers.rl.data import Components
from rlhf_core.trainers.rl.minibatch import EXTREMES
from rlhf_core.trainers.rl.policy_statistics import correlation, distinct, rank_correlation, repetition, token_kl
from rlhf_core.types import RolloutBatch

Metrics = dict[str, float]
REPETITION_N = 3  # tokens that come again


class LogprobMismatch(RuntimeError):
    """The sampling engine and the trainer disagree about the same tokens: stale weights, or different arithmetic."""


class TooManyUnscored(RuntimeError):
    """A scorer had no answer for too many responses."""


def batch_metrics(batch: RolloutBatch, config: ScoreConfig) -> Metrics:
    """Raw scores over what could be scored (finite ones); KL to the reference per sequence, in nats (k1 on the sampled tokens)."""
    scores = weighted_score(batch.components, config.scorers)
    known = scores.isfinite()
    mask = batch.response_mask
    kl = ((batch.old_logprobs - batch.ref_logprobs) * mask).sum(1)
    kl_mean, kl_min, kl_max = token_kl(batch.old_logprobs, batch.ref_logprobs, mask)
    return {
        "score_mean": finite_mean(scores),
        "score_std": float(scores[known].std(correction=0)),
        **{f"score_{name}": finite_mean(values) for name, values in batch.components.items()},
        **{f"failed_{name}": int((~values.isfinite()).sum()) for name, values in batch.components.items()},
        **{f"agreement_{s.name}": rank_correlation(scores, batch.components[s.name]) for s in config.scorers if not s.weight},
        "kl_mean": float(kl.mean()),
        "kl_token_mean": kl_mean,
        "kl_token_min": kl_min,
        "kl_token_max": kl_max,
        "response_length": float(mask.sum(1).float().mean()),
        "reward_length_correlation": correlation(scores, mask.sum(1).float()),
        "repetition": repetition(batch.response_ids, mask, n=REPETITION_N),
        **{f"distinct_{n}": distinct(batch.response_ids, mask, n=n) for n in (1, 2)},
        "truncated_fraction": float((~batch.finished).float().mean()),
        "unscored_fraction": float((~known).float().mean()),
    }


def evaluation_metrics(components: Components, config: ScoreConfig) -> Metrics:
    """Means over what could be scored; NaN where nothing could."""
    scores = {"score": weighted_score(components, config.scorers), **components}
    return {f"eval_{name}": finite_mean(values) for name, values in scores.items()}


def finite_mean(values: torch.Tensor) -> float:
    known = values[values.isfinite()]
    return float(known.mean()) if len(known) else math.nan


def update_metrics(sums: Metrics, *, ranks: int) -> Metrics:
    """Means over tokens and optimizer steps, from sums over all ranks. What no optimizer step had is left out.

    Args:
        sums: those that are the same on every rank (norms, counts of steps) are in it `ranks` times.
    """
    steps, tokens = sums["optimizer_steps"] / ranks, max(sums.get("tokens", 0), 1)
    found = {
        **{name: sums[f"{name}_sum"] / tokens for name in ("entropy", "clip_frac", "approx_kl") if f"{name}_sum" in sums},
        **{name: sums[name] for name in EXTREMES if math.isfinite(sums.get(name, math.nan))},
        **{name: sums[name] / ranks for name in ("stopped_early", "skipped_steps")},
    }
    if steps:
        found |= {name: sums[name] / steps for name in ("policy_loss", "value_loss", "ptx_loss", "moe_aux_loss") if name in sums}
        found |= {name: sums[name] / ranks / steps for name in ("grad_norm", "critic_grad_norm") if name in sums}
    return found


def check_scored(batch: RolloutBatch, rl: RlConfig, *, step: int) -> None:
    """Responses without a score are masked and counted; too many of them mean that the reward is broken.

    Raises:
        TooManyUnscored: of a scorer that is rewarded, their share is above rl.reward.max_unscored_fraction, or no response has them all.
    """
    limit = rl.reward.max_unscored_fraction
    for scorer in rl.reward.scorers:
        scores = batch.components[scorer.name]
        unscored = int((~scores.isfinite()).sum()) / len(scores)
        if scorer.weight and (unscored > limit or unscored == 1.0):
            hint = "are they too long for it, or are its weights broken?" if scorer.kind == "reward_model" else "the log says why"
            raise TooManyUnscored(
                f"step {step}: scorer {scorer.name}: expected at most rl.reward.max_unscored_fraction={limit} of the responses without a "
                f"finite score, got {unscored:.3g}; {hint}"
            )
    if not weighted_score(batch.components, rl.reward.scorers).isfinite().any():
        raise TooManyUnscored(f"step {step}: expected a response that every scorer could score, got none; each failed for other ones")


@dataclass(frozen=True)
class Difference:
    """Sizes of the differences between two log-probabilities of the same tokens, in nats; 0 without any token, NaN with one that is NaN."""

    largest: float
    mean: float
    p999: float

    def of(self, dtype: str) -> float:
        """The figure by which engine and trainer are watched: of float32 the largest; of bfloat16 the quantile 0.999."""
        return self.largest if dtype == "float32" else self.p999


def compare(differences: torch.Tensor, rl: RlConfig | None = None) -> Difference:
    """Of the differences [N] between two log-probabilities.

    Args:
        rl: how the tokens were drawn, see `largest_difference`; None: these are log-probabilities within the whole distribution.
    """
    sizes = differences.abs().float().sort().values
    if not len(sizes):
        return Difference(0.0, 0.0, 0.0)
    if sizes.isnan().any():
        return Difference(math.nan, math.nan, math.nan)
    largest = float(sizes[-1]) if rl is None else largest_difference(differences, rl)
    return Difference(largest, float(sizes.mean()), float(sizes[math.ceil(0.999 * len(sizes)) - 1]))


def exceeded(difference: Difference, rl: RlConfig, dtype: str, *, probe: bool = False) -> str | None:
    """Which figure is above its limit, in words; None: none is.

    Args:
        dtype: model.dtype. In float32 the largest difference counts. In bfloat16, where the largest of a million tokens is above any limit
            that can tell, the mean and the quantile 0.999 do.
        probe: of the few fixed tokens of the probe, which are unlikely ones: in bfloat16 their mean difference is two to three times that
            of sampled tokens, and their quantile 0.999 is their largest. So their mean is held to the quantile's limit, and nothing else.
    """
    rollout = rl.rollout
    figures = [("a largest difference", difference.largest, "max_logprob_difference", rollout.max_logprob_difference)]
    if dtype == "bfloat16":
        figures = [
            ("a mean difference", difference.mean, "bfloat16_mean_difference", rollout.bfloat16_mean_difference),
            ("a quantile 0.999 of the differences", difference.p999, "bfloat16_p999_difference", rollout.bfloat16_p999_difference),
        ]
        figures = [("a mean difference", difference.mean, *figures[1][2:])] if probe else figures
    for name, value, key, limit in figures:
        if not value <= limit:
            return f"{name} of {value:.3g}, above rl.rollout.{key}={limit}"
    return None


def check_logprobs(batch: RolloutBatch, rl: RlConfig, *, step: int, dtype: str, few: bool = False) -> float:
    """Difference, in nats, between the sampling engine's and the trainer's log-probabilities of the sampled tokens: see `Difference.of`.

    Before rollout.min_new_tokens the engine forbids the end token, and the others share its probability: nothing to compare.

    Args:
        few: a quantile 0.999 of so few tokens would be their largest, and isn't limited.
    Raises:
        LogprobMismatch: it is above its limit: see `exceeded`. Stale weights were looked for at their sync, see `Arrival.check`.
    """
    mask = batch.response_mask.clone()
    mask[:, : rl.rollout.min_new_tokens] = False
    difference = compare((batch.rollout_logprobs - batch.sampler_logprobs)[mask], rl)
    if reason := exceeded(replace(difference, p999=0.0) if few else difference, rl, dtype):
        raise LogprobMismatch(
            f"step {step}: expected the rollout engine's and the trainer's log-probabilities of the same tokens to agree, got {reason}; "
            "the probe has shown no stale weights, so the arithmetic differs: raise the limit, or set rl.rollout.backend to pytorch"
        )
    return difference.of(dtype)


def check_finite(batch: RolloutBatch, *, step: int) -> None:
    """That log-probabilities which are learned from as the engine gave them are numbers.

    Raises:
        LogprobMismatch: one isn't.
    """
    if not batch.rollout_logprobs[batch.response_mask].isfinite().all():
        raise LogprobMismatch(
            f"step {step}: expected finite log-probabilities from the rollout engine, got others; look at the policy's weights"
        )


def largest_difference(differences: torch.Tensor, rl: RlConfig) -> float:
    """The largest of the differences [N] between two log-probabilities of the same tokens, in nats; 0 without any, NaN with one.

    Where top-p or top-k is set, rounding decides for a token in many thousands whether it is still among those that may be drawn, which
    shifts all of its position; so the thousandth part that differs most is left out.
    """
    ordered = differences.abs().sort().values
    if (rl.rollout.top_p < 1.0 or rl.rollout.top_k is not None) and not ordered.isnan().any():
        ordered = ordered[: len(ordered) - math.ceil(len(ordered) / 1000)]
    return float(ordered[-1]) if len(ordered) else 0.0


class Clock:
    """Where a step's time goes, in seconds per phase; a phase that comes again adds up."""

    def __init__(self):
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._laps[phase] = self._laps.get(phase, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start

    def timings(self, *, samples: int) -> dict[str, float]:
        return {"seconds": self.total, "samples_per_second": samples / self.total, **{f"seconds_{k}": v for k, v in self._laps.items()}}

    def __str__(self) -> str:
        return " ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._laps.items())


def told(row: Metrics, rl: RlConfig, clock: Clock) -> Metrics:
    """What is shown of a step while the training goes on."""
    names = {"score_mean": "score", "kl_mean": "kl", "response_length": "length", "entropy": "entropy", "eval_score": "validation"}
    return {name: row[key] for key, name in names.items() if key in row} | {"samples/s": rl.samples_per_step / clock.total}
