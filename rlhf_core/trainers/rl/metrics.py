"""Metrics of an RL step, its timings, and the check of its scores."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch

from rlhf_core.config import RlConfig, ScoreConfig
from rlhf_core.sampling.rewards import weighted_score
from rlhf_core.trainers.rl.minibatch import EXTREMES
from rlhf_core.trainers.rl.taught import Taught
from rlhf_core.types import Rollout, RolloutBatch

Metrics = dict[str, float]
REPETITION_N = 3  # tokens of an n-gram
TOKEN_MEANS = ("entropy", "clip_frac", "approx_kl", "distillation_loss")


class TooManyUnscored(RuntimeError):
    """A scorer gave no score for too many responses."""


def batch_metrics(batch: RolloutBatch, logprobs: torch.Tensor, config: ScoreConfig) -> Metrics:
    """Raw scores over the responses that were scored, NaN where no scorer has a weight; KL to the reference per response, in nats (k1 on
    the sampled tokens).

    Args:
        logprobs: [B, R], of the policy that sampled.
    """
    ref_logprobs = logprobs if batch.ref_logprobs is None else batch.ref_logprobs
    scores = weighted_score(batch.components, config.scorers, count=len(batch.lengths))
    known = scores.isfinite()
    mask = batch.response_mask
    kl = (logprobs - ref_logprobs).where(mask, 0.0).sum(1)
    lengths = batch.lengths.float()
    kl_mean, kl_min, kl_max = token_log_ratios(logprobs, ref_logprobs, mask)
    return {
        "score_mean": finite_mean(scores),
        "score_std": float(scores[known].std(correction=0)) if known.any() else math.nan,
        **{f"score_{name}": finite_mean(values) for name, values in batch.components.items()},
        **{f"failed_{name}": int((~values.isfinite()).sum()) for name, values in batch.components.items()},
        **{f"agreement_{s.name}": rank_correlation(scores, batch.components[s.name]) for s in config.scorers if not s.weight},
        "kl_mean": float(kl.mean()),
        "kl_token_mean": kl_mean,
        "kl_token_min": kl_min,
        "kl_token_max": kl_max,
        "response_length": float(lengths.mean()),
        "reward_length_correlation": correlation(scores, lengths),
        "repetition": repetition(batch.response_ids, mask, n=REPETITION_N),
        **{f"distinct_{n}": distinct(batch.response_ids, mask, n=n) for n in (1, 2)},
        "truncated_fraction": float((~batch.finished).float().mean()),
        "unscored_fraction": float((~known).float().mean()) if any(s.weight for s in config.scorers) else 0.0,
    }


def dialogue_metrics(rollouts: Sequence[Rollout]) -> Metrics:
    """Means over the episodes: replies, tool results and those that are errors; and the number of episodes that failed."""
    found = [rollout.dialogue for rollout in rollouts]
    return {
        "turns": sum(d.turns for d in found) / len(found),
        "tool_calls": sum(d.calls for d in found) / len(found),
        "failed_tool_calls": sum(d.failed_calls for d in found) / len(found),
        "failed_episodes": sum(d.failed for d in found),
    }


def lag_metrics(rollouts: Sequence[Rollout], *, version: int, longest: int) -> Metrics:
    """How many weight updates before this version tokens were sampled, by how many policies, and how many responses were cut off.

    Args:
        longest: sampled tokens of a response that was truncated at its length. A shorter one that isn't finished was cut off before; an
            episode never is.
    """
    spans = [span for rollout in rollouts for span in rollout.spans if span.trained]
    lags, tokens = [version - span.version for span in spans], [len(span.ids) for span in spans]
    return {
        "policy_lag": sum(lag * count for lag, count in zip(lags, tokens, strict=True)) / sum(tokens),
        "policy_lag_max": max(lags),
        "spans_per_response": len(spans) / len(rollouts),
        "cut_off": sum(not r.finished and r.num_sampled < longest for r in rollouts if r.dialogue is None),
    }


def finite_mean(values: torch.Tensor) -> float:
    known = values[values.isfinite()]
    return float(known.mean()) if len(known) else math.nan


def update_metrics(sums: Metrics, *, ranks: int) -> Metrics:
    """Means over tokens and optimizer steps. A metric that no optimizer step had is left out.

    Args:
        sums: over all ranks, so that a value which is equal on every rank (a norm, a count of steps) is in its sum `ranks` times.
    """
    steps, tokens = sums["optimizer_steps"] / ranks, max(sums.get("tokens", 0), 1)
    found = {
        **{name: sums[f"{name}_sum"] / tokens for name in TOKEN_MEANS if f"{name}_sum" in sums},
        **{name: sums[name] for name in EXTREMES if math.isfinite(sums.get(name, math.nan))},
        **{name: sums[name] / ranks for name in ("stopped_early", "skipped_steps")},
    }
    if steps:
        found |= {name: sums[name] / steps for name in ("policy_loss", "value_loss", "ptx_loss", "moe_aux_loss") if name in sums}
        found |= {name: sums[name] / ranks / steps for name in ("grad_norm", "critic_grad_norm") if name in sums}
    return found


def check_scored(batch: RolloutBatch, rl: RlConfig, *, step: int) -> None:
    """Responses without a score are masked; too many of them mean that the reward is broken.

    Raises:
        TooManyUnscored: a rewarded scorer's share of unscored responses is above rl.reward.max_unscored_fraction, or no response has a
            score by every rewarded scorer.
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
    if rl.learns_from_reward and not weighted_score(batch.components, rl.reward.scorers).isfinite().any():
        raise TooManyUnscored(f"step {step}: expected a response that every scorer could score, got none; each failed for other ones")


