"""Scores of responses by a judge: asked in parallel, answered from the disk where it was asked before, within a budget."""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.config import ScorerConfig, shown
from rlhf_core.data.places import base_of, locate
from rlhf_core.paths import JUDGE_ANSWERS
from rlhf_core.progress import Reasons
from rlhf_core.scorers.llm_judge.answers import BudgetSpent, JudgeAnswer, JudgeAnswers, question_key
from rlhf_core.scorers.llm_judge.questions import Question, Questions, answer_object
from rlhf_core.scorers.service import Exchange, Refused, Service

if TYPE_CHECKING:
    from rlhf_core.data.schema import Message
    from rlhf_core.scorers.text import ScoreItem

    Pair = tuple[Sequence[Message], str, str]

MAX_TEMPLATE = 2**16  # bytes
WITHOUT_SCHEMA = (400, 422, 501)  # statuses of services that know no JSON schema
NO_ANSWER, REFUSED, UNPARSABLE = "no answer", "refused", "unparsable"  # why there is no verdict
_TRIAL_CRITERIA = '[{"criterion": "The response is right."}]'

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Verdict:
    """The verdict on one question.

    value: NaN: there is none. fault: why there is none, one of NO_ANSWER, REFUSED and UNPARSABLE, or empty; reason: the same in words.
    answer: that it was read from; None: no answer came.
    """

    value: float
    fault: str = ""
    reason: str = ""
    answer: JudgeAnswer | None = None


