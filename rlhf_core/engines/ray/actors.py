"""Groups of Ray actors, which are placed and called with deadlines and replaced one by one. Errors name the role and the rank."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.exceptions import GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from rlhf_core.engines.ray.places import Bundle, RoleLost, release, reserve, use_node_interface
from rlhf_core.engines.ray.processes import Place, get, kill_worker, on_nodes, place_of_process, process_state
from rlhf_core.environment import keep_visible, named, passed_on
from rlhf_core.process import collect_rarely, freeze_gc, held, hush_libraries
from rlhf_core.storage.node import enter

PEER_SECONDS = 5.0  # seconds until the death that made another rank's call fail is known
WATCH = "watch"  # thread of an actor that answers `look`
END_SECONDS = 0.2  # between two looks at a process that ends

Pending = ray.ObjectRef  # a pending answer, which may be an argument of another call


class Hosted:
    """Hosts an object that is imported and made in the actor's process, so that other processes needn't import it.

    A ValueError from its constructor, caused by a user's settings, is raised by every later call.

    Args:
        visible: environment variables that the process may see besides those of flow.environment.
    """

    def __init__(self, factory: str, visible: Collection[str], **kwargs: Any):
        keep_visible({*named(), *visible})  # a reward function sees the same environment on a remote cluster as in a stage
        enter()
        use_node_interface()
        hush_libraries()
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


class PeerLost(RuntimeError):
    """Another actor has died, or, if `late` is set, doesn't answer in time."""

    def __init__(self, *, late: bool):
        super().__init__("no answer" if late else "a dead process")
        self.late = late


@dataclass(frozen=True)
class RayPeer:
    """An actor that another actor calls; a `transfer.sender.Peer`."""

    role: str
    actor: Any

    @property
    def key(self) -> str:
        return self.actor._actor_id.hex()

    def submit(self, method: str, *args: Any) -> Future:
        return self.actor.call.options(name=f"{self.role}.{method}").remote(method, *args).future()

    def answer(self, call: Future, timeout: float) -> Any:
        """Return the answer of a call.

        Raises:
            PeerLost: the actor has died, or doesn't answer in time.
        """
        try:
            return call.result(timeout)
        except RayTaskError:
            raise
        except RayActorError as error:
            raise PeerLost(late=False) from error
        except TimeoutError as error:
            raise PeerLost(late=True) from error


