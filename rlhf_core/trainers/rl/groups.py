"""The trainer ranks of an RL job, in groups: each has a process group of its own, and the ranks of a group host the same roles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import RlConfig, RoleGroup
from rlhf_core.config.placement import TrainerConfig
from rlhf_core.engines.ray.actors import ActorGroup, Pending

LOOK_SECONDS = 5.0


@dataclass(frozen=True)
class TrainerGroup:
    """roles: of each rank.    trainer: settings of the ranks.    actors: the ranks.
    first: number of ranks in the groups before this one.
    """

    roles: RoleGroup
    trainer: TrainerConfig
    actors: ActorGroup
    first: int

    def __len__(self) -> int:
        return len(self.actors)

    def submit(self, method: str, per_rank: list[tuple] | None = None, **kwargs: Any) -> list[Pending]:
        return self.actors.submit(method, per_rank or [()] * len(self), **kwargs)

    def wait(self, pending: list[Pending], *, deadline: float, what: str) -> list[Any]:
        return self.actors.wait(pending, deadline=deadline, what=what)

    def call(self, method: str, per_rank: list[tuple] | None = None, *, deadline: float, **kwargs: Any) -> list[Any]:
        return self.wait(self.submit(method, per_rank, **kwargs), deadline=deadline, what=method)


class TrainerGroups:
    """The groups of rl.placement, in its order. A call of several groups is submitted to all before any is waited for."""

    def __init__(self, rl: RlConfig, actors: Sequence[ActorGroup]):
        self.all: list[TrainerGroup] = []
        for roles, ranks in zip(rl.role_groups, actors, strict=True):
            self.all.append(TrainerGroup(roles, rl.of_group(roles).trainer, ranks, self.ranks))

    @property
    def ranks(self) -> int:
        """The number of ranks of all groups together."""
        return sum(map(len, self.all))

    def find_lost(self) -> set[int]:
        """Return the ranks that died or were late, counted over all groups."""
        return {group.first + rank for group in self.all for rank in group.actors.find_lost(LOOK_SECONDS)}

    def check(self) -> None:
        """Check that no rank has died or was late.

        Raises:
            RoleLost: names ranks of a group that died or were late.
        """
        for group in self.all:
            group.actors.check(LOOK_SECONDS)

    def find(self, role: str) -> TrainerGroup | None:
        """Return the group that hosts a role; None: the run doesn't have it."""
        return next((group for group in self.all if role in group.roles.roles), None)

    @property
    def policy(self) -> TrainerGroup:
        found = self.find("policy")
        assert found is not None
        return found

    @property
    def learning(self) -> list[TrainerGroup]:
        """The groups of policy and critic, the policy's first."""
        return sorted((group for group in self.all if group.roles.learns), key=lambda group: group is not self.policy)

    def call(
        self, method: str, arguments: Callable[[TrainerGroup, int], tuple] = lambda group, rank: (), *, deadline: float
    ) -> list[list[Any]]:
        """Call a method on each rank of each group. Returns the results of each group.

        Args:
            arguments: of a rank, by its group and its number in the group.
        """
        pending = [group.submit(method, [arguments(group, rank) for rank in range(len(group))]) for group in self.all]
        return [group.wait(p, deadline=deadline, what=method) for group, p in zip(self.all, pending, strict=True)]

    def close(self) -> None:
        for group in self.all:
            group.actors.close()
