"""Ranks that call one function within a process group, each in its own actor."""

from __future__ import annotations

import importlib
import io
import re
import sys
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError, RayTaskError

from rlhf_core.engines.ray.actors import ActorGroup, Pending
from rlhf_core.engines.ray.gpus import reserve_gpus
from rlhf_core.engines.ray.places import Bundle, release
from rlhf_core.process import Stop

POLL_SECONDS = 0.5
LOOK_SECONDS = 5.0  # between two questions to a rank whether it is alive
PEER_SECONDS = 5.0  # after a rank's error, which the death of another may have caused, until that death is known
ROLE = "training"
_COLOUR = re.compile(r"\x1b\[\d+m")  # of a traceback by Ray


@dataclass(frozen=True)
class RankSettings:
    """Which ranks are started, and how long they may take.

    gpus: whether each rank gets a GPU; otherwise it gets a CPU.
    threads: OMP_NUM_THREADS of each rank.
    visible: names of environment variables that ranks may see.
    start_timeout: seconds for the cluster to have room for all ranks.
    rank_timeout: seconds that a rank waits for others, also within a collective, and in which it must answer.
    """

    size: int
    gpus: bool
    threads: int
    visible: Collection[str]
    start_timeout: float
    rank_timeout: float


class RankFailed(RuntimeError):
    """A rank raised `cause`; the message names the rank and has the traceback."""

    def __init__(self, message: str, cause: BaseException):
        super().__init__(message)
        self.cause = cause


class Rank:
    """One rank, hosted by its actor. `look` is called while `run` runs, in another thread."""

    def __init__(self, rank: int, world_size: int, timeout: float):
        self._rank, self._world_size, self._timeout = rank, world_size, timeout
        self._stop, self._output, self._store = threading.Event(), _Output(), None

    def address(self) -> tuple[str, int]:
        """Open the store at which the ranks meet, on rank 0, and return its host and port."""
        from rlhf_core.engines.ray.rendezvous import open_store  # imports torch, which the driver doesn't need

        self._store = open_store(self._world_size, timeout=self._timeout)
        return self._store.host, self._store.port

    def run(self, address: tuple[str, int], function: str, argument: Any) -> Any:
        """Join the other ranks, and return `function(argument, stop)`, where `stop()` tells whether a stop is requested."""
        from rlhf_core.engines.deepspeed.engine import join_world
        from rlhf_core.engines.ray.rendezvous import join_store

        store = self._store or join_store(*address, self._world_size, timeout=self._timeout)
        join_world(rank=self._rank, world_size=self._world_size, store=store, timeout=self._timeout)
        module, _, name = function.partition(":")
        if self._rank == 0:
            sys.stdout = self._output
        try:
            return getattr(importlib.import_module(module), name)(argument, self._stop.is_set)
        finally:
            sys.stdout = sys.__stdout__

    def look(self, stop: bool) -> str:
        """Return what rank 0 has printed since the last call; empty on other ranks.

        Args:
            stop: whether to request a stop.
        """
        if stop:
            self._stop.set()
        return self._output.take()


class _Output(io.TextIOBase):
    """A text stream that keeps what is written until it is taken."""

    def __init__(self) -> None:
        self._lock, self._texts = threading.Lock(), []

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            self._texts.append(text)
        return len(text)

    def take(self) -> str:
        with self._lock:
            texts, self._texts = self._texts, []
        return "".join(texts)


def run_on_ranks(function: str, argument: Any, settings: RankSettings, stop: Stop) -> Any:
    """Call a function on every rank of a process group, and print what rank 0 prints. Call it in a Ray job's driver.

    Args:
        function: "module:name", called with `argument` and a function that returns whether rank 0 is to stop.
        stop: a request before all ranks have started ends them; a later one is passed on to rank 0.
    Returns:
        The result of rank 0.
    Raises:
        RankFailed: a rank raised an error.
        RoleLost: a rank died, doesn't answer, or found no room.
        ValueError: the nodes don't have so many GPUs.
        StepAbandoned: a stop was requested before all ranks had started.
    """
    reserved: list[Bundle] = []
    actors: ActorGroup | None = None
    try:
        with stop.interrupts():
            if settings.gpus:
                found = reserve_gpus(ROLE, [1] * settings.size, cpus=1, deadline=settings.start_timeout)
                reserved += [Bundle(*bundle, gpus=1.0) for bundle in found]
            actors = ActorGroup(
                ROLE,
                "rlhf_core.engines.ray.ranks:Rank",
                settings.size,
                cpus=1,
                bundles=reserved or None,
                threads=settings.threads,
                start_deadline=settings.start_timeout,
                kwargs={"world_size": settings.size, "timeout": settings.rank_timeout},
                visible=settings.visible,
                watched=True,
            )
            actors.wait_ready()
            address = actors.call_one(0, "address", deadline=settings.rank_timeout)
        calls = actors.submit("run", [(address, function, argument)] * settings.size)
        return _follow(actors, calls, stop, settings.rank_timeout)
    finally:
        if actors is not None:
            actors.close()
        release([(bundle.group, bundle.index) for bundle in reserved])


