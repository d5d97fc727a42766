"""An episode as an agent outside of this process plays it: its requests continue the one conversation, and are answered once.

A request holds the whole conversation. What was answered stays as it was sampled; only the messages after the last reply are put in.
A request that came before gets its recorded answer, so an agent may repeat one, and another process may take the episode over.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from rlhf_core.agents.chat import Policy, Task
from rlhf_core.agents.openai_forms import REPLY_ID, ChatRequest, MessageForm, Refused, Said, answer_of, with_logprobs
from rlhf_core.agents.tools import OutsideTool, ToolCall
from rlhf_core.config import shown

Answer = dict[str, Any]
Value = TypeVar("Value")


class AgentFailed(Exception):
    """An agent didn't play its episode to the end: the episode has no score.

    Args:
        lines: the last of its error output.

    asked: it had asked for a reply.
    """

    def __init__(self, reason: str, lines: Sequence[str] = ()):
        super().__init__(reason)
        self._lines, self.asked = lines, False

    @property
    def told(self) -> str:
        """The reason, and the lines."""
        return f"{self}; its error output ends with:\n" + "\n".join(f"    {line}" for line in self._lines) if self._lines else str(self)


class Session:
    """An episode of an agent outside.

    Args:
        timeout: seconds in which the agent must ask for its next reply, or end.

    ended: what the agent said of its end: the score, or AgentFailed.
    claims: processes that have claimed it.
    """

    def __init__(self, task: Task, policy: Policy, *, timeout: float):
        self.task, self._policy, self._timeout, self.claims = task, policy, timeout, 0
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[float | None] = self._loop.create_future()
        self._silent: asyncio.Future[None] = self._loop.create_future()
        self._said: list[Said] = []  # the conversation so far
        self._answers: dict[int, asyncio.Task[Answer]] = {}  # by the number of messages before the reply
        self._schemas: list[dict[str, Any]] = []
        self._calls: dict[str, ToolCall] = {}
        self._rewards: dict[str, float] = {}  # by the reply's id
        self._wait_for_agent()

    @property
    def task_tree(self) -> dict[str, Any]:
        """The task as processes get it, in JSON."""
        return asdict(self.task)

    @property
    def asked(self) -> bool:
        """Whether the agent has begun the conversation."""
        return bool(self._answers)

    @property
    def is_silent(self) -> bool:
        """Whether the agent was silent for too long."""
        return self._silent.done()

    def end(self, outcome: float | AgentFailed | None) -> None:
        """Note how the agent says that the episode ended; the first time counts."""
        if self.ended.done():
            return
        if isinstance(outcome, AgentFailed):
            self.ended.set_exception(outcome)
        else:
            self.ended.set_result(outcome)

    def close(self) -> None:
        """Nobody waits for the agent any more, nor for a reply that it may have asked for."""
        self._alarm.cancel()
        for task in self._answers.values():
            task.cancel()
        if self.ended.done():
            self.ended.exception()  # as in `_continue`

    async def answer(self, request: ChatRequest) -> Answer:
        """Return the next reply, or the recorded one.

        Raises:
            Refused: the request doesn't continue the conversation.
        """
        said = [message.said for message in request.messages]
        known = len(self._said)
        for i, (before, now) in enumerate(zip(self._said, said, strict=False)):
            if before != now:
                raise Refused(_rewritten(i, before, now))
        if self._said and request.schemas != self._schemas:
            raise Refused("tools: expected those of the conversation's first request, got others; send the same in each request")
        if len(said) not in self._answers:
            if len(said) <= known:
                raise Refused(f"messages: expected the whole conversation of {known} messages and a new one, got {len(said)}; append to it")
            self._continue(request, request.messages[known:])
        number = list(self._answers).index(len(said))
        answer = await asyncio.shield(self._answers[len(said)])  # it goes on if this request's connection is lost
        return with_logprobs(answer, self._policy.played.tokens(number)) if request.logprobs else answer

    def reward(self, reply: str, value: float) -> None:
        """Set the reward of a reply; the same again changes nothing, since a request may be repeated.

        Args:
            reply: id of its answer.
        Raises:
            Refused: there is no such reply, or the reward isn't finite.
        """
        known = [f"{REPLY_ID}{i + 1}" for i in range(self._policy.played.num_replies if self._policy.played else 0)]
        if reply not in known:
            raise Refused(f"id: expected that of an answer, got {shown(reply)}; there were {known}")
        if not math.isfinite(value):
            raise Refused(f"reward: expected a finite number, got {value}")
        self._policy.played.reward(value - self._rewards.get(reply, 0.0), reply=known.index(reply))
        self._rewards[reply] = value

    async def within_timeout(self, work: Awaitable[Value]) -> Value:
        """Return the result of `work`, while the agent isn't silent for too long.

        Raises:
            AgentFailed: it is.
        """
        running = asyncio.ensure_future(work)
        try:
            await asyncio.wait({running, self._silent}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                raise AgentFailed(f"silent for rl.environment.agent_timeout={self._timeout:g} s")
            return running.result()
        finally:
            running.cancel()

    async def settle(self) -> None:
        """Await the reply under way; without any, a reply to the task itself, which a rollout has at least."""
        self._alarm.cancel()
        if self._answers:
            await asyncio.wait(self._answers.values())
        else:
            await self._policy.chat(self.task.messages).generate()

    def _wait_for_agent(self) -> None:
        self._alarm = self._loop.call_later(self._timeout, lambda: self._silent.done() or self._silent.set_result(None))

    def _continue(self, request: ChatRequest, messages: Sequence[MessageForm]) -> None:
        """Put in the new messages, and begin to sample the reply to them."""
        if any(not task.done() for task in self._answers.values()):
            raise Refused("messages: expected one request at a time for an episode, got another while one waits; await its answer first")
        if self._said:
            for message in messages:
                self._check(message)
            for message in messages:
                self._put_in(message)
        else:
            self._begin(request)
        self._said += [message.said for message in messages]
        self._answers[len(self._said)] = task = self._loop.create_task(self._reply(request))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # else Python logs one that nobody has taken

    def _begin(self, request: ChatRequest) -> None:
        try:
            self._policy.chat([m.for_template for m in request.messages], tools=[OutsideTool(schema) for schema in request.schemas])
        except ValueError as error:  # the template doesn't take it, or it leaves no room for a reply
            raise Refused(str(error), code="context_length_exceeded" if "model.max_length" in str(error) else None) from error
        self._schemas = request.schemas

    def _check(self, message: MessageForm) -> None:
        if message.role not in ("user", "tool"):
            raise Refused(f"messages: expected messages of user or tool behind a reply, got one of {message.role}; leave it out")
        if message.role == "tool" and message.tool_call_id not in self._calls:
            raise Refused(
                f"messages: expected the tool_call_id of a call, got {shown(str(message.tool_call_id))}; there were {list(self._calls)}"
            )

    def _put_in(self, message: MessageForm) -> None:
        if message.role == "user":
            self._policy.played.user(message.text)
            return
        call = self._calls[message.tool_call_id]
        call.failed = message.text.startswith("error: ")
        self._policy.played.tool(call, message.text)

    async def _reply(self, request: ChatRequest) -> Answer:
        """
        Raises:
            Refused: no token is left, or the template doesn't take the conversation.
        """
        self._alarm.cancel()
        chat = self._policy.played
        try:
            reply = await chat.generate(learn=request.learn is not False, limit=request.limit)
        except (RuntimeError, ValueError) as error:
            raise Refused(str(error), code="context_length_exceeded") from error
        finally:
            self._wait_for_agent()
        answer = answer_of(reply, turn=len(self._answers), usage=chat.usage)
        message = MessageForm.model_validate(answer["choices"][0]["message"])
        self._calls |= {call.id: own for call, own in zip(message.tool_calls or [], reply.tool_calls, strict=True)}
        self._said.append(message.said)
        return answer


def _rewritten(number: int, before: Said, now: Said) -> str:
    key = next(key for key in before if before[key] != now[key])
    return (
        f"messages[{number}].{key}: expected the conversation so far unchanged, got {shown(repr(now[key]))} in place of "
        f"{shown(repr(before[key]))}; append to the messages, with each reply as it was"
    )
