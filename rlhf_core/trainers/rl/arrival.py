"""Whether the rollout engines have the trainer's weights: both say the log-probabilities of the same fixed tokens, the probe."""

from __future__ import annotations

import logging

import numpy as np
import torch

from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.metrics import LogprobMismatch, compare, exceeded

log = logging.getLogger("rlhf")

PROBE_TOKENS = 32
MOVED = 4  # times the noise is a move that isn't noise
NOISE = {"float32": 1e-6, "bfloat16": 5e-3}  # of a log-probability when weights change, at least


def probe_ids(vocabulary: int, *, longest: int) -> list[int]:
    """Token ids that follow from the size of the vocabulary alone, fewer than `longest`."""
    return np.random.default_rng(vocabulary).integers(vocabulary, size=min(PROBE_TOKENS, longest - 1)).tolist()


class Arrival:
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