class ActorGroup:
    """The actors of one role, rank 0 first.

    Args:
        role: what messages call the actors, such as "trainer".
        factory: "module:Class" of the object that each actor hosts, which is made with `rank` and `kwargs`.
        cpus: CPUs of each actor. With 0 and without bundles it is placed anywhere.
        bundles: place of each actor, reserved by the caller; None: the group reserves its CPUs itself.
        threads: OMP_NUM_THREADS of each actor's process.
        start_deadline: seconds until every actor must have been placed and made.
        visible: environment variables that the processes may see besides those of flow.environment.
        watched: whether `look` can be called while a rank is at work.
        together: without bundles, whether the ranks are placed as a unit; otherwise each is placed alone and can be replaced.
    Raises:
        RoleLost: the cluster has no room, or an actor failed to start.
    """

    meanwhile: Callable[[], None] | None = None  # called every second of a wait for answers; raises what ends the wait

    def __init__(
        self,
        role: str,
        factory: str,
        size: int,
        *,
        cpus: float,
        threads: int,
        start_deadline: float,
        kwargs: dict[str, Any],
        bundles: Sequence[Bundle] | None = None,
        together: bool = True,
        visible: Collection[str] = (),
        watched: bool = False,
    ):
        self.role = role
        self._factory, self._kwargs, self._start_deadline = factory, kwargs | {"visible": set(visible)}, start_deadline
        self._remote = ray.remote(concurrency_groups={WATCH: 1}) if watched else ray.remote
        self._cpus, self._own_bundles = cpus, bundles is None
        self._environment = {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **passed_on()}
        self._bundles: list[Bundle | None] = list(bundles) if bundles is not None else [None] * size
        if bundles is None and cpus:
            groups = [self._place(size)] * size if together else [self._place(1) for _ in range(size)]
            self._bundles = [Bundle(group, rank if together else 0, 0.0) for rank, group in enumerate(groups)]
        self.actors: list[Any] = []
        self._places: list[Pending] = []
        self._late: dict[int, str] = {}  # what was got instead of an answer, by rank
        self._watched: dict[int, tuple[Any, Pending | None]] = {}  # by rank: the actor, and its answer to `find_newly_dead`; None: dead
        for rank in range(size):
            self._start(rank)

    def _place(self, size: int, meanwhile: Callable[[], None] = lambda: None) -> PlacementGroup:
        return reserve(self.role, [{"CPU": self._cpus}] * size, deadline=self._start_deadline, meanwhile=meanwhile)

    def _start(self, rank: int) -> None:
        """Start a new actor for a rank in place of the old one."""
        bundle = self._bundles[rank]
        visible = {"CUDA_VISIBLE_DEVICES": ",".join(bundle.visible)} if bundle and bundle.visible else {}
        actor = (
            self._remote(type(self._factory.rpartition(":")[2], (Hosted,), {}))  # the process's name
            .options(
                num_cpus=self._cpus,
                num_gpus=bundle.gpus if bundle else 0,
                max_restarts=0,
                runtime_env={"env_vars": self._environment | visible},
                scheduling_strategy=PlacementGroupSchedulingStrategy(bundle.group, placement_group_bundle_index=bundle.index)
                if bundle
                else "DEFAULT",
            )
            .remote(self._factory, rank=rank, **self._kwargs)
        )
        self.actors[rank : rank + 1] = [actor]
        self._places[rank : rank + 1] = [actor.__ray_call__.remote(place_of_process)]

    def __len__(self) -> int:
        return len(self.actors)

    def find_lost(self, patience: float) -> set[int]:
        """Return the ranks that have died, even if no call has noticed it, and those that were late.

        Args:
            patience: seconds to wait for answers of living ranks; a rank at work needn't answer.
        """
        return self._find_dead(patience) | set(self._late)

    def _find_dead(self, patience: float) -> set[int]:
        answers = [actor.ready.remote() for actor in self.actors]
        ray.wait(answers, num_returns=len(answers), timeout=patience)
        return {rank for rank, answer in enumerate(answers) if _is_dead(answer, 0)}

    def find_newly_dead(self) -> list[int]:
        """Return the ranks whose death has become known since the last call, without waiting. A rank at work answers later."""
        dead = []
        for rank, actor in enumerate(self.actors):
            of, answer = self._watched.get(rank, (None, None))
            if of is actor and answer is None:
                continue
            if of is actor and _is_dead(answer, 0):
                self._watched[rank] = actor, None
                dead.append(rank)
            elif of is not actor or ray.wait([answer], timeout=0)[0]:
                self._watched[rank] = actor, actor.ready.remote()
        return dead

    def check(self, patience: float) -> None:
        """Check that no rank has died or was late.

        Args:
            patience: as for `find_lost`.
        Raises:
            RoleLost: a rank is dead or was late; names all dead ranks, or else the late ones, which may be alive.
        """
        if dead := self._find_dead(patience):
            raise self.dead(sorted(dead), "its work")
        if self._late:
            raise self._unanswered(sorted(self._late), "its work")

    @property
    def has_gpus(self) -> bool:
        return any(bundle is not None and (bundle.gpus > 0 or bundle.visible) for bundle in self._bundles)

    def wait_ready(self, what: str = "start") -> None:
        """Wait until every rank has finished its start and all calls so far.

        Raises:
            ValueError: the hosted object refuses the model or the settings.
        """
        self._wait_ready(range(len(self)), what)

    def _wait_ready(self, ranks: Sequence[int], what: str) -> None:
        try:
            self.wait([self.actors[rank].ready.remote() for rank in ranks], deadline=self._start_deadline, what=what, ranks=ranks)
        except RayTaskError as error:
            raise error.cause if isinstance(error.cause, ValueError) else error from error

    def submit(self, method: str, per_rank: list[tuple], **kwargs: Any) -> list[Pending]:
        """Call a method on each rank with that rank's arguments, without waiting. SIGTERM is deferred, so all or none are submitted."""
        with held(signal.SIGTERM):
            return [self.submit_one(rank, method, *args, **kwargs) for rank, args in zip(range(len(self)), per_rank, strict=True)]

    def submit_one(self, rank: int, method: str, *args: Any, **kwargs: Any) -> Pending:
        """Call a method of one rank without waiting."""
        return self.actors[rank].call.options(name=f"{self.role}.{method}").remote(method, *args, **kwargs)

    def look(self, rank: int, *args: Any) -> Pending:
        """Call `look` of one rank of a `watched` group without waiting, in another thread than the rank's other calls."""
        return self.actors[rank].call.options(name=f"{self.role}.look", concurrency_group=WATCH).remote("look", *args)

    def call(self, method: str, per_rank: list[tuple] | None = None, *, deadline: float, **kwargs: Any) -> list[Any]:
        """Call a method on each rank and return the results, rank 0 first."""
        return self.wait(self.submit(method, per_rank or [()] * len(self), **kwargs), deadline=deadline, what=method)

    def call_one(self, rank: int, method: str, *args: Any, deadline: float, **kwargs: Any) -> Any:
        """Call a method of one rank and return its result."""
        reference = self.submit_one(rank, method, *args, **kwargs)
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
        **kwargs: Any,
    ) -> list[Any]:
        """Wait as `wait` does for independent ranks: `replace` starts new actors for lost ranks, whose calls are repeated.

        Args:
            references: what `submit` returned for the same method and arguments.
            deadline: seconds for each wait.
            replace: function that calls `self.replace` or raises.
        """
        while True:
            try:
                return self.wait(references, deadline=deadline, what=method)
            except RoleLost as lost:
                if not lost.ranks:
                    raise
                replace(lost)
                self.submit_again(lost.ranks, references, method, per_rank, **kwargs)

    def submit_again(self, ranks: Sequence[int], references: list[Pending], method: str, per_rank: list[tuple], **kwargs: Any) -> None:
        """Repeat the calls of some ranks, and replace their references among those that `submit` returned."""
        for rank in ranks:
            references[rank] = self.submit_one(rank, method, *per_rank[rank], **kwargs)

    def call_only(self, method: str, *args: Any, deadline: float) -> Any:
        """Call a method of the group's only actor and return its result; an exception in it counts as a loss of the role too.

        Raises:
            RoleLost: the actor died or is late, or it raised; then the error names no ranks.
        """
        try:
            (answer,) = self.call(method, [args], deadline=deadline)
        except RayTaskError as error:
            got = f"{type(error.cause).__name__}: {error.cause}"
            raise RoleLost(f"{self.role}: expected {method} to return, got {got}", cause=error.cause) from error
        return answer

    def wait(self, references: list[Pending], *, deadline: float, what: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Return the results of references, one for each rank.

        Args:
            ranks: ranks of the references; None: all ranks.
        Raises:
            RoleLost: a rank is dead or late; names all dead ranks, or else the late ones and the states of their processes.
        """
        ranks = list(ranks if ranks is not None else range(len(self)))
        try:
            return get(references, deadline, self.meanwhile)
        except GetTimeoutError as error:
            done, _ = ray.wait(references, num_returns=len(references), timeout=0)
            late = [rank for rank, reference in zip(ranks, references, strict=True) if reference not in done]
            if not late:
                return self.wait(references, deadline=deadline, what=what, ranks=ranks)
            raise self._overdue(late, what, deadline) from error
        except (RayActorError, RayTaskError, ObjectLostError) as error:
            # A rank whose peer died fails in their collective, and its error may arrive first.
            patience = PEER_SECONDS if isinstance(error, RayTaskError) else 0
            dead = [rank for rank, reference in zip(ranks, references, strict=True) if _is_dead(reference, patience)]
            if not dead:
                raise
            raise self.dead(dead, what) from error

    def dead(self, ranks: list[int], what: str) -> RoleLost:
        """Return the error for ranks whose processes are gone."""
        return RoleLost(
            f"{self.role} rank {_listed(ranks)}: expected {what} to finish, got a dead process ({self._look(ranks[:1])[0]}); "
            "its log is in the Ray session's folder",
            ranks,
        )

    def _overdue(self, late: list[int], what: str, deadline: float) -> RoleLost:
        """Return the error for ranks that didn't answer by the deadline, and remember that they were late."""
        self._late.update(dict.fromkeys(late, f"no answer within {deadline:.0f} s"))
        return self._unanswered(late, what)

    def _unanswered(self, late: list[int], what: str) -> RoleLost:
        """Return the error for ranks that were late."""
        states: dict[str, list[str]] = {}
        for rank, state in zip(late, self._look(late), strict=True):
            states.setdefault(self._late[rank], []).append(f"rank {rank}: {state}")
        found = "; ".join(f"{reason} ({'; '.join(of_ranks)})" for reason, of_ranks in states.items())
        return RoleLost(
            f"{self.role} rank {_listed(late)}: expected {what} to finish, got {found}; its log is in the Ray session's folder", late
        )

    def peer(self, rank: int) -> RayPeer:
        """Return an actor for another actor that calls it."""
        return RayPeer(self.role, self.actors[rank])

    def given_up(self, reasons: dict[int, str], what: str) -> RoleLost:
        """Return the error for ranks that another actor found to be lost.

        Args:
            reasons: what was got instead of an answer, by rank.
        """
        self._late.update(reasons)  # they may hang
        return self._unanswered(list(reasons), what)

    def wait_any(self, references: dict[int, Pending], *, deadline: float, what: str) -> dict[int, Any]:
        """Return the results of the ranks that have answered, by rank, as soon as one has.

        Args:
            references: pending answers by rank.
            deadline: seconds until the first answer.
        Raises:
            RoleLost: as `wait`, or no rank answered by the deadline.
        """
        ranks = {reference: rank for rank, reference in references.items()}
        done, _ = ray.wait(list(ranks), num_returns=1, timeout=deadline)
        if not done:
            raise self._overdue(list(references), what, deadline)
        chosen = [ranks[reference] for reference in done]
        return dict(zip(chosen, self.wait(done, deadline=deadline, what=what, ranks=chosen), strict=True))

    def replace(self, ranks: Sequence[int], meanwhile: Callable[[], None] = lambda: None) -> None:
        """End the old processes of lost ranks and start new actors.

        Args:
            meanwhile: function that is called first, and now and then while there is no room; an exception in it ends the wait.
        Raises:
            RoleLost: the cluster has no room for an actor, or it failed to start.
        """
        meanwhile()
        self._end(ranks)
        for rank in ranks:
            self._late.pop(rank, None)
            bundle = self._bundles[rank]
            if bundle is not None and self._own_bundles:  # placed anew, since its node may be gone too; Ray does it for the others
                release([(bundle.group, bundle.index)])
                self._bundles[rank] = Bundle(self._place(1, meanwhile), 0, 0.0)
            self._start(rank)
        self._wait_ready(ranks, "start")

    def _end(self, ranks: Sequence[int]) -> None:
        """End actors' processes. A late process may never react to Ray's request, so it is killed by its id."""
        for rank in ranks:
            ray.kill(self.actors[rank])
        on_nodes(kill_worker, [self._whereabouts(rank) for rank in ranks if rank in self._late])

    def _look(self, ranks: Sequence[int]) -> list[str]:
        """Return location and state of each actor's process, for a message."""
        places = [self._whereabouts(rank) for rank in ranks]
        states = on_nodes(process_state, places)
        return [
            "process unknown" if place is None else f"process {place.pid} on {place.host}: {state or 'its node does not answer'}"
            for place, state in zip(places, states, strict=True)
        ]

    def places(self) -> dict[str, Place]:
        """Return where each rank's process is, by the rank's name in messages.

        Raises:
            RoleLost: a process doesn't start in time.
        """
        found = self.wait(self._places, deadline=self._start_deadline, what="start")
        return {f"{self.role} rank {rank}": place for rank, place in enumerate(found)}

    def _whereabouts(self, rank: int) -> Place | None:
        with suppress(RayError):
            return ray.get(self._places[rank], timeout=0)
        return None

    def end(self, *, deadline: float) -> None:
        """End all processes, and wait at most `deadline` seconds until they have freed their memory."""
        until = time.monotonic() + deadline
        places = [self._whereabouts(rank) for rank in range(len(self))]
        self._end(range(len(self)))
        while not set(on_nodes(process_state, places)) <= {None, "gone", psutil.STATUS_ZOMBIE} and time.monotonic() < until:
            time.sleep(END_SECONDS)

    def close(self) -> None:
        self._end(range(len(self)))
        if self._own_bundles:
            release([(bundle.group, bundle.index) for bundle in self._bundles if bundle is not None])


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) or "unknown"


def _is_dead(reference: Pending, patience: float) -> bool:
    """Return whether the actor behind a reference is known to be dead, after waiting for its answer for `patience` seconds."""
    try:
        ray.get(reference, timeout=patience)
    except (GetTimeoutError, RayTaskError):  # some of the latter are RayActorErrors too: another actor died, whose answer was an argument
        return False
    except (RayActorError, ObjectLostError):  # the latter: the node with its answer is gone
        return True
    return False
