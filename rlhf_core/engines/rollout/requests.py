"""Requests to a rollout engine and its samples: token ids in, token ids and log-probabilities out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.data.pictures import Picture


@dataclass(frozen=True)
class SamplingSettings:
    """How responses are sampled. Log-probabilities are those of the distribution that is sampled from.

    max_new_tokens: the end token included.
    temperature: 0 is greedy, and its log-probabilities are those at temperature 1.
    top_p, top_k: restrict the tokens, after the temperature and top-k before top-p; 1.0 and None: no restriction.
    min_new_tokens: neither the end token nor a stop string ends a response before. Until then the distribution has no end token.
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
        """The same limits and stops, with the most likely token at each step."""
        return replace(self, temperature=0.0, top_p=1.0, top_k=None)


@dataclass(frozen=True)
class Sample:
    """One response: ids including the end token if sampled, the log-probability of each, and finished (False: truncated).

    version: number of the weight update that the engine had last; 0: none. It isn't compared: equal weights have other numbers elsewhere.
    """

    response_ids: list[int]
    logprobs: list[float]
    finished: bool
    version: int = field(default=0, compare=False)


@dataclass(frozen=True)
class Request:
    """A response that an engine continues.

    given: its tokens so far.    seed: of the tokens that follow.    limit: so many may follow.
    pictures: of the prompt.
    """

    prompt_ids: list[int]
    given: list[int]
    seed: int
    limit: int
    pictures: tuple[Picture, ...] = ()

    @property
    def ids(self) -> list[int]:
        """All tokens so far."""
        return [*self.prompt_ids, *self.given]


def request_seeds(seed: int, step: int, count: int, *, turn: int = 0) -> list[int]:
    """Return a sampling seed for each of `count` requests of a step, independent of the engine that serves it.

    Args:
        turn: of generation within the step.
    """
    entropy = [seed, step, 0, turn] if turn else [seed, step]
    return [int(s) for s in np.random.SeedSequence(entropy).generate_state(count, dtype=np.uint32)]


def segment_seed(seed: int, given: int) -> int:
    """Return the seed by which a response is continued after the given number of its tokens: with the seed of an earlier part, that part's
    random numbers would come again.
    """
    return int(np.random.SeedSequence([seed, given]).generate_state(1, dtype=np.uint32)[0])


def end_with_due(awaited: bool) -> bool:
    """Let an engine end with the responses that are due."""
    return awaited


def stop_finder(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str]) -> Callable[[list[int], int], bool]:
    """Return a function that tells whether a stop string ends in a response's ids after the first so many. As with vLLM it may begin, but
    not end, before.
    """

    def text(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    def stops(ids: list[int], first: int) -> bool:
        seen, before = text(ids), len(text(ids[:first]))
        return any(s in seen[max(0, before - len(s) + 1) :] for s in strings)

    return stops
