"""Plays the episodes of many rollouts at the same time.

Coroutines run in an event loop of a thread of their own, the engines are called from the caller's thread. When no episode can go on without
a reply, all replies that episodes wait for are sampled as one batch, in the order of the rollouts. So results don't depend on how long
tools take, and each reply has a seed of its own rollout's seed and the number of tokens so far.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.chat import Limits, Policy, Task
from rlhf_core.agents.outside import Outside, try_command
from rlhf_core.agents.session import AgentFailed
from rlhf_core.agents.tools import Tool
from rlhf_core.agents.turns import check_turns
from rlhf_core.config import EnvironmentConfig, ModelConfig, number_of, shown
from rlhf_core.data.functions import load_function
from rlhf_core.engines.rollout.requests import Sample, SamplingSettings, segment_seed
from rlhf_core.environment import hint
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.types import Prompt, Rollout

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
    """The function of rl.environment, and the tools that params name.

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
class _Request:
    """A reply that an episode waits for. number: of its rollout.    room: tokens that it may have."""

    number: int
    ids: list[int]
    room: int
    reply: asyncio.Future[Sample]


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

    def _look(self) -> None:
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
        """An episode for each seed, `copies` of each prompt; they are adjacent, and so are their seeds.

        Args:
            settings: max_new_tokens is of a whole episode, with what tools and users put in.
            generate: samples replies; called from this thread.
        Raises:
            ValueError: `play` fails before the first reply, or returns a score that no scorer takes.
            TimeoutError: an episode neither ends nor asks for a reply.
        """
        limits = Limits(settings.max_new_tokens, self._max_length, self._config.max_turns, self._config.tool_timeout)
        episodes = _Episodes(self._loop, len(seeds), at_once=self._config.at_once)
        plays = [self._one(prompts[i // copies], i, limits, episodes) for i in range(len(seeds))]
        started = [asyncio.run_coroutine_threadsafe(play, self._loop) for play in plays]
        try:
            while batch := episodes.next(self._deadline, self._look):
                longest = replace(settings, max_new_tokens=max(request.room for request in batch))
                given = [segment_seed(seeds[request.number], len(request.ids)) for request in batch]
                samples = generate([request.ids for request in batch], given, longest)
                episodes.deliver(batch, [_cut(sample, request.room) for request, sample in zip(batch, samples, strict=True)])
            self._look()  # where all episodes have ended because of what has ended
            ended = [future.result(timeout=self._deadline) for future in started]
        finally:
            for future in started:
                future.cancel()
        return [self._rollout(policy, outcome, i // copies) for i, (policy, outcome) in enumerate(ended)]

    async def _one(self, prompt: Prompt, number: int, limits: Limits, episodes: _Episodes) -> tuple[Policy, float | Exception | None]:
        """The policy of an ended episode, and what `play` returned or raised."""
        task = Task.of(prompt, max_turns=limits.max_turns)
        policy = Policy(prompt, self._tokenizer, lambda ids, room: episodes.ask(number, ids, room), limits, stops=self._stops)
        async with episodes.slots:
            try:
                return policy, _number(await self._play(task, policy))
            except Exception as error:  # a user's code may raise anything
                return policy, error
            finally:
                episodes.end(number)

    def _rollout(self, policy: Policy, outcome: float | Exception | None, group_id: int) -> Rollout:
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


class _Episodes:
    """The episodes of one call, between the event loop's thread and the caller's.

    Args:
        at_once: episodes in play at the same time; when one ends, the next one in order starts. None: all.

    slots: of episodes in play.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, count: int, *, at_once: int | None):
        self._loop, self._playing = loop, min(count, at_once or count)
        self._later, self.slots = count - self._playing, asyncio.Semaphore(at_once or count or 1)
        self._waiting: list[_Request] = []
        self._ended: set[int] = set()
        self._batches: queue.SimpleQueue[list[_Request]] = queue.SimpleQueue()

    # In the event loop

    async def ask(self, number: int, ids: list[int], room: int) -> Sample:
        request = _Request(number, ids, room, self._loop.create_future())
        self._waiting.append(request)
        self._hand_over()
        return await request.reply

    def end(self, number: int) -> None:
        """An episode has ended; nobody waits for a reply that it may still have asked for."""
        if self._later:
            self._later -= 1  # the next one takes its place
        else:
            self._playing -= 1
        self._ended.add(number)
        self._waiting = [request for request in self._waiting if request.number != number]
        self._hand_over()

    def _hand_over(self) -> None:
        """Hand over the requests once every episode in play waits for a reply; none once all have ended."""
        if len(self._waiting) == self._playing:
            batch, self._waiting = sorted(self._waiting, key=lambda request: request.number), []
            self._batches.put(batch)

    # In the caller's thread

    def next(self, deadline: float, look: Callable[[], None]) -> list[_Request]:
        """The next batch in the order of the rollouts; empty once all episodes have ended.

        Args:
            look: called every LOOK_SECONDS; raises an error that ends the wait.
        Raises:
            TimeoutError: an episode neither ends nor asks.
        """
        until = time.monotonic() + deadline
        while (left := until - time.monotonic()) > 0:
            look()
            with suppress(queue.Empty):
                return self._batches.get(timeout=min(left, LOOK_SECONDS))
        busy = number_of(self._playing - len(self._waiting), "episode")
        raise TimeoutError(
            f"rl.environment: expected each episode to ask for a reply or to end within rl.deadlines.step={deadline:g} s, got {busy} "
            "that didn't; give what play awaits a timeout, and let it block nothing"
        )

    def deliver(self, batch: list[_Request], samples: list[Sample]) -> None:
        def settle() -> None:
            for request, sample in zip(batch, samples, strict=True):
                if request.number not in self._ended and not request.reply.done():
                    request.reply.set_result(sample)

        self._loop.call_soon_threadsafe(settle)


def _cut(sample: Sample, room: int) -> Sample:
    """The sample's first tokens. Each token depends on those before it only, so a longer limit of the batch changes none of them."""
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
