"""Prompts handed to rollout engines as these become free, in place of equal shares that wait for the slowest engine.

An engine has as many prompts as it samples at a time, and a few more that wait in it. Once these have started, it returns what has finished
and takes new ones. When none is left to hand out, each engine finishes what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_core.engines.ray.actors import ActorGroup, Pending, RoleLost
from rlhf_core.sampling.requests import Sample

AHEAD = 8  # an engine has one waiting prompt for so many that it samples


@dataclass(frozen=True)
class Requests:
    """prompts: token ids of each.    seeds: of each.    how: further arguments of the engines' `serve`."""

    prompts: list[list[int]]
    seeds: list[int]
    how: dict[str, Any]


class Dispatcher:
    """
    Args:
        replace: starts engines in place of lost ones, or raises.
        at_a_time: prompts that an engine samples at the same time.
        deadline: seconds until one of the engines must have finished some prompts.
        drain: `replace` is called when no engine has prompts, since all of them get new weights.
    """

    def __init__(
        self,
        engines: ActorGroup,
        replace: Callable[[RoleLost], None],
        requests: Requests,
        *,
        at_a_time: int,
        deadline: float,
        drain: bool = False,
    ):
        self._engines, self._replace, self._requests = engines, replace, requests
        self._at_a_time, self._deadline, self._drain = at_a_time, deadline, drain
        self._lost: list[RoleLost] = []  # to be replaced, with `drain`
        count = len(requests.prompts)
        self._most = min(at_a_time + max(1, at_a_time // AHEAD), -(-count // len(engines)))  # prompts that an engine has
        self._waiting = deque(range(count))
        self._taken: dict[int, set[int]] = {rank: set() for rank in range(len(engines))}
        self._pending: dict[int, Pending] = {}

    def run(self) -> list[list[Sample]]:
        """The responses to each prompt.

        Prompts of a lost engine are handed out again, first of all.

        Raises:
            RoleLost: an engine is lost, and may not be replaced.
        """
        finished: dict[int, list[Sample]] = {}
        for rank in self._taken:
            self._hand_out(rank)
        while self._pending or self._lost:
            if not self._pending:
                self._replace_lost()
                continue
            try:
                answers = self._engines.wait_any(self._pending, deadline=self._deadline, what="generate")
            except RoleLost as lost:
                self._take_back(lost)
                continue
            for rank, samples in answers.items():
                del self._pending[rank]
                finished.update(samples)
                self._taken[rank] -= samples.keys()
                self._hand_out(rank)
        return [finished[number] for number in range(len(finished))]

    def _hand_out(self, rank: int) -> None:
        """Fill an engine up and let it generate; nothing if it would have no prompts."""
        taken, requests = self._taken[rank], self._requests
        room = 0 if self._lost else self._most - len(taken)
        numbers = [self._waiting.popleft() for _ in range(min(len(self._waiting), room))]
        taken.update(numbers)
        if taken:
            arguments = (numbers, [requests.prompts[n] for n in numbers], [requests.seeds[n] for n in numbers])
            leave = min(self._at_a_time, len(taken) - 1) if self._waiting and not self._lost else 0
            self._pending[rank] = self._engines.submit_one(rank, "serve", *arguments, leave=leave, **requests.how)

    def _take_back(self, lost: RoleLost) -> None:
        for rank in lost.ranks:
            self._pending.pop(rank, None)
            self._waiting.extendleft(sorted(self._taken[rank], reverse=True))
            self._taken[rank].clear()
        if not lost.ranks:
            raise lost
        if self._drain:
            self._lost.append(lost)
            return
        self._replace(lost)
        for rank in lost.ranks:
            self._hand_out(rank)

    def _replace_lost(self) -> None:
        """Replace the engines that were lost, now that the others have finished what they had, and hand out prompts to all."""
        lost = RoleLost("; ".join(map(str, self._lost)), sorted({rank for one in self._lost for rank in one.ranks}))
        self._lost = []
        self._replace(lost)
        for rank in self._taken:
            self._hand_out(rank)
