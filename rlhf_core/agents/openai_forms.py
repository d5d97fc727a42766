"""Requests and answers of OpenAI's chat completions: what the endpoint takes, what it leaves to the run, and what it refuses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from rlhf_core.agents.chat import Reply
from rlhf_core.agents.tools import without_calls
from rlhf_core.config import shown
from rlhf_core.data.schema import joined_parts

MODEL = "policy"  # the only one; a request may name any
REPLY_ID = "chatcmpl-"  # with the reply's number in its episode, from 1 on
# Left to the run: how tokens are sampled (greedily in an evaluation), so that what is trained on was sampled as params say.
OF_THE_RUN = frozenset(("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty"))
# What doesn't concern the reply's text.
WITHOUT_EFFECT = frozenset(("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"))
# The only value of what the endpoint doesn't have, which clients may send.
ONLY: dict[str, Any] = {
    "n": 1,
    "stop": [],
    "top_logprobs": 0,
    "logit_bias": {},
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}

Said = dict[str, Any]  # a message as conversations are compared by


class Refused(Exception):
    """A request that the endpoint can't answer.

    code: as in OpenAI's errors.
    """

    def __init__(self, reason: str, *, status: int = 400, code: str | None = None):
        super().__init__(reason)
        self.status, self.code = status, code

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "type": "invalid_request_error", "param": None, "code": self.code}}


class _Form(BaseModel):
    model_config = ConfigDict(frozen=True)


class TextPart(_Form):
    type: Literal["text"]
    text: str


class CalledFunction(_Form):
    name: str
    arguments: str


class CallForm(_Form):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class MessageForm(_Form):
    """A message of a request; further keys, such as those of answers that a client sends back, are left out.

    tools: of the conversation, as the data have them: a task's first message has them where its prompt has tools.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[CallForm] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def text(self) -> str:
        parts = self.content or ""
        return parts if isinstance(parts, str) else joined_parts([part.model_dump() for part in parts])

    @property
    def said(self) -> Said:
        """The message without what clients write in several ways."""
        calls = [(call.id, call.function.name, _parsed(call.function.arguments)) for call in self.tool_calls or []]
        return {"role": self.role, "content": self.text, "tool_calls": calls, "tool_call_id": self.tool_call_id}

    @property
    def for_template(self) -> dict[str, Any]:
        """The message as chat templates take it: a developer is the system, and arguments of calls are objects."""
        found = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            found["tool_calls"] = [
                {"id": c.id, "type": c.type, "function": {"name": c.function.name, "arguments": _parsed(c.function.arguments)}}
                for c in self.tool_calls
            ]
        return found | {key: value for key in ("tool_call_id", "name") if (value := getattr(self, key)) is not None}


class FunctionForm(_Form):
    name: str


class ToolForm(_Form):
    type: Literal["function"]
    function: FunctionForm


def _as_sent(tool: dict[str, Any]) -> dict[str, Any]:
    """Return the JSON schema with its keys in the order in which templates write them."""
    ToolForm.model_validate(tool)
    return tool


class StreamOptions(BaseModel):
    include_usage: bool | None = None


class ChatRequest(BaseModel):
    """The body of a request for the next reply. `learn` isn't OpenAI's."""

    model_config = ConfigDict(extra="allow")
    model: str = MODEL
    messages: list[MessageForm] = Field(min_length=1)
    tools: list[Annotated[dict[str, Any], AfterValidator(_as_sent)]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logprobs: bool | None = None
    learn: bool | None = None  # False: the reply isn't trained on

    @model_validator(mode="after")
    def _known(self) -> ChatRequest:
        for name, value in (self.model_extra or {}).items():
            if value is None or name in OF_THE_RUN or name in WITHOUT_EFFECT:
                continue
            if name not in ONLY:
                raise ValueError(f"{name}: expected no such parameter, got {shown(json.dumps(value))}; the endpoint doesn't have it")
            if value != ONLY[name]:
                raise ValueError(
                    f"{name}: expected {json.dumps(ONLY[name])}, got {shown(json.dumps(value))}; the endpoint has no other, leave it out"
                )
        return self

    @property
    def limit(self) -> int | None:
        """Tokens of the reply."""
        return min((n for n in (self.max_tokens, self.max_completion_tokens) if n is not None), default=None)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' JSON schemas, as they were sent; without any, those of the first message that has some."""
        given = next((message.tools for message in self.messages if message.tools), [])
        return self.tools or [tool if "function" in tool else {"type": "function", "function": tool} for tool in given]

    @property
    def ignored(self) -> list[str]:
        """Parameters that are left to the run."""
        return sorted(name for name, value in (self.model_extra or {}).items() if name in OF_THE_RUN and value is not None)


def answer_of(reply: Reply, *, turn: int, usage: tuple[int, int]) -> dict[str, Any]:
    """Return a reply as OpenAI's chat completion.

    Args:
        turn: number of the reply in its episode, from 1 on.    usage: tokens before the reply, and of it.
    """
    calls = [
        {"id": f"call_{turn}_{i}", "type": "function", "function": {"name": c.name, "arguments": json.dumps(c.arguments)}}
        for i, c in enumerate(reply.tool_calls)
    ]
    text = without_calls(reply.text) if calls else reply.text
    message = {"role": "assistant", "content": text or (None if calls else ""), "refusal": None}
    reason = "length" if not reply.finished else "tool_calls" if calls else "stop"
    return {
        "id": f"{REPLY_ID}{turn}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": MODEL,
        "choices": [{"index": 0, "message": message | ({"tool_calls": calls} if calls else {}), "logprobs": None, "finish_reason": reason}],
        "usage": {"prompt_tokens": usage[0], "completion_tokens": usage[1], "total_tokens": sum(usage)},
    }


def with_logprobs(answer: dict[str, Any], tokens: Sequence[tuple[str, float]]) -> dict[str, Any]:
    """Return an answer that also has the text and log-probability of each token."""
    (choice,) = answer["choices"]
    content = [{"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []} for text, logprob in tokens]
    return {**answer, "choices": [{**choice, "logprobs": {"content": content, "refusal": None}}]}


def chunks_of(answer: dict[str, Any], *, with_usage: bool) -> Iterator[dict[str, Any]]:
    """A finished reply as the chunks of a stream."""
    (choice,) = answer["choices"]
    message, empty = choice["message"], {"index": 0, "logprobs": None, "finish_reason": None}
    deltas = [{"role": "assistant", "content": ""}]
    deltas += [{"content": message["content"]}] if message["content"] else []
    deltas += [{"tool_calls": [{"index": i, **call}]} for i, call in enumerate(message.get("tool_calls", []))]
    own = {**answer, "object": "chat.completion.chunk", "usage": None}
    for i, delta in enumerate(deltas):
        logprobs = choice["logprobs"] if i == len(deltas) - 1 else None  # once, for readers add them up
        yield {**own, "choices": [{**empty, "delta": delta, "logprobs": logprobs}]}
    yield {**own, "choices": [{**empty, "delta": {}, "finish_reason": choice["finish_reason"]}]}
    if with_usage:
        yield {**own, "choices": [], "usage": answer["usage"]}


def _parsed(arguments: str) -> Any:
    """Return a call's arguments; the text itself where it isn't JSON."""
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments
