"""Episodes that a command plays in other processes: a process for each, or processes that claim one after the other.

A process finds the endpoint in OPENAI_BASE_URL and its key in OPENAI_API_KEY. It sees the environment variables that user functions
see, but for secrets that no params name.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.agents.chat import Limits, Policy, Sampled, Task
from rlhf_core.agents.endpoint import Endpoint, Worker
from rlhf_core.agents.process import AgentProcess
from rlhf_core.agents.session import AgentFailed, Session
from rlhf_core.config import EnvironmentConfig, number_of, shown
from rlhf_core.environment import is_listed, named
from rlhf_core.models.tokenizer import encode_prompt, turn_end
from rlhf_core.process import bypass_proxies
from rlhf_core.types import Prompt, Rollout, Span

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MOST_CLAIMS = 2  # of an episode: one whose process ends is claimed again once
OWN = "RAY_"  # of the job's own processes
MOST_STARTS = 3  # in a row of processes that end before they claim an episode

log = logging.getLogger("rlhf")


class Outside:
    """Plays episodes by rl.environment's command.

    Raises:
        ValueError: there is no such program.
    """

    def __init__(self, config: EnvironmentConfig):
        self._config, self._folder = config, Path.cwd()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        seen = [name for name in os.environ if (is_listed(name) and not name.startswith(OWN)) or name in named()]
        self._variables = {name: os.environ[name] for name in seen} | {"PATH": path}
        bypass_proxies(self._variables)
        if shutil.which(config.command[0], path=path) is None:
            raise ValueError(f"{self._subject}: expected a program, got none of the name {config.command[0]}; correct it, or install it")
        self._endpoint: Endpoint | None = None
        self._opened = asyncio.Lock()
        self._keepers: list[asyncio.Task[None]] = []
        self._ends: str | None = None  # why the run ends

    async def play(self, task: Task, policy: Policy) -> float | None:
        """Return an episode's score.

        Raises:
            AgentFailed: the agent didn't play it to the end. It has one reply at least.
        """
        endpoint = await self._open()
        session = Session(task, policy, timeout=self._config.agent_timeout)
        key = endpoint.open(session)
        try:
            score = await (self._by_worker(session, key) if self._config.claims else self._by_process(session, key))
            if not session.asked:
                raise AgentFailed("it ended without a request for a reply")
            return score
        except AgentFailed as error:
            error.asked = session.asked
            await session.settle()
            raise
        finally:
            session.close()
            await endpoint.close_session(key)

    def look(self) -> None:
        """
        Raises:
            RuntimeError: a part that all episodes need has ended.
        """
        if self._endpoint is not None and not self._endpoint.listens:
            self._ends = "its endpoint no longer listens"  # agents end because of it
        if self._ends is not None:
            raise RuntimeError(f"{self._subject}: expected agents to go on; correct what has ended, and run the stage again: {self._ends}")

    async def close(self) -> None:
        """End all processes, and the endpoint."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        if self._endpoint is not None:
            await self._endpoint.close()

    @property
    def _subject(self) -> str:
        return f"rl.environment.command {shown(' '.join(self._config.command))}"

    async def _open(self) -> Endpoint:
        """Return the endpoint. It starts with the first episode, and so do processes that claim."""
        async with self._opened:
            if self._endpoint is None:
                endpoint = Endpoint()
                await endpoint.start()
                self._endpoint = endpoint
                for _ in range(self._config.processes if self._config.claims else 0):
                    self._keepers.append(keeper := asyncio.ensure_future(self._keep_worker()))
                    keeper.add_done_callback(self._keeper_ended)
            return self._endpoint

    def _process(self, key: str, *, given: str = "") -> AgentProcess:
        own = {"OPENAI_BASE_URL": self._endpoint.address, "OPENAI_API_KEY": key}
        more = {"EPISODES_AT_ONCE": str(self._config.claims)} if self._config.claims else {}
        return AgentProcess(self._config.command, self._variables | own | more, folder=self._folder, given=given)

    # A process for each episode

    async def _by_process(self, session: Session, key: str) -> float | None:
        async with self._process(key, given=json.dumps(session.task_tree) + "\n") as process:
            code = await session.within_timeout(process.wait())
        if code:
            raise AgentFailed(f"exit code {code}", process.last_errors)
        return _score(process.last_line)

    # Processes that claim

    async def _by_worker(self, session: Session, key: str) -> float | None:
        await self._endpoint.offer(key)
        return await session.within_timeout(asyncio.shield(session.ended))

    async def _keep_worker(self) -> None:
        """Run a process that claims episodes, and start another one when it ends."""
        left = MOST_STARTS
        while left:
            key, worker = self._endpoint.hire(most=self._config.claims)
            async with self._process(key) as process:
                why = await _end_of(process, worker)
            self._endpoint.dismiss(key)
            left = MOST_STARTS if worker.has_asked else left - 1
            await self._hand_back(worker, why, process.last_errors)
        raise AgentFailed(f"a process ended {MOST_STARTS} times before it had asked for an episode, with {why}", process.last_errors)

    async def _hand_back(self, worker: Worker, why: str, errors: Sequence[str]) -> None:
        """Let others claim the episodes of a process that has ended; each once."""
        if lost := worker.claimed:
            got = AgentFailed(f"{why}, which leaves {number_of(len(lost), 'episode')} to others", errors)
            log.warning("%s: expected a process to go on, got %s", self._subject, got.told)
        for key, session in lost.items():
            if session.claims < MOST_CLAIMS:
                await self._endpoint.offer(key, first=True)
            else:
                session.end(AgentFailed(f"{MOST_CLAIMS} processes ended that had claimed it, the last one with {why}", errors))

    def _keeper_ended(self, keeper: asyncio.Task[None]) -> None:
        if keeper.cancelled():
            return
        error = keeper.exception()
        failed = error if isinstance(error, AgentFailed) else AgentFailed(f"an unexpected {type(error).__name__}: {error}")
        self._ends = failed.told
        self._endpoint.end_all(failed)


def try_command(config: EnvironmentConfig, tokenizer: PreTrainedTokenizerBase, row: Mapping[str, Any], *, max_length: int) -> None:
    """Let the command play one episode, in which the policy says nothing.

    Args:
        row: a prompt's, of the prepared data.
    Raises:
        ValueError: it asks for no reply.
    """
    outside, end = Outside(config.model_copy(update={"processes": 1})), turn_end(tokenizer).trained[-1]

    async def say_nothing(so_far: Rollout, room: int) -> Sampled:
        return Sampled([Span([end], [0.0], 0)], True)

    async def play() -> None:
        messages = row["messages"]
        prompt = Prompt(row["id"], row["source"], messages, encode_prompt(tokenizer, messages), row["label"])
        limits = Limits(max_length, max_length, config.max_turns, config.tool_timeout)
        task = Task.of(prompt, max_turns=config.max_turns)
        try:
            await outside.play(task, Policy(prompt, tokenizer, say_nothing, limits, stops=(end,)))
        finally:
            await outside.close()

    try:
        asyncio.run(play())
    except AgentFailed as error:
        if not error.asked:
            raise ValueError(f"{outside._subject}: expected it to ask for a reply, got none; correct it: {error.told}") from error
        log.warning("%s: a trial in which the model says nothing has no score: %s", outside._subject, error.told)


async def _end_of(process: AgentProcess, worker: Worker) -> str:
    """Wait until a process ends or has to, and tell why."""
    ended, late = asyncio.ensure_future(process.wait()), asyncio.ensure_future(worker.late.wait())
    try:
        await asyncio.wait({ended, late}, return_when=asyncio.FIRST_COMPLETED)
        return f"exit code {ended.result()}" if ended.done() else "an episode in which it was silent for too long"
    finally:
        ended.cancel()
        late.cancel()


def _score(line: str) -> float | None:
    """Return the number in the last line of a process; None for null or no line.

    Raises:
        AgentFailed: it is something else.
    """
    try:
        found = json.loads(line or "null")
    except ValueError:
        found = line
    if found is None or (isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)):
        return found
    raise AgentFailed(f"expected a number or null as the last line of the output, got {shown(line)}")
