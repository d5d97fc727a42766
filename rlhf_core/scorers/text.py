"""Scorers that read text: the kinds of ScorerConfig but reward_model, whose scores come from a model's rank.

A number or NaN for each response: NaN where it could not be scored, never 0 because something went wrong.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any, SupportsFloat

from rlhf_core.config import ScorerConfig, shown
from rlhf_core.data.functions import load_function
from rlhf_core.data.judge import judgement
from rlhf_core.data.schema import Message
from rlhf_core.environment import hint
from rlhf_core.scorers.answers import same_number, same_text
from rlhf_core.scorers.math_answers import MathComparer
from rlhf_core.scorers.reasons import Reasons
from rlhf_core.types import Prompt

log = logging.getLogger("rlhf")
FUNCTION_ARGUMENTS = ("prompts", "responses", "labels", "metadata")  # of a user's own scorer


@dataclass(frozen=True)
class ScoreItem:
    """One response as scorers see it.

    prompt: the text of the last user message; messages: the whole conversation.
    label: the expected answer of a verifiable task, or None.
    metadata: id and source (of the prompt), finished (ended by the model, not cut off), response_length (tokens).
    """

    prompt: str
    messages: list[Message]
    response: str
    label: str | None
    metadata: dict[str, Any]


def score_item(prompt: Prompt, response: str, *, finished: bool, response_length: int) -> ScoreItem:
    metadata = {"id": prompt.id, "source": prompt.source, "finished": finished, "response_length": response_length}
    return ScoreItem(prompt.messages[-1]["content"], prompt.messages, response, prompt.label, metadata)


ScoreOne = Callable[[ScoreItem], float]
ScoreAll = Callable[[list[ScoreItem]], tuple[list[float], dict[str, float]]]


class TextScorers:
    """Every scorer of `configs` that reads text, loaded and checked at once.

    Args:
        rank: which of several of these; they all do the same.
        source_judges: name of each data source that has a judge -> the judge's.
    Raises:
        ValueError: a function can't be loaded.
    """

    def __init__(self, rank: int, configs: list[ScorerConfig], source_judges: dict[str, str]):
        self._scorers = {c.name: _scorer(c, source_judges) for c in configs if c.kind != "reward_model"}

    def score_items(self, name: str, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        """A score for each item (NaN: it could not be scored, for the reason in the log) and what else the scorer measured."""
        return self._scorers[name](items)


def _scorer(config: ScorerConfig, source_judges: dict[str, str]) -> ScoreAll:
    report = Reasons(config.name)
    if config.kind == "function":
        return _by_function(load_function(config.path, FUNCTION_ARGUMENTS, what="scorer function"), report)
    return _each(SCORERS[config.kind](config, source_judges), report)


def _each(score: ScoreOne, report: Reasons) -> ScoreAll:
    """A scorer of one response, for many; it raises ValueError, with the reason, for one that it can't score."""

    def score_all(items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        scores: list[float] = []
        reasons: list[str] = []
        for item in items:
            try:
                scores.append(score(item))
            except ValueError as error:
                scores.append(math.nan)
                reasons.append(str(error))
        for reason in dict.fromkeys(reasons):
            report(reason, count=reasons.count(reason))
        return scores, {}

    return score_all


def _by_function(function: Callable[..., Any], report: Reasons) -> ScoreAll:
    """A user's function: called with all responses at once, believed in nothing."""

    def score_all(items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        unscored = [math.nan] * len(items)
        try:
            answer = function(
                [item.prompt for item in items],
                [item.response for item in items],
                [item.label for item in items],
                [{**item.metadata, "messages": [dict(message) for message in item.messages]} for item in items],
            )
        except (Exception, SystemExit) as error:  # whatever a user's code may raise: none of these responses has a score
            report(f"{type(error).__name__}: {error}{hint(error)}", count=len(items))
            return unscored, {}
        answer, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict) else (answer, {})
        try:
            answer = list(islice(answer, len(items) + 1))  # it may be endless
        except TypeError:
            report(f"a list of numbers was expected of it: it returned {type(answer).__name__}", count=len(items))
            return unscored, {}
        except (Exception, SystemExit) as error:
            report(f"{type(error).__name__}: {error}{hint(error)}", count=len(items))
            return unscored, {}
        if len(answer) != len(items):
            came = f"{len(answer)} came" if len(answer) < len(items) else "more came"
            report(f"one score per response was expected of it: {came} for {len(items)}", count=len(items))
            return unscored, {}
        scores = [_number(a) for a in answer]
        if bad := [a for a, score in zip(answer, scores, strict=True) if not math.isfinite(score)]:
            got = shown(repr(bad[0])) if isinstance(bad[0], float | str | None) else type(bad[0]).__name__
            report(f"finite numbers were expected of it: it returned {got}", count=len(bad))
        return scores, {shown(str(name)): _number(value) for name, value in metrics.items()}

    return score_all


def _number(value: Any) -> float:
    """NaN for what is no finite number."""
    if not isinstance(value, SupportsFloat):
        return math.nan
    try:
        number = float(value)
    except Exception:  # of a user's own type, anything
        return math.nan
    return number if math.isfinite(number) else math.nan


def _compares_labels(compare: Callable[[str, str], bool]) -> Callable[[ScorerConfig, dict[str, str]], ScoreOne]:
    """A scorer that gives 1 where the response's answer is the label's, else 0."""

    def make(config: ScorerConfig, source_judges: dict[str, str]) -> ScoreOne:
        def score(item: ScoreItem) -> float:
            if item.label is None:
                raise ValueError(f"the prompt has no label to compare with: {item.metadata['id']} of source {item.metadata['source']}")
            try:
                return float(compare(item.response, item.label))
            except ValueError as error:
                raise ValueError(str(error)) from error

        return score

    return make


def _math(config: ScorerConfig, source_judges: dict[str, str]) -> ScoreOne:
    return _compares_labels(MathComparer().same)(config, source_judges)


def _regex(config: ScorerConfig, source_judges: dict[str, str]) -> ScoreOne:
    """1 where the pattern is found anywhere in the response, else 0."""
    pattern = re.compile(config.pattern)
    return lambda item: float(pattern.search(item.response) is not None)


def _length(config: ScorerConfig, source_judges: dict[str, str]) -> ScoreOne:
    """-|n - target| / target for n tokens, at least -1: 0 at target_length, -1 at no token and from twice the target on."""
    target = config.target_length
    return lambda item: max(-1.0, -abs(item.metadata["response_length"] - target) / target)


def _judge(config: ScorerConfig, source_judges: dict[str, str]) -> ScoreOne:
    """1 where the judge of the prompt's source accepts the response, else 0."""

    def score(item: ScoreItem) -> float:
        source = item.metadata["source"]
        word = judgement(source_judges, source, item.messages, item.response)
        if word is None:
            raise ValueError(f"there is no judge for this data: source {source} has none")
        return float(word.ok)

    return score


# Kind of scorer -> what makes it.
SCORERS: dict[str, Callable[[ScorerConfig, dict[str, str]], ScoreOne]] = {
    "exact_match": _compares_labels(same_text),
    "number": _compares_labels(same_number),
    "math": _math,
    "regex": _regex,
    "length": _length,
    "judge": _judge,
}
