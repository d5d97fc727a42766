"""Groups of Ray actors: placed with a deadline, called with a deadline, replaced one by one, and an error that names the role and rank."""

from __future__ import annotations

import importlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from rlhf_core.environment import keep_visible, named, passed_on
from rlhf_core.process import collect_rarely, freeze_gc

PEER_SECONDS = 5.0  # in which the death that made another rank's call fail becomes known
LOOK_SECONDS = 15.0  # to look at a process on another node, or to end it; a worker has to start there

Pending = ray.ObjectRef  # an answer that is still to come, and may be an argument of another call


def join_cluster() -> int:
    """Connect to the cluster that this job runs on. Returns how many GPUs it has."""
    ray.init(address="auto", logging_level="ERROR")
    return int(ray.cluster_resources().get("GPU", 0))


def leave_cluster() -> None:
    ray.shutdown()


class RoleLost(RuntimeError):
    """An actor died, or didn't answer by its deadline. The message names role and rank.

    ranks: those that are lost; empty where none of them is, but a call that may fail has.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()):
        super().__init__(message)
        self.ranks = list(ranks)


@contextmanager
def held(number: int) -> Iterator[None]:
    """A signal that comes meanwhile takes effect at the end: its handler may raise. In a thread that handles none, nothing is held."""
    handler = signal.getsignal(number)
    if handler is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    signal.signal(number, lambda *_: came.append(number))
    try:
        yield
    finally:
        signal.signal(number, handler)
        if came:
            signal.raise_signal(number)


@dataclass(frozen=True)
class Place:
    """Where an actor's process is."""

    node: str
    host: str
    pid: int


class Hosted:
    """What an actor is: an object that is imported and made in the actor's process, so that nobody else has to import it.

    What can't be made because of what a user has set is said, as that ValueError, to whoever waits for it or calls it.
    """

    def __init__(self, factory: str, **kwargs: Any):
        keep_visible(named())  # a reward function sees no more on a cluster of others than in a stage
        collect_rarely()
        module, _, name = factory.partition(":")
        made_by = getattr(importlib.import_module(module), name)
        freeze_gc()
        self._refusal: ValueError | None = None
        try:
            self._object = made_by(**kwargs)
        except ValueError as error:
            self._refusal = error

    def ready(self) -> None:
        if self._refusal is not None:
            raise self._refusal

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self.ready()
        return getattr(self._object, method)(*args, **kwargs)


