"""A language model at an OpenAI-compatible address, by transformers: log-probabilities of prompts, written as vLLM writes them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from score_service import running
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import TeacherService
from rlhf_core.models.build import load_language_model

Tree = dict[str, Any]
Misbehaviour = Callable[["Teacher", web.Request, Tree], Awaitable[web.StreamResponse | None]]  # None: answer as usual


@dataclass
class Teacher:
    """misbehave: is asked first, for each request. requests: bodies in order of arrival."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    misbehave: Misbehaviour | None = None
    url: str = ""
    requests: list[Tree] = field(default_factory=list)

    @property
    def service(self) -> dict[str, Any]:
        """The keys of params.yaml."""
        return {"url": self.url, "model": "teacher", "retries": 1, "timeout": 20.0}

    @property
    def config(self) -> TeacherService:
        return TeacherService(**self.service)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        tree = json.loads(await request.read())
        self.requests.append(tree)
        if self.misbehave is not None and (answer := await self.misbehave(self, request, tree)) is not None:
            return answer
        return web.json_response(self.completion(tree))

    @torch.no_grad()
    def completion(self, tree: Tree) -> Tree:
        ids = tree["prompt"]
        if isinstance(ids, str):
            ids = self.tokenizer(ids, add_special_tokens=tree["add_special_tokens"])["input_ids"]
        logprobs = self.model(torch.tensor([ids])).logits[0].log_softmax(-1)
        places = [None, *(place(logprobs[n], token, tree["prompt_logprobs"]) for n, token in enumerate(ids[1:]))]
        choice = {"text": " the", "finish_reason": "length", "prompt_logprobs": places}
        return {"choices": [choice | ({"prompt_token_ids": ids} if tree.get("return_token_ids") else {})]}


def place(logprobs: torch.Tensor, token: int, top: int) -> Tree:
    """The given token and the likeliest ones, with their ranks."""
    ranks = logprobs.argsort(descending=True).argsort() + 1
    wanted = dict.fromkeys([token, *logprobs.topk(top).indices.tolist()])
    return {str(t): {"logprob": float(logprobs[t]), "rank": int(ranks[t]), "decoded_token": ""} for t in wanted}


@contextmanager
def teaching(folder: Path, tokenizer: PreTrainedTokenizerBase, **settings: Any) -> Iterator[Teacher]:
    teacher = Teacher(load_language_model(folder), tokenizer, **settings)
    with running(lambda: _app(teacher)) as address:
        teacher.url = f"{address}/v1"
        yield teacher


def _app(teacher: Teacher) -> web.Application:
    app = web.Application()
    app.router.add_post("/v1/completions", teacher.answer)
    return app
