"""Sampled responses, without and with their scores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from rlhf_core.engines.rollout.requests import Sample
from rlhf_core.types import Dialogue, Prompt, Rollout


class Response(Protocol):
    """A sampled response: `rlhf_core.types.Rollout`, for one.

    response_ids: up to and including the end token, if one was sampled.
    num_sampled: its tokens that the model sampled.
    finished: the model ended the response; False: it was truncated at the length limit.
    dialogue: of a response of several turns. Scorers see its last reply, and the conversation before it as the prompt.
    """

    prompt: Prompt
    finished: bool
    dialogue: Dialogue | None

    @property
    def response_ids(self) -> list[int]: ...

    @property
    def num_sampled(self) -> int: ...


@dataclass(frozen=True)
class SampledResponse:
    """A `Response` outside RL, without log-probabilities."""

    prompt: Prompt
    response_ids: list[int]
    finished: bool
    dialogue: Dialogue | None = field(default=None, kw_only=True)

    @property
    def num_sampled(self) -> int:
        return len(self.response_ids) if self.dialogue is None else sum(self.dialogue.sampled)


@dataclass(frozen=True)
class ScoredResponse(SampledResponse):
    """A response with its text and scores.

    score: weighted sum of the raw scores; NaN where a scorer with a weight has no score, or no scorer has a weight.
    components: raw score by scorer's name; NaN = not scored.
    steps: of each process reward model the probabilities that the steps are right.
    """

    text: str
    score: float
    components: dict[str, float]
    steps: dict[str, list[float]] = field(default_factory=dict, kw_only=True)


def sampled_response(prompt: Prompt, sample: Sample | Rollout) -> SampledResponse:
    if isinstance(sample, Rollout):
        return SampledResponse(sample.prompt, sample.response_ids, sample.finished, dialogue=sample.dialogue)
    return SampledResponse(prompt, sample.response_ids, sample.finished)


def last_reply(response: Response) -> SampledResponse:
    """Return the last reply of a response, after the conversation before it."""
    dialogue, ids = response.dialogue, response.response_ids
    if dialogue is None:
        return SampledResponse(response.prompt, ids, response.finished)
    before = replace(response.prompt, messages=dialogue.messages, prompt_ids=[*response.prompt.prompt_ids, *ids[: dialogue.start]])
    return SampledResponse(before, ids[dialogue.start :], response.finished)


def without_prompts(groups: list[list[ScoredResponse]]) -> list[list[dict[str, Any]]]:
    """Scored responses as JSON objects without their prompt, which the group's position gives."""
    return [[{name: value for name, value in vars(response).items() if name != "prompt"} for response in group] for group in groups]


def with_prompts(groups: list[list[dict[str, Any]]], prompts: list[Prompt]) -> list[list[ScoredResponse]]:
    """Return the inverse of `without_prompts`."""
    return [[ScoredResponse(prompt=prompt, **fields) for fields in group] for prompt, group in zip(prompts, groups, strict=True)]