class ActorGroup:
    """The actors of one role, rank 0 first.

    Args:
        role: for messages, such as "trainer".
        factory: "module:Class" of what each actor hosts; it gets `rank` and `kwargs`.
        cpus, gpus: of each actor. Without any it starts wherever, beside the others.
        threads: OMP_NUM_THREADS of each actor's process.
        start_deadline: seconds until every actor must have been placed and made.
        together: the ranks work on one thing and are placed as one; otherwise each has a place of its own, and can get another.
    Raises:
        RoleLost: the cluster has no room, or an actor failed to start.
    """

    def __init__(
        self,
        role: str,
        factory: str,
        size: int,
        *,
        cpus: float,
        gpus: float,
        threads: int,
        start_deadline: float,
        kwargs: dict[str, Any],
        together: bool = True,
    ):
        self.role = role
        self._factory, self._kwargs, self._start_deadline = factory, kwargs, start_deadline
        self._resources = {"num_cpus": cpus, "num_gpus": gpus}
        self._environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **passed_on()}
        self._bundles: list[tuple[PlacementGroup, int] | None] = [None] * size
        if cpus or gpus:
            groups = [self._place(size)] * size if together else [self._place(1) for _ in range(size)]
            self._bundles = [(group, rank if together else 0) for rank, group in enumerate(groups)]
        self.actors: list[Any] = []
        self._places: list[Pending] = []
        self._late: set[int] = set()
        for rank in range(size):
            self._start(rank)

    def _place(self, size: int) -> PlacementGroup:
        return _place(self.role, size, **self._resources, deadline=self._start_deadline)

    def _start(self, rank: int) -> None:
        """A new actor for a rank; it takes the place of the one before."""
        bundle = self._bundles[rank]
        actor = (
            ray.remote(type(self._factory.rpartition(":")[2], (Hosted,), {}))  # what the process is called
            .options(
                **self._resources,
                max_restarts=0,
                runtime_env={"env_vars": self._environment},
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle[0], placement_group_bundle_index=bundle[1])
                if bundle
                else "DEFAULT",
            )
            .remote(self._factory, rank=rank, **self._kwargs)
        )
        self.actors[rank : rank + 1] = [actor]
        self._places[rank : rank + 1] = [actor.__ray_call__.remote(_place_of_process)]

    def __len__(self) -> int:
        return len(self.actors)

    def wait_ready(self, what: str = "start") -> None:
        """Every rank has done what it was asked to do so far, its start first of all.

        Raises:
            ValueError: what is hosted refuses the model or the settings.
        """
        self._wait_ready(range(len(self)), what)

    def _wait_ready(self, ranks: Sequence[int], what: str) -> None:
        try:
            self.wait([self.actors[rank].ready.remote() for rank in ranks], deadline=self._start_deadline, what=what, ranks=ranks)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from error

    def submit(self, method: str, per_rank: list[tuple], **kwargs: Any) -> list[Pending]:
        """Call a method on each rank with that rank's arguments, without waiting. All are, or none: they may meet in a collective."""
        with held(signal.SIGTERM):
            return [self._submit_one(rank, method, *args, **kwargs) for rank, args in zip(range(len(self)), per_rank, strict=True)]

    def _submit_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Pending:
        return self.actors[rank].call.options(name=f"{self.role}.{method}").remote(method, *args, **kwargs)

    def call(self, method: str, per_rank: list[tuple] | None = None, *, deadline: float, **kwargs: Any) -> list[Any]:
        """Call a method on each rank and return the results, rank 0 first."""
        return self.wait(self.submit(method, per_rank or [()] * len(self), **kwargs), deadline=deadline, what=method)

    def call_one(self, rank: int, method: str, *args: Any, deadline: float, **kwargs: Any) -> Any:
        """Call a method of one rank."""
        reference = self._submit_one(rank, method, *args, **kwargs)
        (answer,) = self.wait([reference], deadline=deadline, what=method, ranks=[rank])
        return answer

    def wait_and_replace(
        self,
        references: list[Pending],
        method: str,
        per_rank: list[tuple],
        *,
        deadline: float,
        replace: Callable[[RoleLost], None],
        given_by: ActorGroup | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """As `wait`, for ranks that are independent: those that are lost are asked again once `replace` has seen to new ones.

        Args:
            references: of `submit` with the same method and arguments.
            deadline: seconds for each time that somebody is waited for.
            replace: calls `self.replace`, or raises.
            given_by: whose answers are among the arguments; that they are dead or late is not the fault of these.
        """
        while True:
            try:
                return self.wait(references, deadline=deadline, what=method)
            except (RoleLost, RayTaskError) as lost:
                if given_by is not None:
                    given_by.wait_ready("its answer")
                if not isinstance(lost, RoleLost) or not lost.ranks:
                    raise
                replace(lost)
                self.submit_again(lost.ranks, references, method, per_rank, **kwargs)

    def submit_again(self, ranks: Sequence[int], references: list[Pending], method: str, per_rank: list[tuple], **kwargs: Any) -> None:
        """Put new references in the places of some of those that `submit` has returned."""
        for rank in ranks:
            references[rank] = self._submit_one(rank, method, *per_rank[rank], **kwargs)

    def attempt(self, method: str, *args: Any, deadline: float) -> Any:
        """Call a method of the only actor, which may well fail: an exception in it counts as the loss of the role too.

        Raises:
            RoleLost: it died or is late; or it raised, then without ranks.
        """
        try:
            (answer,) = self.call(method, [args], deadline=deadline)
        except RayTaskError as error:
            raise RoleLost(f"{self.role}: expected {method} to return, got {type(error.cause).__name__}: {error.cause}") from error
        return answer

    def wait(self, references: list[Pending], *, deadline: float, what: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Results of references, one for each rank.

        Args:
            ranks: of the references; None: all.
        Raises:
            RoleLost: naming every rank that died, or else those that are late and what their processes do.
        """
        ranks = list(ranks if ranks is not None else range(len(self)))
        try:
            return ray.get(references, timeout=deadline)
        except GetTimeoutError as error:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = [rank for rank, reference in zip(ranks, references, strict=True) if reference not in done]
            if not late:
                return self.wait(references, deadline=deadline, what=what, ranks=ranks)
            self._late.update(late)
            states = "; ".join(f"rank {rank}: {self._look(rank)}" for rank in late)
            raise RoleLost(
                f"{self.role} rank {_listed(late)}: expected {what} to finish, got no answer within {deadline:.0f} s ({states}); "
                "its log is in the Ray session's folder",
                late,
            ) from error
        except (RayActorError, RayTaskError, ObjectLostError) as error:
            # A rank whose peer died fails in their collective, and may be the first to say so.
            patience = PEER_SECONDS if isinstance(error, RayTaskError) else 0
            dead = [rank for rank, reference in zip(ranks, references, strict=True) if _is_dead(reference, patience)]
            if not dead:
                raise
            raise RoleLost(
                f"{self.role} rank {_listed(dead)}: expected {what} to finish, got a dead process ({self._look(dead[0])}); "
                "its log is in the Ray session's folder",
                dead,
            ) from error

    def replace(self, ranks: Sequence[int]) -> None:
        """New actors for those that are lost, ready to be called; what is left of the old ones is ended.

        Raises:
            RoleLost: the cluster has no room for one, or it failed to start.
        """
        for rank in ranks:
            self._end(rank)
            self._late.discard(rank)
            bundle = self._bundles[rank]
            if bundle is not None:  # its node may be gone too, so it is placed anew
                remove_placement_group(bundle[0])
                self._bundles[rank] = (self._place(1), 0)
            self._start(rank)
        self._wait_ready(ranks, "start")

    def _end(self, rank: int) -> None:
        """The end of an actor's process. Ray asks a process to end, which one that is late may never hear: it is killed by its number."""
        ray.kill(self.actors[rank])
        place = self._whereabouts(rank) if rank in self._late else None
        if place is not None:
            _on_node(place, _kill, place.pid)

    def _look(self, rank: int) -> str:
        """Where an actor's process is and what it does, for a message."""
        place = self._whereabouts(rank)
        if place is None:
            return "its process was never heard of"
        return f"process {place.pid} on {place.host}: {_on_node(place, _state, place.pid) or 'its node does not answer'}"

    def _whereabouts(self, rank: int) -> Place | None:
        with suppress(RayError):
            return ray.get(self._places[rank], timeout=0)
        return None

    def close(self) -> None:
        for rank in range(len(self)):
            self._end(rank)
        for group in {bundle[0].id: bundle[0] for bundle in self._bundles if bundle is not None}.values():
            remove_placement_group(group)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "unknown"


def _is_dead(reference: Pending, patience: float) -> bool:
    """Whether the actor that is to give this is dead, as far as is known after so many seconds."""
    try:
        ray.get(reference, timeout=patience)
    except (GetTimeoutError, RayTaskError):  # of the latter some are RayActorErrors too: somebody else died, whose answer was an argument
        return False
    except (RayActorError, ObjectLostError):  # the latter: it had answered, and its node is gone with the answer
        return True
    return False


def _place_of_process(_: Any) -> Place:
    """To be called in an actor."""
    return Place(ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), os.getpid())


def _on_node(place: Place, look: Callable[[int], str], pid: int) -> str | None:
    """What `look` says of a process there; None: the node doesn't answer in time."""
    if place.node == ray.get_runtime_context().get_node_id():
        return look(pid)
    there = NodeAffinitySchedulingStrategy(place.node, soft=False)
    with suppress(RayError):
        return ray.get(ray.remote(look).options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(pid), timeout=LOOK_SECONDS)
    return None


def _state(pid: int) -> str:
    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return "gone"


def _kill(pid: int) -> str:
    """SIGKILL for a worker of Ray; the number may be another process's by now."""
    with suppress(psutil.NoSuchProcess, ProcessLookupError):
        if psutil.Process(pid).cmdline()[:1] and psutil.Process(pid).cmdline()[0].startswith("ray::"):
            os.kill(pid, signal.SIGKILL)
    return _state(pid)


def _place(role: str, size: int, *, num_cpus: float, num_gpus: float, deadline: float) -> PlacementGroup:
    bundle = {"CPU": num_cpus} | ({"GPU": num_gpus} if num_gpus else {})
    bundles = placement_group([bundle] * size, strategy="PACK")
    if not bundles.wait(timeout_seconds=deadline):
        remove_placement_group(bundles)
        raise RoleLost(
            f"{role}: expected room for {size} x {bundle} within {deadline:.0f} s, got none "
            f"(cluster has {ray.cluster_resources()}, free {ray.available_resources()}); add nodes or lower its ranks"
        )
    return bundles
