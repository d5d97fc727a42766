"""Rollout engines and trainer ranks that take turns on their GPUs: those that work have all of the memory, the others none.

Engines sleep while the trainer works; weights and states of the trainer are on the host while engines work. In between, while weights are
sent, engines have their weights without a cache, and trainer ranks have the policy's weights.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from rlhf_core.engines.memory.offload import Stays
from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.ray.places import RoleLost
from rlhf_core.trainers.rl.groups import TrainerGroups

log = logging.getLogger("rlhf")

Turn = Literal["engines", "transfer", "trainers"]
Switch = Literal["sleep", "wake", "offload", "reload"]
SWITCHES: tuple[Switch, ...] = ("sleep", "wake", "offload", "reload")
SIZES: dict[Stays, int] = {"nothing": 0, "weights": 1, "all": 2}


class GpuTimeSharing:
    """Lets engines or trainer ranks have the GPUs; called before each of their calls.

    Args:
        on: without, no method does anything.
        deadline: seconds of a switch, in which an actor also ends the calls that it has.

    start: starts new engines in place of lost ones, in `room`; set by `RolloutRecovery`.
    stale: an engine was started since weights were last sent to all.
    seconds: of each of SWITCHES so far. memory: bytes after the last of each, on the GPUs of rollout rank 0 and of the policy's rank 0.
    """

    def __init__(self, engines: ActorGroup, trainers: TrainerGroups, *, on: bool, deadline: float):
        self.on, self.stale = on, False
        self.start: Callable[[RoleLost], None]
        self._engines, self._trainers, self._deadline = engines, trainers, deadline
        self._turn: Turn | None = None  # None: before the start, within a switch, or where one was interrupted
        self._stays: Stays | None = "nothing"
        self._ended = False
        self.seconds: dict[str, float] = dict.fromkeys(SWITCHES, 0.0) if on else {}
        self.memory: dict[str, int] = {}
        self._order: list[str] | None = []  # of the first round, for the log

    def begin(self) -> None:
        """Engines have started, and the trainer ranks are about to load their models."""
        if self.on:
            self._call_engines("sleep", "sleep", 1)
            self._turn, self._stays = "trainers", "all"

    def engines(self) -> None:
        """The engines work with the weights that they have; where `stale`, they need new ones first."""
        if self._begins("engines"):
            self._keep("nothing")
            self._call_engines("wake", "wake_up")
            self._turn = "engines"

    def trainers(self, *, forget: bool = False) -> None:
        """The trainer ranks work.

        Args:
            forget: engines get new weights before they work again.
        """
        if self._begins("trainers"):
            self._put_to_sleep(forget=forget)
            self._keep("all")
            self._turn = "trainers"

    def transfer(self) -> None:
        """The policy's ranks send weights to the engines."""
        if self._begins("transfer"):
            self._put_to_sleep(forget=True)
            self._keep("weights")
            self._call_engines("wake", "wake_up", ["weights"])
            self._turn = "transfer"

    def _begins(self, turn: Turn) -> bool:
        if not self.on or self._turn == turn:
            return False
        self._before, self._turn = self._turn, None
        return True

    def _put_to_sleep(self, *, forget: bool) -> None:
        if self._before == "trainers":
            return
        self._keep("nothing")
        self._call_engines("sleep", "sleep", 2 if forget else 1)

    @contextmanager
    def room(self, ranks: list[int]) -> Iterator[None]:
        """Context in which these engines are started in place of lost ones. A new one takes all of its memory, until it does as the others
        do.

        Raises:
            RoleLost: an engine is lost again.
        """
        if not self.on:
            yield
            return
        stays, self.stale = self._stays, True
        self._keep("nothing")
        yield
        if self._turn == "engines":
            return
        for rank in ranks:
            self._engines.call_one(rank, "sleep", 1, deadline=self._deadline)
        if stays is not None:
            self._keep(stays)
        for rank in ranks if self._turn == "transfer" else ():
            self._engines.call_one(rank, "wake_up", ["weights"], deadline=self._deadline)

    def end_engines(self) -> None:
        """End the engines' processes, whatever they are doing: the trainer ranks work once more, and then the job ends."""
        if self.on:
            self._turn, self._ended = None, True
            self._engines.end(deadline=self._deadline)

    def _keep(self, stays: Stays) -> None:
        """What stays on the GPUs of trainer ranks."""
        if self._stays == stays:
            return
        grows = self._stays is not None and SIZES[stays] > SIZES[self._stays]
        self._stays = None
        with self._switch("reload" if grows else "offload"):
            found = self._trainers.call("keep", lambda *_: (stays,), deadline=self._deadline)
        self._note("reload" if grows else "offload", "trainer", found[self._trainers.all.index(self._trainers.policy)][0])
        self._stays = stays

    def _call_engines(self, kind: Switch, method: str, *args: object) -> None:
        if self._ended:
            return
        per_rank: list[tuple] = [args] * len(self._engines)
        with self._switch(kind):
            pending = self._engines.submit(method, per_rank)
            found = self._engines.wait_and_replace(pending, method, per_rank, deadline=self._deadline, replace=self.start)
        self._note(kind, "engine", found[0])

    @contextmanager
    def _switch(self, kind: Switch) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[kind] += time.perf_counter() - began

    def _note(self, kind: Switch, who: str, memory: dict[str, int]) -> None:
        self.memory |= {f"{who}_{name}_after_{kind}": size for name, size in memory.items()}
        if self._order is not None:
            used = f" ({memory['used'] / 2**30:.1f} GiB of its GPU in use)" if memory else ""
            self._order.append(f"{who} {kind}{used}")

    def log_order(self) -> None:
        """Log the switches of the run's first step, in their order."""
        if self.on and self._order is not None:
            log.info("rl: engines and trainer take turns: %s", ", ".join(self._order))
            self._order = None