class LlmJudge:
    """A language model that scores responses.

    Args:
        report: receives the reasons of missing scores.
        in_time: as for `Service`.
        folder: of answers that are kept.
    Raises:
        ValueError: the template or the service's key can't be read.
    """

    def __init__(self, config: ScorerConfig, report: Reasons, *, in_time: bool = False, folder: Path = JUDGE_ANSWERS):
        self._config, self._report = config, report
        self._service = Service(config, f"{config.url.rstrip('/')}/chat/completions", in_time=in_time)
        self._questions = Questions(config, read_template(config))
        self.answers = JudgeAnswers(config, folder)
        self._takes_schema = True
        self._model: str | None = None  # that the service says it is

    def __call__(self, items: list[ScoreItem]) -> tuple[list[float], dict[str, float]]:
        """One score per item, NaN where there is none.

        Further metrics: shares of questions without a verdict and of verdicts that changed with the positions, and of each item the tokens
        and the cost, those of kept answers included, so that a resumed run measures the same.

        Raises:
            BudgetSpent: before all items have a score.
        """
        asked: list[list[Question]] = []
        for item in items:
            try:
                asked.append(self._of_item(item))
            except ValueError as error:  # the row lacks what the mode needs
                self._report(str(error), count=1)
                asked.append([])
        verdicts = iter(self.ask([question for questions in asked for question in questions]))
        found = [[next(verdicts) for _ in questions] for questions in asked]
        self._tell_faults([verdict for of_item in found for verdict in of_item])
        return [combined([verdict.value for verdict in of_item]) for of_item in found], self._metrics(found)

    def judge_pairs(self, pairs: Sequence[Pair], *, again: bool = False) -> list[tuple[Verdict, Verdict]]:
        """Two verdicts on each pair: in mode pairwise with either response first, otherwise on each response.

        Args:
            pairs: conversation and two responses. again: in another order, and with another seed.
        """
        questions = []
        for messages, first, second in pairs:
            if self._config.mode == "pairwise":
                questions += [self._questions.on_pair(messages, *both, again=again) for both in ((first, second), (second, first))]
            else:
                questions += [self._questions.on_response(messages, text, None, again=again) for text in (first, second)]
        verdicts = self.ask(questions, seed=int(again))
        return list(zip(verdicts[::2], verdicts[1::2], strict=True))

    def trial(self, item: ScoreItem, *, seconds: float) -> dict[str, str]:
        """Ask about one item, whatever is kept. Returns the model that the service says it is.

        Raises:
            ValueError: the service doesn't answer as it should. An answer without a verdict is one.
        """
        if self._config.mode == "rubric":
            item = replace(item, label=_TRIAL_CRITERIA)
        (verdict, *_) = self.ask(self._of_item(item)[:1], seconds=min(seconds, self._config.timeout), anew=True)
        if verdict.answer is None:
            raise ValueError(
                f"scorer {self._config.name}: expected the judge at {self._config.url} to answer on a made-up response, got: "
                f"{shown(verdict.reason, 1000)}; start the service, or correct this scorer's keys (docs/scorers.md)"
            )
        return {"name": self._model}

    def ask(self, questions: Sequence[Question], *, seed: int = 0, seconds: float | None = None, anew: bool = False) -> list[Verdict]:
        """Return a verdict on each question, equal ones asked once.

        Args:
            seconds: for all of them; None: as `in_time` says. anew: ask what is known too.
        Raises:
            BudgetSpent: before all questions are answered. All that were answered are kept.
        """
        self.answers.refresh()
        bodies = [self._body(question, seed) for question in questions]
        keys = [question_key(body, self._service.url) for body in bodies]
        todo = {
            key: (body, question.schema)
            for key, body, question in zip(keys, bodies, questions, strict=True)
            if anew or self.answers.find(key) is None
        }
        failures: dict[str, str] = {}
        if todo:
            asyncio.run(self._service.run(lambda e: [self._ask(e, key, *of, failures) for key, of in todo.items()], seconds=seconds))
            counts = len(todo) - len(failures), len(set(keys)) - len(todo)
            log.info("scorer %s: %d answers of the judge, and %d kept ones; so far %s", self._config.name, *counts, self.answers.spent())
        if failures:
            self.answers.check_budget()
        return [self._verdict(question, key, failures) for question, key in zip(questions, keys, strict=True)]

    def _of_item(self, item: ScoreItem) -> list[Question]:
        if self._config.mode not in ("pairwise", "head_to_head"):
            return [self._questions.on_response(item.messages, item.response, item.label)]
        beside = item.other if self._config.mode == "head_to_head" else item.label
        if beside is None:
            raise ValueError(f"the prompt has no label to compare with: {item.metadata['id']} of source {item.metadata['source']}")
        both = (item.response, beside), (beside, item.response)
        return [self._questions.on_pair(item.messages, *texts) for texts in both]

    def _body(self, question: Question, seed: int) -> dict[str, Any]:
        fixed = {"model": self._config.model, "messages": question.messages, "temperature": 0, "seed": seed}
        return fixed | {"max_tokens": self._config.max_answer_tokens} | self._config.request

    async def _ask(self, exchange: Exchange, key: str, body: dict[str, Any], schema: dict[str, Any], failures: dict[str, str]) -> None:
        """Keep the answer to one question, or note why none came."""

        async def attempt() -> str:
            try:
                self.answers.check_budget()  # others have been answered meanwhile
            except BudgetSpent as spent:
                raise Refused(str(spent)) from spent
            answer = await self._post(exchange, body, schema, where=f"{self._service.url}, question {key}")
            self._check(answer)
            self.answers.keep(key, answer)
            return ""

        if reason := await exchange.repeated(attempt):
            failures[key] = reason

    async def _post(self, exchange: Exchange, body: dict[str, Any], schema: dict[str, Any], *, where: str) -> JudgeAnswer:
        """Send a request with a JSON schema, unless the service has refused one and answered without."""
        plain = {name: value for name, value in body.items() if value is not None}
        if not self._takes_schema or "response_format" in body:
            return await exchange.post(plain, read_completion, where=where)
        form = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": schema}}
        try:
            return await exchange.post(plain | {"response_format": form}, read_completion, where=where)
        except Refused as refusal:
            if refusal.status not in WITHOUT_SCHEMA:
                raise
            answer = await exchange.post(plain, read_completion, where=where)
            if self._takes_schema:
                log.info("scorer %s: %s takes no JSON schema (%s); answers are asked for without one", self._config.name, where, refusal)
            self._takes_schema = False
            return answer

    def _check(self, answer: JudgeAnswer) -> None:
        """Compare what the service says of itself with what it said before.

        Raises:
            Refused: a budget can't be kept.
        """
        config = self._config
        has_budget = config.budget_tokens is not None or config.budget_cost is not None
        if has_budget and answer.input_tokens + answer.output_tokens == 0:
            raise Refused(f"the service's answer has no usage, by which budgets are kept: {self._service.url}; set them to null")
        if self._model not in (None, answer.model):
            told = (config.name, self._model, answer.model)
            log.warning("scorer %s: expected verdicts of the model %s, as before, got those of %s; they may differ", *told)
        self._model = answer.model

    def _verdict(self, question: Question, key: str, failures: dict[str, str]) -> Verdict:
        answer = self.answers.find(key)
        if key in failures or answer is None:
            return Verdict(math.nan, NO_ANSWER, failures.get(key, "no answer came"))
        if answer.text is None or answer.ended == "content_filter":
            return Verdict(math.nan, REFUSED, f"the judge refused to answer: {self._service.url}, question {key}", answer)
        try:
            if answer.ended == "length":
                raise ValueError("it is cut off at max_answer_tokens")
            return Verdict(question.read(answer_object(answer.text)), answer=answer)
        except ValueError as error:
            reason = f"the judge's answer can't be read: {error}; {self._service.url}, question {key}: got {shown(answer.text)}"
            return Verdict(math.nan, UNPARSABLE, reason, answer)

    def _tell_faults(self, verdicts: list[Verdict]) -> None:
        counts = Counter(verdict.reason.partition(":")[0] for verdict in verdicts if verdict.fault)
        for verdict in verdicts:
            if verdict.fault and (count := counts.pop(verdict.reason.partition(":")[0], 0)):
                self._report(verdict.reason, count=count)

    def _metrics(self, found: list[list[Verdict]]) -> dict[str, float]:
        verdicts = [verdict for of_item in found for verdict in of_item]
        if not verdicts:
            return {}
        answers = [verdict.answer for verdict in verdicts if verdict.answer is not None]
        tokens = sum(a.input_tokens for a in answers), sum(a.output_tokens for a in answers)
        metrics = {fault: sum(v.fault == fault for v in verdicts) / len(verdicts) for fault in (UNPARSABLE, REFUSED)}
        metrics["tokens"] = sum(tokens) / len(found)
        if self._config.prices is not None:
            metrics["cost"] = self.answers.cost_of(*tokens) / len(found)
        known = [both for both in found if len(both) == 2 and not any(verdict.fault for verdict in both)]
        if known:
            metrics["flipped"] = sum(first.value != 1 - second.value for first, second in known) / len(known)
        return metrics


def combined(values: Sequence[float]) -> float:
    """The score of the verdicts on one item: the value itself; of two with swapped positions the first's, or a tie if they disagree."""
    if len(values) != 2:
        return values[0] if values else math.nan
    first, second = values[0], 1 - values[1]
    if math.isnan(first) or math.isnan(second):
        return math.nan
    return first if first == second else 0.5


def read_template(config: ScorerConfig) -> str | None:
    """Return the instructions in the scorer's file; None without one.

    Raises:
        ValueError: they can't be read.
    """
    if config.template is None:
        return None
    subject = f"scorer {config.name}: expected a file with the judge's instructions at template={config.template}"
    try:
        with locate(config.template).open("rb") as file:
            content = file.read(MAX_TEMPLATE + 1)
        text = content.decode()
    except (OSError, ValueError) as error:
        raise ValueError(f"{subject}, got {error}; correct the path{base_of(config.template)}") from error
    if not text.strip() or len(content) > MAX_TEMPLATE:
        raise ValueError(f"{subject}, got {len(content)} bytes of at most {MAX_TEMPLATE}, or none but white space; write them")
    return text


def read_completion(tree: Any) -> JudgeAnswer:
    """Raises: ValueError: it isn't a chat completion."""
    choices = tree.get("choices") if isinstance(tree, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(message, dict) or not isinstance(message.get("content"), str | None):
        raise ValueError("expected a chat completion, an object with choices whose message has content")
    refused = message.get("refusal") is not None
    usage = tree.get("usage") if isinstance(tree.get("usage"), dict) else {}
    tokens = [n if isinstance(n := usage.get(name), int) and n > 0 else 0 for name in ("prompt_tokens", "completion_tokens")]
    return JudgeAnswer(None if refused else message.get("content"), str(first.get("finish_reason")), *tokens, shown(str(tree.get("model"))))