def check_taught(taught: Taught | None, rl: RlConfig, *, step: int) -> None:
    """Responses about which a teacher at an address said nothing are masked; too many of them mean that it is broken.

    Raises:
        TooManyUnscored: their share is above rl.reward.max_unscored_fraction, or there are no others.
    """
    limit = rl.reward.max_unscored_fraction
    if taught is not None and ((unknown := taught.known.count(False) / len(taught.known)) > limit or unknown == 1.0):
        raise TooManyUnscored(
            f"step {step}: rl.distillation: expected at most rl.reward.max_unscored_fraction={limit} of the responses without an answer of "
            f"every teacher at an address, got {unknown:.3g}; the log says why"
        )


class Clock:
    """Seconds of a step per phase; a repeated phase adds up.

    Args:
        apart: growing seconds of what happens within phases and isn't counted in them, but by its own name.
    """

    def __init__(self, apart: Mapping[str, float] | None = None):
        self._start = self._last = time.perf_counter()
        self._apart, self._before = apart or {}, dict(apart or {})
        self._laps: dict[str, float] = dict.fromkeys(self._apart, 0.0)

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        spent = {name: seconds - self._before[name] for name, seconds in self._apart.items()}
        for name, seconds in {phase: max(0.0, now - self._last - sum(spent.values())), **spent}.items():
            self._laps[name] = self._laps.get(name, 0.0) + seconds
        self._last, self._before = now, dict(self._apart)

    @property
    def total(self) -> float:
        return self._last - self._start

    def timings(self, *, samples: int) -> dict[str, float]:
        return {"seconds": self.total, "samples_per_second": samples / self.total, **{f"seconds_{k}": v for k, v in self._laps.items()}}

    def __str__(self) -> str:
        return " ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._laps.items())


def progress_figures(row: Metrics, rl: RlConfig, clock: Clock) -> Metrics:
    """Figures of a step, shown beside the progress bar."""
    names = {"score_mean": "score", "kl_mean": "kl", "response_length": "length", "entropy": "entropy", "eval_score": "validation"}
    return {name: row[key] for key, name in names.items() if key in row} | {"samples/s": rl.samples_per_step / clock.total}


def repetition(response_ids: torch.Tensor, response_mask: torch.Tensor, *, n: int) -> float:
    """Mean over responses of the share of n-grams that occurred earlier in the same response.

    1 - distinct / all, in each response ("seq-rep-n" of Welleck et al. 2020, https://arxiv.org/abs/1908.04319, section 6).

    Args:
        response_ids: [B, R] int64, from 0 on.
        response_mask: [B, R] bool; an n-gram across a gap doesn't count.
    Returns:
        0 for responses with a single n-gram; responses without n-grams are left out; NaN without any n-gram.
    """
    codes, whole = _ngrams(response_ids, response_mask, n=n)
    counts = whole.sum(1)
    if not counts.any():
        return math.nan
    nowhere = -1 - torch.arange(codes.shape[1])  # negative, so equal to no code
    ordered = codes.where(whole, nowhere).sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).sum(1)
    return float((repeated / counts.clamp(min=1))[counts > 0].mean())


def distinct(response_ids: torch.Tensor, response_mask: torch.Tensor, *, n: int) -> float:
    """Share of different n-grams among all n-grams of the batch (distinct-n of Li et al. 2016, https://arxiv.org/abs/1510.03055).

    The share falls with the number of tokens: compare only batches of about the same size. NaN without n-grams.
    """
    codes, whole = _ngrams(response_ids, response_mask, n=n)
    found = codes[whole]
    return len(found.unique()) / len(found) if len(found) else math.nan


def _ngrams(ids: torch.Tensor, mask: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a code of each n-gram [B, max(R - n + 1, 0)], equal for equal n-grams only, and whether all of its tokens are unmasked."""
    if ids.shape[1] < n:
        return ids[:, :0], mask[:, :0]
    base = int(ids.max()) + 1
    assert base**n < 2**63, f"{n}-grams of {base} tokens don't fit in 64 bits"
    weights = base ** torch.arange(n)
    return (ids.unfold(1, n, 1) * weights).sum(-1), mask.unfold(1, n, 1).all(-1)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Pearson's correlation of two vectors [B] over the rows where both are finite; NaN where one of them doesn't vary."""
    known = first.isfinite() & second.isfinite()
    a, b = first[known].double(), second[known].double()
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Spearman's correlation of two vectors [B] over the rows where both are finite; ties share the mean of their ranks."""
    known = first.isfinite() & second.isfinite()
    return correlation(_ranks(first[known]), _ranks(second[known]))


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """[B] ranks from 1 on."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[which]


def token_log_ratios(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> tuple[float, float, float]:
    """Mean, smallest and largest log ratio of a sampled token, policy over reference, in nats; NaN without tokens.

    The mean estimates the divergence per token (k1); the extremes name the token on which the two differ most.

    Args:
        logprobs, ref_logprobs: [B, R]; response_mask: [B, R] bool, masked entries may hold anything.
    """
    ratios = (logprobs - ref_logprobs)[response_mask]
    return (float(ratios.mean()), float(ratios.min()), float(ratios.max())) if len(ratios) else (math.nan,) * 3
