"""Actors in this process, for tests of the driver's side."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from rlhf_core.engines.ray.actors import ActorGroup, PeerLost, RoleLost


class HerePeer:
    """An actor of this process that a trainer rank calls; calls run one after another in a thread."""

    def __init__(self, actor: object):
        self._actor, self._thread, self.key = actor, ThreadPoolExecutor(1), str(id(actor))

    def submit(self, method: str, *args: Any) -> Future:
        return self._thread.submit(getattr(self._actor, method), *args)

    def answer(self, call: Future, timeout: float) -> Any:
        try:
            return call.result(timeout)
        except TimeoutError as error:
            raise PeerLost(late=True) from error


class Here(ActorGroup):
    """A group whose actors are in this process and answer at once."""

    def __init__(self, actor: object):
        self.actors, self._bundles = [actor], []

    def peer(self, rank: int) -> HerePeer:
        return HerePeer(self.actors[rank])

    def given_up(self, reasons: dict[int, str], what: str) -> RoleLost:
        return RoleLost(f"expected {what} to finish, got {reasons}", list(reasons))

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return [getattr(self.actors[0], method)(*args, **kwargs) for args in per_rank]

    def wait(self, references: list, **_) -> list:
        return references

    def wait_ready(self, what: str = "start") -> None:
        """Every call has finished when it returns."""
