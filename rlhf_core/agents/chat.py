"""What a user's `play` gets: the task, the policy, and the conversation with it.

async def play(task, policy):
    chat = policy.chat(task.messages, tools=[add])
    for _ in range(task.max_turns):
        reply = await chat.generate()
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            chat.tool(call, await call.run())
    return float(reply.text == task.label)
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.tools import OutsideTool, Tool, ToolCall, parse_calls
from rlhf_core.agents.turns import check_turns, ids_behind_reply, prompt_ids
from rlhf_core.data.schema import Message, joined_parts, whole_message
from rlhf_core.models.pieces import token_pieces
from rlhf_core.models.response_ids import response_text
from rlhf_core.types import Dialogue, Prompt, Rollout, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Task:
    """A prompt's row, to be played. metadata: id and source of the prompt.    max_turns: of rl.environment."""

    messages: list[dict[str, Any]]
    label: str | None
    metadata: dict[str, Any]
    max_turns: int

    @classmethod
    def of(cls, prompt: Prompt, *, max_turns: int) -> Task:
        messages = [whole_message(message) for message in prompt.messages]
        return cls(messages, prompt.label, {"id": prompt.id, "source": prompt.source}, max_turns)


@dataclass(frozen=True)
class Reply:
    """What the model wrote in a turn.

    text: without its end token. tool_calls: of the tools that the chat was given; empty for plain text.
    finished: False: it was cut off, because the episode's tokens are used up; no further reply follows.
    """

    text: str
    tool_calls: list[ToolCall]
    finished: bool


@dataclass(frozen=True)
class Limits:
    """rl.environment's and the rollout's limits of an episode.

    max_new_tokens: tokens after the first prompt, with those of tools and users.    max_length: with the prompt.
    tool_timeout: seconds of a tool's call.
    """

    max_new_tokens: int
    max_length: int
    max_turns: int
    tool_timeout: float


@dataclass(frozen=True)
class Sampled:
    """A reply's tokens. spans: of each policy that sampled some.    finished: False: cut off."""

    spans: list[Span]
    finished: bool


Sampler = Callable[[Rollout, int], Awaitable[Sampled]]  # the episode so far, and how many tokens may follow


class Policy:
    """The policy in one episode.

    Args:
        sample: samples replies.    stops: ids that end a reply.
    """

    def __init__(
        self,
        prompt: Prompt,
        tokenizer: PreTrainedTokenizerBase,
        sample: Sampler,
        limits: Limits,
        *,
        stops: Collection[int],
    ):
        self._prompt, self._tokenizer, self._sample, self._limits, self._stops = prompt, tokenizer, sample, limits, stops
        self.played: Chat | None = None

    def chat(self, messages: Sequence[dict[str, Any]], tools: Sequence[Callable[..., Any] | OutsideTool] = ()) -> Chat:
        """Begin the episode's conversation.

        Args:
            messages: `{"role", "content"}`, up to a message of the user.
            tools: functions whose arguments have types, or tools of another process.
        Raises:
            RuntimeError: the episode has a conversation already.
            ValueError: the chat template doesn't support it, or it leaves no room for a reply.
        """
        if self.played is not None:
            raise RuntimeError("policy.chat: expected one conversation an episode, got a second one; continue the first with chat.user")
        found = {tool.name: tool for tool in (t if isinstance(t, OutsideTool) else Tool(t) for t in tools)}
        check_turns(self._tokenizer, [tool.schema for tool in found.values()])
        self.played = Chat(self._prompt, [_canonical(m) for m in messages], found, self._tokenizer, self._sample, self._limits, self._stops)
        return self.played


