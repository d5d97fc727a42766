"""A language model that judges by a rule, behind an OpenAI-compatible address in a thread of the test's process, and that can fail."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from score_service import running

from rlhf_core.scorers.llm_judge.questions import WARNING

Tree = dict[str, Any]
Quality = Callable[[str, list[Tree]], float]  # of a response to a conversation, from 0 to 9
Misbehaviour = Callable[["JudgeService", web.Request, Tree], Awaitable[web.StreamResponse | None]]  # None: answer as usual


def data_of(request: Tree) -> Tree:
    """What is under judgement, from a request's message."""
    (message,) = request["messages"]
    return json.loads(message["content"].partition(f"{WARNING}\n\n")[2].partition("\n")[0])


def by_plus(response: str, _: list[Tree]) -> float:
    """The number of plus signs, at most 9."""
    return float(min(9, response.count("+")))


def by_length(response: str, _: list[Tree]) -> float:
    return float(min(9, len(response) // 8))


def at_random(response: str, _: list[Tree]) -> float:
    """From the response's hash."""
    return float(hashlib.sha256(response.encode()).digest()[0] % 10)


@dataclass
class JudgeService:
    """Answers with 1 + quality on a scale, with the better response of two, and with `met` for criteria whose last word is in the response.

    favours: position that wins each comparison. takes_schema: whether `response_format` is accepted.
    asked: model and question -> how often it was answered. requests: bodies in order of arrival. says: text around the answer's object.
    """

    quality: Quality = by_plus
    favours: str | None = None
    misbehave: Misbehaviour | None = None
    takes_schema: bool = True
    seconds: float = 0.0
    says: str = "{}"
    usage: bool = True
    model: str = "rule-1"
    url: str = ""
    asked: Counter[str] = field(default_factory=Counter)
    requests: list[Tree] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        tree = json.loads(await request.read())
        self.requests.append(tree)
        if self.misbehave is not None and (answer := await self.misbehave(self, request, tree)) is not None:
            return answer
        if "response_format" in tree and not self.takes_schema:
            return web.json_response({"error": "response_format isn't known"}, status=400)
        await asyncio.sleep(self.seconds)
        self.asked[json.dumps([tree["model"], tree["messages"], tree["seed"]])] += 1
        return web.json_response(self.completion(self.says.replace("{}", json.dumps({"reason": "By the rule.", **self.verdict(tree)}))))

    def completion(self, text: str | None, *, ended: str = "stop", **message: Any) -> Tree:
        choice = {"index": 0, "finish_reason": ended, "message": {"role": "assistant", "content": text, **message}}
        usage = {"usage": {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}} if self.usage else {}
        return {"object": "chat.completion", "model": self.model, "choices": [choice], **usage}

    def verdict(self, request: Tree) -> Tree:
        data = data_of(request)
        if "responses" in data:
            first, second = (self.quality(data["responses"][name], data["conversation"]) for name in ("1", "2"))
            return {"better": self.favours or ("tie" if first == second else "1" if first > second else "2")}
        schema = request.get("response_format", {}).get("json_schema", {}).get("schema", {}).get("properties", {})
        if "met" in schema or "criteria" in data:
            criteria = data.get("criteria") or dict(
                line.split(". ", 1) for line in request["messages"][0]["content"].splitlines() if line[:1].isdigit()
            )
            return {"met": {name: text.split()[-1] in data["response"] for name, text in criteria.items()}}
        return {"score": 1 + self.quality(data["response"], data["conversation"])}


@contextmanager
def judging(**settings: Any) -> Iterator[JudgeService]:
    service = JudgeService(**settings)

    def app() -> web.Application:
        made = web.Application(client_max_size=32 * 2**20)
        made.router.add_post("/v1/chat/completions", service.answer)
        return made

    with running(app) as address:
        service.url = f"{address}/v1"
        yield service
