"""Plays the episodes of many rollouts at the same time.

Coroutines run in an event loop of a thread of their own, the engines are called from the caller's thread. In `Environment.play`, when no
episode can go on without a reply, all replies that episodes wait for are sampled as one batch, in the order of the rollouts. So results
don't depend on how long tools take, and each reply has a seed of its own rollout's seed and the number of tokens so far.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.chat import Limits, Policy, Sampled, Sampler, Task
from rlhf_core.agents.outside import Outside, try_command
from rlhf_core.agents.session import AgentFailed
from rlhf_core.agents.tools import Tool
from rlhf_core.agents.turns import check_turns
from rlhf_core.config import EnvironmentConfig, ModelConfig, number_of, shown
from rlhf_core.data.functions import load_function
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings, segment_seed
from rlhf_core.environment import hint
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.types import Prompt, Rollout, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLAY_ARGUMENTS = ("task", "policy")
LOOK_SECONDS = 1.0  # between two looks at what plays beside
CLOSE_SECONDS = 20.0  # for agents to end

# Token ids and seeds of requests, and how they are sampled -> a sample of each.
Generate = Callable[[list[list[int]], list[int], SamplingSettings], Sequence[Sample]]
Play = Callable[[Task, Policy], Awaitable[float | None]]

log = logging.getLogger("rlhf")


def load_play(config: EnvironmentConfig) -> tuple[Play, list[Tool]]:
    """Return the function of rl.environment, and the tools that params name.

    Raises:
        ValueError: a function can't be loaded, or isn't what it should be.
    """
    if config.path is not None:
        play = load_function(config.path, PLAY_ARGUMENTS, what="rl.environment.path")
        if not asyncio.iscoroutinefunction(play):
            raise ValueError(f"rl.environment.path {config.path}: expected `async def`, got a function that isn't; write async before it")
        return play, []
    functions = [load_function(path, None, what="rl.environment.tools") for path in config.tools]
    tools = [Tool(function) for function in functions]
    if len({tool.name for tool in tools}) < len(tools):
        raise ValueError(f"rl.environment.tools: expected different names, got {[tool.name for tool in tools]}; rename one")

    async def use_tools(task: Task, policy: Policy) -> None:
        """The model calls tools until it answers, or has no turn left."""
        chat = policy.chat(task.messages, tools=functions)
        for left in reversed(range(task.max_turns)):
            reply = await chat.generate()
            if not (reply.tool_calls and left):
                return
            results = await asyncio.gather(*(call.run() for call in reply.tool_calls))
            for call, result in zip(reply.tool_calls, results, strict=True):
                chat.tool(call, result)

    return use_tools, tools


def check_environment(
    config: EnvironmentConfig, tokenizer_folder: Path, model: ModelConfig, *, row: Mapping[str, Any] | None = None
) -> None:
    """Check what is known before the model: that functions can be loaded, and that the chat template supports several turns.

    Args:
        row: of the prepared prompts, which a command plays once; None: it isn't tried.
    Raises:
        ValueError: they can't, or it doesn't, or the command asks for no reply.
    """
    tokenizer = load_tokenizer(str(tokenizer_folder), trust_remote_code=model.trust_remote_code)
    if not config.command:
        check_turns(tokenizer, [tool.schema for tool in load_play(config)[1]])
        return
    check_turns(tokenizer, [])
    Outside(config)
    if row is not None:
        try_command(config, tokenizer, row, max_length=model.max_length)


@dataclass(frozen=True)
class Asked:
    """A reply that an episode waits for. so_far: the episode before it.    room: tokens that it may have."""

    so_far: Rollout
    room: int


class Environment:
    """The environment of rl.environment, for one model.

    Args:
        stops: ids that end a reply.
        deadline: seconds in which episodes must ask for a reply or end.
        takes_scores: a scorer takes what `play` returns.
    Raises:
        ValueError: `play` or a tool can't be loaded, or the chat template doesn't support several turns.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stops: Collection[int],
        max_length: int,
        deadline: float,
        takes_scores: bool,
    ):
        self._config, self._tokenizer, self._stops, self._max_length = config, tokenizer, stops, max_length
        self._deadline, self._takes_scores = deadline, takes_scores
        self._outside = Outside(config) if config.command else None
        self._play, tools = (self._outside.play, []) if self._outside else load_play(config)
        check_turns(tokenizer, [tool.schema for tool in tools])
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="environment", daemon=True)
        self._thread.start()
        self._said: set[str] = set()

    def close(self) -> None:
        """End the processes of agents."""
        if self._outside and self._thread.is_alive():
            with suppress(TimeoutError):  # they end with this process
                asyncio.run_coroutine_threadsafe(self._outside.close(), self._loop).result(timeout=CLOSE_SECONDS)

    def look(self) -> None:
        """
        Raises:
            RuntimeError: something that plays beside the caller's thread has ended.
        """
        if not self._thread.is_alive():
            raise RuntimeError("rl.environment: expected the thread that plays episodes to go on, got its end; run the stage again")
        if self._outside:
            self._outside.look()

    def play(
        self, prompts: Sequence[Prompt], seeds: Sequence[int], settings: SamplingSettings, generate: Generate, *, copies: int = 1
    ) -> list[Rollout]:
        """Return an episode for each seed, `copies` of each prompt; they are adjacent, and so are their seeds.

        Args:
            settings: max_new_tokens is of a whole episode, with what tools and users put in.
            generate: samples replies; called from this thread.
        Raises:
            ValueError: `play` fails before the first reply, or returns a score that no scorer takes.
            TimeoutError: an episode neither ends nor asks for a reply.
        """
        found: dict[int, Rollout] = {}
        episodes, playing, later = self.begin(settings.max_new_tokens), list[int](), deque(range(len(seeds)))
        try:
            while playing or later:
                while later and len(playing) < (self._config.at_once or len(seeds)):
                    playing.append(i := later.popleft())
                    episodes.start(i, Rollout(prompts[i // copies], [], False, group_id=i // copies))
                asked, ended = episodes.wait(playing)
                found |= ended
                playing = list(asked)
                if not asked or (ended and later):  # the next ones take the places of those that have ended
                    continue
                longest = replace(settings, max_new_tokens=max(one.room for one in asked.values()))
                ids = [one.so_far.ids for one in asked.values()]
                samples = generate(ids, [segment_seed(seeds[i], len(of_one)) for i, of_one in zip(asked, ids, strict=True)], longest)
                cut = {i: _cut(sample, one.room) for (i, one), sample in zip(asked.items(), samples, strict=True)}
                episodes.deliver({i: Sampled([Span(s.response_ids, s.logprobs, s.version)], s.finished) for i, s in cut.items()})
        finally:
            episodes.cancel()
        return [found[i] for i in range(len(seeds))]

    def begin(self, max_new_tokens: int) -> Episodes:
        """Episodes that the caller starts, and cancels in the end.

        Args:
            max_new_tokens: of an episode, with what tools and users put in.
        """
        limits = Limits(max_new_tokens, self._max_length, self._config.max_turns, self._config.tool_timeout)
        return Episodes(self._loop, partial(self._one, limits), self.look, deadline=self._deadline)

    async def _one(self, limits: Limits, begun: Rollout, sample: Sampler) -> Rollout:
        """Return the rollout of a whole episode."""
        prompt = begun.prompt
        task = Task.of(prompt, max_turns=limits.max_turns)
        policy = Policy(prompt, self._tokenizer, sample, limits, stops=self._stops)
        try:
            outcome = _number(await self._play(task, policy))
        except Exception as error:  # a user's code may raise anything
            outcome = error
        return self._ended(policy, outcome, begun.group_id)

    def _ended(self, policy: Policy, outcome: float | Exception | None, group_id: int) -> Rollout:
        """Return the rollout of an episode, by what `play` returned or raised."""
        failed = isinstance(outcome, Exception)
        rollout = policy.played and policy.played.rollout(None if failed else outcome, failed=failed, group_id=group_id)
        if failed:
            self._tell(outcome)
        if rollout is None:
            got = f"{_shown(outcome)}" if failed else "a return"
            raise ValueError(f"{self._subject}: expected a reply of the policy in each episode, got {got} before the first; correct it")
        if rollout.dialogue.score is not None and not self._takes_scores:
            raise ValueError(
                f"{self._subject}: expected None without a scorer that takes its score, got {rollout.dialogue.score:g}; add "
                "{name: environment, kind: environment} to rl.reward.scorers"
            )
        return rollout

    @property
    def _subject(self) -> str:
        return f"rl.environment {self._config.path or self._config.command or self._config.tools}"

    def _tell(self, error: Exception) -> None:
        """Log an error, once for each kind."""
        outside = isinstance(error, AgentFailed)
        if (kind := str(error) if outside else type(error).__name__) not in self._said:
            self._said.add(kind)
            got = error.told if outside else _shown(error)
            log.warning("%s: episodes with an error have no score; expected none, got %s", self._subject, got)


class Episodes:
    """Episodes that are played, by keys of the caller, between the event loop's thread and the caller's.

    Args:
        play: the rollout of an episode, given its beginning and what samples replies.
        look: called every LOOK_SECONDS of a wait; raises an error that ends it.
        deadline: seconds in which an episode must ask for a reply or end.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        play: Callable[[Rollout, Sampler], Awaitable[Rollout]],
        look: Callable[[], None],
        *,
        deadline: float,
    ):
        self._loop, self._play, self._look, self._deadline = loop, play, look, deadline
        self._changed = threading.Condition()
        self._asked: dict[Hashable, tuple[Asked, asyncio.Future[Sampled]]] = {}
        self._ended: dict[Hashable, Rollout | BaseException] = {}
        self._running: dict[Hashable, Future[None]] = {}
        self._since: dict[Hashable, float] = {}  # when an episode began or got its last reply

    # In the caller's thread

    def start(self, key: Hashable, begun: Rollout) -> None:
        """Start an episode.

        Args:
            begun: its prompt. Of an interrupted episode the tokens too: `play` gets its replies again, while it puts in the same.
        """
        self._since[key] = time.monotonic()
        self._running[key] = asyncio.run_coroutine_threadsafe(self._one(key, begun), self._loop)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    def wait(self, keys: Collection[Hashable]) -> tuple[dict[Hashable, Asked], dict[Hashable, Rollout]]:
        """Return the replies that these episodes ask for, and the rollouts of those that have ended instead; both in the order of the keys.

        Raises:
            TimeoutError: an episode neither ends nor asks.
            ValueError: `play` failed before the first reply, or returned a score that no scorer takes.
            RuntimeError: what plays has ended.
        """
        until = time.monotonic() + self._deadline
        while busy := self._wait_for(all, keys, min(LOOK_SECONDS, self._deadline)):
            self._look()
            if time.monotonic() >= until:
                raise self._overdue(len(busy))
        return self._take(keys)

    def poll(self, keys: Collection[Hashable], seconds: float) -> tuple[dict[Hashable, Asked], dict[Hashable, Rollout]]:
        """As `wait`, but returns as soon as one of these episodes asks or has ended, or else after so many seconds."""
        busy, before = self._wait_for(any, keys, seconds), time.monotonic() - self._deadline
        if late := sum(self._since[key] < before for key in busy):
            raise self._overdue(late)
        return self._take(keys)

    def _wait_for(self, enough: Callable[[Iterable[bool]], bool], keys: Collection[Hashable], seconds: float) -> list[Hashable]:
        """Wait at most so long until so many of these episodes ask or have ended. Returns those that don't and haven't."""
        with self._changed:
            self._changed.wait_for(lambda: enough(k in self._ended or k in self._asked for k in keys), seconds)
            return [k for k in keys if k not in self._ended and k not in self._asked]

    def _overdue(self, busy: int) -> TimeoutError:
        return TimeoutError(
            f"rl.environment: expected each episode to ask for a reply or to end within rl.deadlines.step={self._deadline:g} s, "
            f"got {number_of(busy, 'episode')} that didn't; give what play awaits a timeout, and let it block nothing"
        )

    def _take(self, keys: Collection[Hashable]) -> tuple[dict[Hashable, Asked], dict[Hashable, Rollout]]:
        with self._changed:
            ended = {key: self._ended[key] for key in keys if key in self._ended}
            asked = {key: self._asked[key][0] for key in keys if key in self._asked and key not in ended}
        self._look()  # episodes may have ended because of what has ended
        for outcome in ended.values():
            if isinstance(outcome, BaseException):
                raise outcome
        for key in ended:
            del self._ended[key], self._running[key], self._since[key]
        return asked, ended

    def deliver(self, replies: Mapping[Hashable, Sampled]) -> None:
        """Give episodes the replies that they have asked for."""
        with self._changed:
            waiting = [(self._asked.pop(key)[1], reply) for key, reply in replies.items() if key in self._asked]
        self._since |= dict.fromkeys(replies, time.monotonic())

        def settle() -> None:
            for future, reply in waiting:
                if not future.done():
                    future.set_result(reply)

        self._loop.call_soon_threadsafe(settle)

    def cancel(self) -> None:
        """End all episodes."""
        for future in self._running.values():
            future.cancel()

    # In the event loop

    async def _one(self, key: Hashable, begun: Rollout) -> None:
        known = complete_replies(begun)

        async def sample(so_far: Rollout, room: int) -> Sampled:
            if known and known[0][0] == so_far.ids:
                return known.pop(0)[1]
            known.clear()
            asked, reply = Asked(replace(so_far, group_id=begun.group_id), room), self._loop.create_future()
            with self._changed:
                self._asked[key] = asked, reply
                self._changed.notify_all()
            return await reply

        try:
            outcome = await self._play(begun, sample)
        except BaseException as error:  # to be raised in the caller's thread
            outcome = error
        with self._changed:
            self._asked.pop(key, None)  # nobody waits for a reply that it may still have asked for
            self._ended[key] = outcome
            self._changed.notify_all()


def complete_replies(rollout: Rollout) -> list[tuple[list[int], Sampled]]:
    """Return the replies of an interrupted episode, each with all ids before it; without the last one if it was being sampled."""
    found, before = [], list(rollout.prompt.prompt_ids)
    for was_sampled, group in groupby(rollout.spans, key=lambda span: span.version is not None):
        spans = list(group)
        if was_sampled:
            found.append((list(before), Sampled(spans, True)))
        before += [token for span in spans for token in span.ids]
    is_being_sampled = rollout.spans and rollout.spans[-1].version is not None and not rollout.finished
    return found[:-1] if is_being_sampled else found


def _cut(sample: Sample, room: int) -> Sample:
    """Return the sample's first tokens. Each token depends on those before it only, so a longer limit of the batch changes none of them."""
    if len(sample.response_ids) <= room:
        return sample
    return replace(sample, response_ids=sample.response_ids[:room], logprobs=sample.logprobs[:room], finished=False)


def _number(returned: Any) -> float | None:
    if returned is None:
        return None
    if not isinstance(returned, int | float) or not math.isfinite(returned):
        raise TypeError(f"play: expected a finite number or None, got {shown(repr(returned))}; return one")
    return float(returned)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {shown(str(error), 600)}{hint(error)}"