def _follow(actors: ActorGroup, calls: list[Pending], stop: Stop, timeout: float) -> Any:
    """Wait for every rank, and return rank 0's result. Raises as `run_on_ranks` does."""
    watch = _Watch(actors, timeout)
    while True:
        done, _ = ray.wait(calls, num_returns=len(calls), timeout=POLL_SECONDS)
        silent = watch.look(stop.is_set())
        errors = {rank: error for rank, call in enumerate(calls) if call in done and (error := _error_of(call)) is not None}
        if errors:
            until = time.monotonic() + PEER_SECONDS
            while time.monotonic() < until and not _explains(errors):
                done, _ = ray.wait(calls, num_returns=len(calls), timeout=POLL_SECONDS)
                errors = {rank: error for rank, call in enumerate(calls) if call in done and (error := _error_of(call)) is not None}
        if errors and not _explains(errors):  # a rank that hangs makes the collectives of others run out of time
            silent = watch.unanswered(PEER_SECONDS)
        elif errors:
            silent = []
        if errors or len(done) == len(calls):
            watch.finish()
        if errors and not silent:
            raise failure(actors, errors)
        if silent:
            raise actors.given_up(dict.fromkeys(silent, f"no answer within cluster.rank_timeout={timeout:.0f} s"), "its work")
        if len(done) == len(calls):
            return ray.get(calls[0])


def _error_of(call: Pending) -> BaseException | None:
    """Return the error of a call that has ended, or None."""
    try:
        ray.get(call)
    except RayError as error:
        return error
    return None


def _explains(errors: Mapping[int, BaseException]) -> bool:
    """Return whether one of these errors isn't just a consequence of another rank's, as an error of communication may be."""
    return any(_is_death(error) or not isinstance(_cause(error), RuntimeError) for error in errors.values())


def _is_death(error: BaseException) -> bool:
    return isinstance(error, RayActorError | ObjectLostError) and not isinstance(error, RayTaskError)


def _cause(error: BaseException) -> BaseException:
    return error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, BaseException) else error


def failure(actors: ActorGroup, errors: Mapping[int, BaseException]) -> Exception:
    """Return the error that came first, as far as the ranks' errors show it: a refusal, else a death, which makes other ranks fail, else
    another.
    """
    own = {rank: error for rank, error in errors.items() if not _is_death(error)}
    refused = {rank: error for rank, error in own.items() if not isinstance(_cause(error), RuntimeError)}
    if not refused and len(own) < len(errors):
        return actors.dead(sorted(errors.keys() - own.keys()), "its work")
    rank, error = min((refused or own).items())
    cause = _cause(error)
    told = f"{type(cause).__name__}: {next(iter(str(cause).splitlines()), '')}"
    return RankFailed(f"{ROLE} rank {rank}: expected its work to finish, got {told}\n{_COLOUR.sub('', str(error))}", cause)


class _Watch:
    """Asks ranks for a sign of life, passes a stop on to rank 0, and prints what it printed.

    Args:
        timeout: seconds for an answer.
    """

    def __init__(self, actors: ActorGroup, timeout: float):
        self._actors, self._timeout = actors, timeout
        self._asked: dict[int, tuple[Pending, float]] = {}
        self._answered = dict.fromkeys(range(len(actors)), time.monotonic())

    def look(self, stop: bool) -> list[int]:
        """Ask the ranks whose turn it is, and return those that haven't answered in time."""
        for rank, since in self._answered.items():
            if rank not in self._asked and (rank == 0 or time.monotonic() - since > LOOK_SECONDS):
                self._asked[rank] = self._actors.look(rank, stop), time.monotonic()
        answered, _ = ray.wait([call for call, _ in self._asked.values()], num_returns=len(self._asked), timeout=0)
        silent = []
        for rank, (call, since) in list(self._asked.items()):
            if call in answered:
                del self._asked[rank]
                self._answered[rank] = time.monotonic()
                self._print(call)
            elif time.monotonic() - since > self._timeout:
                silent.append(rank)
        return silent

    def unanswered(self, seconds: float) -> list[int]:
        """Return the ranks that were asked more than `seconds` ago and haven't answered."""
        self.look(stop=False)
        return [rank for rank, (_, since) in self._asked.items() if time.monotonic() - since > seconds]

    def finish(self) -> None:
        """Print the rest of the output, unless rank 0 is gone or doesn't answer."""
        call = self._asked[0][0] if 0 in self._asked else self._actors.look(0, False)
        self._print(call)
        if 0 in self._asked:
            self._print(self._actors.look(0, False))

    def _print(self, call: Pending) -> None:
        with suppress(RayError, TimeoutError):
            sys.stdout.write(ray.get(call, timeout=PEER_SECONDS))
            sys.stdout.flush()
