"""Whether rollout engines and trainer compute the same log-probabilities: of every step's samples, and of fixed tokens after a weight sync.

The fixed tokens are the probe. After each sync, engines and trainer compute its log-probabilities: stale weights show there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhf_core.config import RlConfig
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.types import RolloutBatch

PROBE_TOKENS = 32
MOVED = 4  # a change of the probe's log-probabilities counts as an update above this multiple of the noise
QUANTILE_TOKENS = 3000  # at least; of fewer the quantile 0.999 is one of the two or three largest differences, and isn't limited
NOISE = {"float32": 1e-6, "bfloat16": 5e-3}  # of a log-probability, at least


class LogprobMismatch(RuntimeError):
    """Rollout engine and trainer compute different log-probabilities of the same tokens: stale weights, or different arithmetic."""


@dataclass(frozen=True)
class Difference:
    """Absolute differences between two log-probabilities of the same tokens, in nats: 0 without tokens, NaN if one is NaN."""

    largest: float
    mean: float
    p999: float

    def of(self, dtype: str) -> float:
        """Return the figure that the curves show: in float32 the largest difference, in bfloat16 the quantile 0.999."""
        return self.largest if dtype == "float32" else self.p999


def compare(differences: torch.Tensor, rl: RlConfig | None = None) -> Difference:
    """Return figures of the differences' sizes.

    Args:
        differences: [N], between two log-probabilities of the same tokens.
        rl: how the tokens were sampled. With top-p or top-k, rounding decides for a token in many thousands whether it is still in the
            sampled set, which shifts the log-probability of its position: the thousandth of the tokens that differs most isn't counted in
            `largest`. None: log-probabilities in the whole distribution.
    """
    sizes = differences.abs().float().sort().values
    if not len(sizes):
        return Difference(0.0, 0.0, 0.0)
    if sizes.isnan().any():
        return Difference(math.nan, math.nan, math.nan)
    filtered = rl is not None and not rl.rollout.samples_any_token
    counted = sizes[: len(sizes) - math.ceil(len(sizes) / 1000)] if filtered else sizes
    largest = float(counted[-1]) if len(counted) else 0.0
    return Difference(largest, float(sizes.mean()), float(sizes[math.ceil(0.999 * len(sizes)) - 1]))


def exceeded(difference: Difference, rl: RlConfig, dtype: str, *, probe: bool = False) -> str | None:
    """Return the figure that is above its limit, for a message; None: all are within their limits.

    Args:
        dtype: model.dtype. In float32 the largest difference is limited. In bfloat16 the largest of a million tokens exceeds any useful
            limit, so the mean and the quantile 0.999 are limited; a temperature below 1 widens both, and so the limits.
        probe: the differences are the probe's. Its few tokens are unlikely ones: in bfloat16 their mean difference is two to three times
            that of sampled tokens, and their quantile 0.999 is their largest. Only their mean is limited, by the quantile's limit.
    """
    rollout = rl.rollout
    figures = [("a largest difference", difference.largest, "max_logprob_difference", rollout.max_logprob_difference)]
    if dtype == "bfloat16":
        figures = [
            ("a mean difference", difference.mean, "bfloat16_mean_difference", rollout.bfloat16_mean_difference),
            ("a quantile 0.999 of the differences", difference.p999, "bfloat16_p999_difference", rollout.bfloat16_p999_difference),
        ]
        figures = [("a mean difference", difference.mean, *figures[1][2:])] if probe else figures
    widened = not probe and dtype == "bfloat16" and 0 < rollout.temperature < 1
    for name, value, key, limit in figures:
        if not value * (rollout.temperature if widened else 1.0) <= limit:
            return f"{name} of {value:.3g}, above rl.rollout.{key}={limit}{f' / temperature {rollout.temperature}' if widened else ''}"
    return None


def check_logprobs(batch: RolloutBatch, sampler_logprobs: torch.Tensor, rl: RlConfig, *, step: int, dtype: str) -> float:
    """Return the difference, in nats, between the rollout engine's and the trainer's log-probabilities of the sampled tokens: see
    `Difference.of`.

    The first rollout.min_new_tokens tokens aren't compared: there the engine excludes the end token, whose probability the others share.

    Args:
        sampler_logprobs: [B, R], from the trainer, in the distribution that was sampled from.
    Raises:
        LogprobMismatch: a difference is above its limit.
    """
    mask = batch.response_mask.clone()
    mask[:, : rl.rollout.min_new_tokens] = False
    difference = compare((batch.rollout_logprobs - sampler_logprobs)[mask], rl)
    limited = difference if int(mask.sum()) >= QUANTILE_TOKENS else replace(difference, p999=0.0)
    if reason := exceeded(limited, rl, dtype):
        remedy = _remedy(rl)
        if rl.lora is not None and dtype == "bfloat16":
            remedy = "engines add adapters to bfloat16 weights, which rounds small ones away: set model.dtype=float32, or rl.lora=null"
        raise LogprobMismatch(
            f"step {step}: expected the rollout engine's and the trainer's log-probabilities of the same tokens to agree, got {reason}; "
            f"the probe has shown no stale weights, so the arithmetic differs: {remedy}"
        )
    return difference.of(dtype)


def _remedy(rl: RlConfig) -> str:
    """Return what to do where an engine's arithmetic differs from the trainer's."""
    if rl.rollout.quantization is not None:
        return "engines compute in 8 bits: raise the limit, or set rl.rollout.quantization to null"
    return "raise the limit" + (", or set rl.rollout.backend to pytorch" if rl.rollout.backend == "vllm" else "")


def check_finite(batch: RolloutBatch, *, step: int) -> None:
    """Check that the rollout engine's log-probabilities are finite.

    Raises:
        LogprobMismatch: a log-probability from the rollout engine isn't finite.
    """
    if not batch.rollout_logprobs[batch.response_mask].isfinite().all():
        raise LogprobMismatch(
            f"step {step}: expected finite log-probabilities from the rollout engine, got others; look at the policy's weights"
        )


def probe_ids(vocabulary: int, *, longest: int) -> list[int]:
    """Return the probe's token ids, fewer than `longest`; they depend on the size of the vocabulary only."""
    return np.random.default_rng(vocabulary).integers(vocabulary, size=min(PROBE_TOKENS, longest - 1)).tolist()


