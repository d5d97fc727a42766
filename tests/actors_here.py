"""Actors in this process, for tests of the driver's side."""

from __future__ import annotations

from rlhf_core.engines.ray_actors import ActorGroup


class Here(ActorGroup):
    """A group whose actors are in this process and answer at once."""

    def __init__(self, actor: object):
        self.actors = [actor]

    def submit(self, method: str, per_rank: list[tuple], **kwargs) -> list:
        return [getattr(self.actors[0], method)(*args, **kwargs) for args in per_rank]

    def wait(self, references: list, **_) -> list:
        return references

    def wait_ready(self, what: str = "start") -> None:
        """Every call has finished when it returns."""
