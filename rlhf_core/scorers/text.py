"""Scorers that read text: all kinds of ScorerConfig but reward_model.

A scorer gives each response a finite number, or NaN where it can't score the response. A failure is never a score of 0.
To add a kind: a function of an item and its configuration, its line in `SCORERS`, its name in ScorerConfig.kind, its test.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, SupportsFloat

from rlhf_core.config import ScorerConfig, shown
from rlhf_core.data.functions import load_function
from rlhf_core.data.judge import judgement
from rlhf_core.data.schema import Message
from rlhf_core.environment import hint
from rlhf_core.paths import JUDGE_ANSWERS
from rlhf_core.progress import Reasons
from rlhf_core.scorers.code.scorer import CodeScorer
from rlhf_core.scorers.math_answers import MathComparer
from rlhf_core.types import Dialogue, Prompt

FUNCTION_ARGUMENTS = ("prompts", "responses", "labels", "metadata")  # of a user's own scorer
FINAL_ANSWER = "####"  # GSM8K puts the answer after it
# A number with sign, dollar sign, thousands separators, decimals and exponent, not the end of a word. With a slash behind it, it is part
# of a fraction or a date.
_NUMBER = re.compile(
    r"""(?<![\w.])(?P<sign>(?<![\w)])[-+\u2212])?(?:\$[ ]?)?(?P<inner>-)?
    (?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<exponent>[eE][-+]?[0-9]{1,4}(?![0-9]))?
    (?P<fraction>\s?/\s?[-+]?\$?[0-9][0-9.,/]*)?""",
    re.VERBOSE,
)

_MATH = MathComparer()

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class ScoreItem:
    """One response as scorers see it.

    prompt: text of the last user message. messages: the whole conversation before the response.
    label: the expected answer of a verifiable task, or None.
    metadata: id and source of the prompt; finished (False: truncated at the length limit); response_length in tokens; of episodes also
        turns, tool_calls and environment, the environment's score or None.
    rendered: the prompt, and the prompt with the response, as the policy's template renders them; None where no scorer reads it.
    other: in the evaluation the other model's response to the prompt; None where no scorer reads it.
    """

    prompt: str
    messages: list[Message]
    response: str
    label: str | None
    metadata: dict[str, Any]
    rendered: tuple[str, str] | None = None
    other: str | None = None


def score_item(
    prompt: Prompt,
    response: str,
    *,
    finished: bool,
    response_length: int,
    rendered: tuple[str, str] | None = None,
    dialogue: Dialogue | None = None,
    other: str | None = None,
) -> ScoreItem:
    metadata = {"id": prompt.id, "source": prompt.source, "finished": finished, "response_length": response_length}
    if dialogue is not None:
        metadata |= {"turns": dialogue.turns, "tool_calls": dialogue.calls, "environment": dialogue.score}
    return ScoreItem(prompt.messages[-1]["content"], prompt.messages, response, prompt.label, metadata, rendered, other)


ScoreOne = Callable[[ScoreItem], float]
ScoreAll = Callable[[list[ScoreItem]], tuple[list[float], dict[str, float]]]


class TextScorers:
    """Loads and checks all scorers of `configs` that read text.

    Args:
        rank: unused; every actor of a group gets one.
        source_judges: each data source's judge by the source's name.
        in_time: a call has the scorer's timeout for all of its responses, as in a step of RL; otherwise each request or program has limits.
        answers: folder of the kept answers of language models that judge.
    Raises:
        ValueError: a user's function can't be loaded, a service's key can't be read, or the sandbox for programs doesn't work here.
    """

    def __init__(
        self,
        rank: int,
        configs: list[ScorerConfig],
        source_judges: dict[str, str],
        *,
        in_time: bool = False,
        answers: Path = JUDGE_ANSWERS,
    ):
        self._scorers = {c.name: _scorer(c, source_judges, in_time, answers) for c in configs if c.kind != "reward_model"}

    def score_items(self, name: str, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        """Return one score per item, and the scorer's further metrics. NaN: not scored, for a reason that is logged."""
        return self._scorers[name](items)


def _scorer(config: ScorerConfig, source_judges: dict[str, str], in_time: bool, answers: Path) -> ScoreAll:
    report = Reasons(config.name)
    if config.kind == "code":
        return CodeScorer(config, report, in_time=in_time)
    if config.kind == "function":
        return _user_function(load_function(config.path, FUNCTION_ARGUMENTS, what="scorer function"), report)
    if config.kind == "http":
        from rlhf_core.scorers.http import HttpScorer  # imports aiohttp

        return HttpScorer(config, report, in_time=in_time)
    if config.kind == "llm_judge":
        from rlhf_core.scorers.llm_judge.scorer import LlmJudge

        return LlmJudge(config, report, in_time=in_time, folder=answers)
    if config.kind == "judge":
        return _for_all(partial(judge, source_judges=source_judges), report)
    return _for_all(partial(SCORERS[config.kind], config=config), report)