class WeightSyncCheck:
    """Compares the engines' and the trainer's log-probabilities of the probe after each weight sync.

    probe_ids: the probe's tokens.
    difference: of the last check; the curves' `logprob_difference` where a step has none of its own.
    """

    def __init__(self, job: RlJob, *, vocabulary: int):
        self.probe_ids = probe_ids(vocabulary, longest=job.model.max_length)
        self.difference = 0.0
        self._rl, self._dtype = job.rl, job.model.dtype
        # An engine merges adapters into bfloat16 weights: an update that rounds away there changes the trainer only.
        self._merging_rounds = job.rl.lora is not None and self._dtype == "bfloat16"
        self._trainer: torch.Tensor | None = None  # [T], for the weights that engines have
        self._engines: torch.Tensor | None = None  # [engines, T]

    def start(self, engines: list[list[float]], trainer: list[float]) -> None:
        """Return the probe's log-probabilities before the first sync, when engines and trainer have loaded the same folder.

        Raises:
            LogprobMismatch: an engine differs by more than the limit, unless the trainer has rounded its weights.
        """
        if not self._rl.starts_rounded:
            self.check(engines, trainer, version=0)
        self._engines, self._trainer = torch.tensor(engines), torch.tensor(trainer)

    def check(self, engines: list[list[float]], trainer: list[float], *, version: int) -> None:
        """Return the probe's log-probabilities after the sync of a policy version.

        Raises:
            LogprobMismatch: an engine differs by more than the limit; or the trainer's log-probabilities changed with its weights, and an
                engine's did not.
        """
        found, expected = torch.tensor(engines), torch.tensor(trainer)
        for rank, engine in enumerate(found):
            if reason := exceeded(compare(engine - expected), self._rl, self._dtype, probe=True):
                raise LogprobMismatch(
                    f"policy version {version}: expected rollout engine {rank} to give the probe the trainer's log-probabilities, got "
                    f"{reason}; {self._cause(rank, engine, expected, version=version)}"
                )
            if self._is_stale(rank, engine, expected):
                moved, followed = (float(x.abs().median()) for x in (expected - self._trainer, engine - self._engines[rank]))
                raise LogprobMismatch(
                    f"policy version {version}: expected rollout engine {rank} to follow the trainer's log-probabilities of the probe, "
                    f"which changed by {moved:.3g}, got a change of {followed:.3g}, or in another direction: the weights of version "
                    f"{version} didn't arrive"
                )
        self.difference = compare((found - expected).flatten()).of(self._dtype)
        self._engines, self._trainer = found, expected

    def disagreement(self, engine: list[float]) -> str | None:
        """Return how an engine with the weights of the last sync differs from the trainer by more than the limit; None: it doesn't."""
        return exceeded(compare(torch.tensor(engine) - self._trainer), self._rl, self._dtype, probe=True)

    def _is_stale(self, rank: int, engine: torch.Tensor, expected: torch.Tensor) -> bool:
        """Return whether the trainer's log-probabilities [T] changed by more than noise, and the engine's are closer to the old ones.

        Medians and clamped changes: in a mixture of experts, a token or two may go to other experts and must not decide.
        """
        if self._trainer is None:
            return False
        moved, followed = expected - self._trainer, engine - self._engines[rank]
        size, floor = float(moved.abs().median()), NOISE[self._dtype]
        same = torch.equal(engine, self._engines[rank])
        # In float32, equal bits of all tokens aren't noise, however far the engine's arithmetic is from the trainer's.
        exact = same and self._dtype == "float32"
        noise = floor if exact else max(floor, float((self._engines[rank] - self._trainer).abs().median()))
        if size <= MOVED * noise or (self._merging_rounds and not same):
            return False
        moved, followed = moved.clamp(-3 * size, 3 * size), followed.clamp(-3 * size, 3 * size)
        return float(followed @ moved) < float(moved @ moved) / 2

    def _cause(self, rank: int, engine: torch.Tensor, expected: torch.Tensor, *, version: int) -> str:
        """Return the likely cause: stale weights give old log-probabilities, this engine's own or the trainer's of the version before."""
        remedy = _remedy(self._rl)
        if self._trainer is None:
            return f"both have loaded the same model, so the arithmetic differs: {remedy}"
        if torch.equal(engine, self._engines[rank]):
            return f"its log-probabilities are unchanged: the weights of version {version} didn't arrive"
        if float((engine - self._trainer).abs().mean()) < float((engine - expected).abs().mean()) / 10:
            return f"it still has the weights of version {version - 1}: those of version {version} didn't arrive"
        return f"its weights have changed, so the arithmetic differs: {remedy}"
