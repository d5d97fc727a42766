"""Whether rollout engines and trainer agree on log-probabilities: of fixed tokens after each weight sync, and of every step's samples."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlhf_core.config import RlConfig
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.types import RolloutBatch

PROBE_TOKENS = 32
MOVED = 4  # times the noise is a move that isn't noise
NOISE = {"float32": 1e-6, "bfloat16": 5e-3}  # of a log-probability when weights change, at least


class LogprobMismatch(RuntimeError):
    """The sampling engine and the trainer disagree about the same tokens: stale weights, or different arithmetic."""


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
        LogprobMismatch: it is above its limit: see `exceeded`. Stale weights were looked for at their sync, see `WeightSyncCheck.check`.
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


def probe_ids(vocabulary: int, *, longest: int) -> list[int]:
    """Token ids that follow from the size of the vocabulary alone, fewer than `longest`."""
    return np.random.default_rng(vocabulary).integers(vocabulary, size=min(PROBE_TOKENS, longest - 1)).tolist()


class WeightSyncCheck:
    """Compares what engines and trainer say of the probe, and remembers what they said of the weights before.

    difference: the last one that was found, as `logprob_difference` of a step.
    """

    def __init__(self, job: RlJob, *, vocabulary: int):
        self.ids = probe_ids(vocabulary, longest=job.model.max_length)
        self.difference = 0.0
        self._rl, self._dtype = job.rl, job.model.dtype
        # An engine has base model and adapters in one: what rounds away there moves the trainer alone.
        self._rounds_moves = job.rl.lora is not None and self._dtype == "bfloat16"
        self._trainer: torch.Tensor | None = None  # [T], of the weights that engines have
        self._engines: torch.Tensor | None = None  # [engines, T]

    def begin(self, engines: list[list[float]], trainer: list[float]) -> None:
        """What they say before the first sync, when all have read the same folder.

        Raises:
            LogprobMismatch: an engine's differ by more than the budget, though the trainer hasn't rounded what it read.
        """
        if not self._rl.starts_rounded:
            self.check(engines, trainer, version=0)
        self._engines, self._trainer = torch.tensor(engines), torch.tensor(trainer)

    def check(self, engines: list[list[float]], trainer: list[float], *, version: int) -> None:
        """What every engine says after a sync, and the trainer's policy of that version.

        Raises:
            LogprobMismatch: an engine's differ by more than the budget, which the message explains; or the trainer's moved with its
                weights, and an engine's didn't move with them.
        """
        said, expected = torch.tensor(engines), torch.tensor(trainer)
        for rank, of_rank in enumerate(said):
            if reason := exceeded(compare(of_rank - expected), self._rl, self._dtype, probe=True):
                raise LogprobMismatch(
                    f"policy version {version}: expected rollout engine {rank} to give the probe the trainer's log-probabilities, got "
                    f"{reason}; {self._cause(rank, of_rank, expected, version=version)}"
                )
            if self._stays_behind(rank, of_rank, expected):
                moved, followed = (float(x.abs().median()) for x in (expected - self._trainer, of_rank - self._engines[rank]))
                raise LogprobMismatch(
                    f"policy version {version}: expected rollout engine {rank} to follow the trainer's log-probabilities of the probe, "
                    f"which moved by {moved:.3g}, got one of {followed:.3g}, or elsewhere: the weights of version {version} didn't arrive"
                )
        self.difference = compare((said - expected).flatten()).of(self._dtype)
        self._engines, self._trainer = said, expected

    def agrees(self, engine: list[float]) -> str | None:
        """What an engine that got the weights of the last sync is off by, if by more than the budget."""
        return exceeded(compare(torch.tensor(engine) - self._trainer), self._rl, self._dtype, probe=True)

    def _stays_behind(self, rank: int, said: torch.Tensor, expected: torch.Tensor) -> bool:
        """Whether the trainer's log-probabilities [T] moved by more than noise, and the engine's are nearer to where they were.

        Medians and clamped moves, so that a token or two whose experts are chosen otherwise don't decide.
        """
        if self._trainer is None:
            return False
        moved, followed = expected - self._trainer, said - self._engines[rank]
        size, floor = float(moved.abs().median()), NOISE[self._dtype]
        same = torch.equal(said, self._engines[rank])
        # The same float32 bits for all tokens aren't noise, however far the engine's arithmetic is from the trainer's.
        exact = same and self._dtype == "float32"
        noise = floor if exact else max(floor, float((self._engines[rank] - self._trainer).abs().median()))
        if size <= MOVED * noise or (self._rounds_moves and not same):
            return False
        moved, followed = moved.clamp(-3 * size, 3 * size), followed.clamp(-3 * size, 3 * size)
        return float(followed @ moved) < float(moved @ moved) / 2

    def _cause(self, rank: int, said: torch.Tensor, expected: torch.Tensor, *, version: int) -> str:
        """Stale weights say what was said before: by this engine, or by the trainer of the version before."""
        remedy = "set rl.rollout.backend to pytorch, or raise the limit"
        if self._trainer is None:
            return f"both have read the same model, so the arithmetic differs: {remedy}"
        if torch.equal(said, self._engines[rank]):
            return f"it says what it said before: the weights of version {version} didn't arrive"
        if float((said - self._trainer).abs().mean()) < float((said - expected).abs().mean()) / 10:
            return f"the weights of version {version - 1} are still in it: those of version {version} didn't arrive"
        return f"other weights than before arrived, so the arithmetic differs: {remedy}"