class Chat:
    """A conversation with the policy: tokens in, tokens out."""

    def __init__(
        self,
        prompt: Prompt,
        messages: list[Message],
        tools: dict[str, Tool | OutsideTool],
        tokenizer: PreTrainedTokenizerBase,
        sample: Sampler,
        limits: Limits,
        stops: Collection[int],
    ):
        self._tokenizer, self._sample, self._limits, self._stops = tokenizer, sample, limits, stops
        self._tools, self._schemas = tools, [tool.schema for tool in tools.values()]
        self._prompt = replace(prompt, prompt_ids=prompt_ids(tokenizer, messages, self._schemas))
        self._room = min(limits.max_new_tokens, limits.max_length - len(self._prompt.prompt_ids))
        if self._room < 1:
            raise ValueError(
                f"policy.chat: expected fewer than model.max_length={limits.max_length} tokens before the first reply, got "
                f"{len(self._prompt.prompt_ids)}; raise it, or shorten messages and tools"
            )
        self._messages, self._replies = list(messages), list[int]()  # positions of the replies
        self._spans: list[Span] = []
        self._reward: float | None = None
        self._rewards: list[float] = []  # of each reply
        self._calls = self._failed_calls = 0
        self._start = 0  # number of tokens before the last reply
        self._waits, self._cut_off = False, False

    async def generate(self, *, learn: bool = True, limit: int | None = None) -> Reply:
        """Return the policy's next reply.

        If no token is left for it, the reply is empty and not finished.

        Args:
            learn: False: its tokens are not trained on.
            limit: tokens of the reply, in addition to the limits of the episode.
        Raises:
            RuntimeError: nothing was put in since the last reply, that reply wasn't finished, or another reply is being generated.
        """
        if self._waits:
            raise RuntimeError("chat.generate: expected one reply at a time, got a call while another waits; await it first")
        if self._cut_off:
            raise RuntimeError("chat.generate: expected tokens that are left, got none; end play where reply.finished is False")
        if self._replies and self._replies[-1] == len(self._messages) - 1:
            raise RuntimeError("chat.generate: expected a message since the last reply, got none; call chat.user or chat.tool first")
        added = self._ids_put_in()
        room = self._room - len(self._ids) - len(added)
        if room < 1:
            self._cut_off = True
            return Reply("", [], False)
        so_far = Rollout(self._prompt, [*self._spans, *put_in(added)], False, group_id=0)
        self._waits = True
        sampled = await self._sample(so_far, room if limit is None else min(room, limit))
        self._waits = False
        return self._take(so_far, sampled, learn=learn)

    def tool(self, call: ToolCall, result: str) -> None:
        """Put in a tool's result."""
        self._calls, self._failed_calls = self._calls + 1, self._failed_calls + bool(call.failed)
        self._put_in({"role": "tool", "content": result, "extra": json.dumps({"name": call.name})})

    def user(self, text: str) -> None:
        """Put in a message of the user."""
        self._put_in({"role": "user", "content": text})

    def reward(self, value: float, *, reply: int = -1) -> None:
        """Add to the episode's score. With rl.environment.credit `turn` it belongs to a reply, and to those before.

        Args:
            reply: number of the reply, from 0 on; -1: the last one.
        """
        if not math.isfinite(value):
            raise ValueError(f"chat.reward: expected a finite number, got {value}; leave it out")
        self._reward = (self._reward or 0.0) + value
        if self._rewards:
            self._rewards[reply] += value

    def rollout(self, returned: float | None, *, failed: bool, group_id: int) -> Rollout | None:
        """Return the episode as a rollout; None without a reply.

        Args:
            returned: by `play`.    failed: it ended with an error.
        """
        if not self._spans:
            return None
        last, score = self._replies[-1], self._reward if returned is None else float(returned) + (self._reward or 0.0)
        sampled = [span.version is not None for span in self._spans for _ in span.ids]
        counts = {"turns": len(self._replies), "calls": self._calls, "failed_calls": self._failed_calls}
        dialogue = Dialogue(self._messages[:last], self._replies[0], sampled, self._start, score, self._rewards, failed, **counts)
        return Rollout(self._prompt, self._spans, not self._cut_off, group_id, dialogue)

    @property
    def usage(self) -> tuple[int, int]:
        """The number of tokens before the last reply, and of that reply."""
        return len(self._prompt.prompt_ids) + self._start, len(self._ids) - self._start

    def tokens(self, reply: int) -> list[tuple[str, float]]:
        """Return text and log-probability of each token of a reply; none of one that had no token left.

        Args:
            reply: number of the reply, from 0 on.
        """
        before, number = list(self._prompt.prompt_ids), 0
        for was_sampled, group in groupby(self._spans, key=lambda span: span.version is not None):
            spans = list(group)
            ids = [token for span in spans for token in span.ids]
            if was_sampled and number == reply:
                logprobs = [logprob for span in spans for logprob in span.logprobs]
                return list(zip(token_pieces(self._tokenizer, before, ids), logprobs, strict=True))
            before, number = before + ids, number + was_sampled
        return []

    @property
    def num_replies(self) -> int:
        return len(self._replies)

    @property
    def _ids(self) -> list[int]:
        return [token for span in self._spans for token in span.ids]

    def _put_in(self, message: Message) -> None:
        if not self._replies:
            raise RuntimeError("chat: expected messages before the first reply in policy.chat, got one later; give it there")
        if not isinstance(message["content"], str):
            raise TypeError(f"chat: expected a message's text, got {type(message['content']).__name__}; convert it")
        self._messages.append(message)

    def _ids_put_in(self) -> list[int]:
        """Return the ids that follow the last reply, up to the next generation prompt."""
        if not self._replies:
            return []
        return ids_behind_reply(self._tokenizer, self._messages, self._replies, self._spans[-1].ids[-1], tools=self._schemas)

    def _take(self, so_far: Rollout, sampled: Sampled, *, learn: bool) -> Reply:
        before, ids = so_far.ids, [token for span in sampled.spans for token in span.ids]
        self._start = so_far.num_tokens
        self._spans = [*so_far.spans, *(replace(span, trained=learn) for span in sampled.spans)]
        if sampled.finished and ids[-1] in self._stops:
            ids = ids[:-1]
        self._cut_off = not sampled.finished
        text = response_text(self._tokenizer, before, ids)
        self._replies.append(len(self._messages))
        self._rewards.append(0.0)
        self._messages.append({"role": "assistant", "content": text})
        calls = parse_calls(response_text(self._tokenizer, before, ids, special=True)) if self._tools and sampled.finished else []
        return Reply(text, [ToolCall(n, a, None, self._tools, self._limits.tool_timeout) for n, a in calls], sampled.finished)


def put_in(ids: list[int]) -> list[Span]:
    """Return the span of tokens that weren't sampled; none without tokens."""
    return [Span(ids, [0.0] * len(ids), None, trained=False)] if ids else []


def _canonical(message: dict[str, Any]) -> Message:
    """Return a message as rows of data have it, from one as chat templates take it: the inverse of `whole_message`."""
    content, more = message["content"], {key: value for key, value in message.items() if key not in ("role", "content")}
    if not isinstance(content, str):
        content, more = joined_parts(content), {**more, "content": content}
    found: Message = {"role": message["role"], "content": content}
    if more:
        found["extra"] = json.dumps(more, ensure_ascii=False)
    return found
