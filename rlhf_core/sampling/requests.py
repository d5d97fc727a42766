"""What a rollout engine is asked for and what it gives: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are drawn. Log-probabilities are those of the distribution that was drawn from.

    max_new_tokens: the end token counts.
    temperature: 0 is greedy, and its log-probabilities are those at temperature 1.
    top_p, top_k: only these tokens are drawn, after the temperature and top-k before top-p; 1.0 and None: any.
    min_new_tokens: neither the end token nor a stop string ends a response before; until then the log-probabilities are those of a
        distribution without the end token.
    stop: strings that end a response and stay in it.
    """

    max_new_tokens: int
    temperature: float
    top_p: float = 1.0
    top_k: int | None = None
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()

    @property
    def greedy(self) -> SamplingSettings:
        """The same ends, but always the most likely token."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=None)


@dataclass(frozen=True)
class Sample:
    """One response: ids with the end token if it came, the log-probability of each, and whether the model ended it itself."""

    response_ids: list[int]
    logprobs: list[float]
    finished: bool


def request_seeds(seed: int, step: int, count: int, *, turn: int = 0) -> list[int]:
    """A sampling seed for each of `count` requests of a step, whatever engine serves it and whatever it drew before.

    Args:
        turn: of generation within the step.
    """
    entropy = [seed, step, 0, turn] if turn else [seed, step]
    return [int(s) for s in np.random.SeedSequence(entropy).generate_state(count, dtype=np.uint32)]