def _for_all(score: ScoreOne, report: Reasons) -> ScoreAll:
    """Return a function that applies a scorer of one response to many.

    The scorer raises ValueError with the reason for a response that it can't score.
    """

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


def _user_function(function: Callable[..., Any], report: Reasons) -> ScoreAll:
    """Return a scorer that calls a user's function with all responses at once. Whatever the function raises or returns, responses are at
    worst unscored.
    """

    def score_all(items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        unscored = [math.nan] * len(items)
        try:
            answer = function(
                [item.prompt for item in items],
                [item.response for item in items],
                [item.label for item in items],
                [{**item.metadata, "messages": [dict(message) for message in item.messages]} for item in items],
            )
        except (Exception, SystemExit) as error:  # a user's code may raise anything
            report(f"{type(error).__name__}: {error}{hint(error)}", count=len(items))
            return unscored, {}
        answer, metrics = answer if isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], dict) else (answer, {})
        try:
            answer = list(islice(answer, len(items) + 1))  # an iterator may be endless
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
    """Return the value as a finite number, or NaN."""
    if not isinstance(value, SupportsFloat):
        return math.nan
    try:
        number = float(value)
    except Exception:  # a user's type may raise anything
        return math.nan
    return number if math.isfinite(number) else math.nan


def _equals_label(item: ScoreItem, same: Callable[[str, str], bool]) -> float:
    """Return 1 if `same` holds for response and label, else 0."""
    if item.label is None:
        raise ValueError(f"the prompt has no label to compare with: {item.metadata['id']} of source {item.metadata['source']}")
    return float(same(item.response, item.label))


def exact_match(item: ScoreItem, config: ScorerConfig) -> float:
    return _equals_label(item, same_text)


def number(item: ScoreItem, config: ScorerConfig) -> float:
    return _equals_label(item, same_number)


def math_answer(item: ScoreItem, config: ScorerConfig) -> float:
    return _equals_label(item, _MATH.same)


def regex(item: ScoreItem, config: ScorerConfig) -> float:
    """Return 1 if the pattern is found anywhere in the response, else 0."""
    return float(re.search(config.pattern, item.response) is not None)


def length(item: ScoreItem, config: ScorerConfig) -> float:
    """Return -|n - target| / target for n tokens, at least -1: 0 at target_length, -1 at 0 tokens and from twice the target on."""
    return max(-1.0, -abs(item.metadata["response_length"] - config.target_length) / config.target_length)


def environment(item: ScoreItem, config: ScorerConfig) -> float:
    """Return what rl.environment gave: the number that `play` returned, and chat.reward's."""
    score = item.metadata.get("environment")
    if score is None:
        raise ValueError("play returned None, and called no chat.reward")
    return score


def judge(item: ScoreItem, source_judges: dict[str, str]) -> float:
    """Return 1 if the judge of the prompt's source accepts the response, else 0."""
    source = item.metadata["source"]
    found = judgement(source_judges, source, item.messages, item.response)
    if found is None:
        raise ValueError(f"there is no judge for this data: source {source} has none")
    return float(found.ok)


def same_text(response: str, label: str) -> bool:
    """Return whether two texts are equal up to white space at the ends and the amount of white space within."""
    return response.split() == label.split()


def same_number(response: str, label: str) -> bool:
    """Return whether the final numbers of response and label are equal, exactly: 1,234 equals 1234.0.

    Raises:
        ValueError: the label has no number.
    """
    expected = final_number(label)
    if expected is None:
        raise ValueError(f"the label has no number to compare with: {label!r}")
    return final_number(response) == expected


def final_number(text: str) -> Decimal | None:
    """Return the first number after the last ####, or without #### the last number of the text; None if there is none.

    Signs, dollar signs, thousands separators, decimals and exponents are understood. Fractions and dates, such as 1/2, aren't numbers.
    """
    _, marked, rest = text.rpartition(FINAL_ANSWER)
    matches = [match for match in _NUMBER.finditer(rest) if not match["fraction"]]
    if not matches:
        return None
    match = matches[0] if marked else matches[-1]
    negative = (match["sign"] or match["inner"] or "+") in "-\u2212"
    return Decimal(("-" if negative else "") + match["digits"].replace(",", "") + (match["exponent"] or ""))


# Kind of scorer -> its function. reward_model, function, judge, code, http and llm_judge are the other kinds.
SCORERS: dict[str, Callable[[ScoreItem, ScorerConfig], float]] = {
    "exact_match": exact_match,
    "number": number,
    "math": math_answer,
    "regex": regex,
    "length": length,
    "environment": environment,
}
