"""Prompts handed to rollout engines as these become free, in place of equal shares that wait for the slowest engine.

An engine has as many prompts as it samples at a time, and some more that wait in it. Once these have started, it returns what has finished
and goes on with the next call, which is queued at it already and brings new ones: it doesn't wait for its caller. When no prompt is left to
hand out, each engine finishes what it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.data.pictures import Picture
from rlhf_core.engines.ray.actors import ActorGroup, Pending, RoleLost
from rlhf_core.engines.rollout.requests import Sample

CALLS = 2  # of an engine: one that it works at, and the next
PARTS = 4  # a call brings this part of an engine's share of what is left to hand out: few calls at first, an even end
LEAST = 8  # but at least one prompt for so many that an engine samples


@dataclass(frozen=True)
class Requests:
    """prompts: token ids of each.    seeds: of each.    options: further arguments of the engines' `serve`.
    pictures: of each prompt; empty: none has any.
    """

    prompts: list[list[int]]
    seeds: list[int]
    options: dict[str, Any]
    pictures: list[tuple[Picture, ...]] = field(default_factory=list)


@dataclass(frozen=True)
class Call:
    """A call of an engine's `serve`, which leaves so many prompts unfinished."""

    answer: Pending
    leave: int


class Dispatcher:
    """Hands out prompts to rollout engines that are free.

    Args:
        replace: starts engines in place of lost ones, or raises.
        at_a_time: prompts that an engine samples at the same time.
        joins: whether prompts can join those that an engine samples; if not, a call brings as many as it samples at a time.
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
        joins: bool,
        deadline: float,
        drain: bool = False,
    ):
        self._engines, self._replace, self._requests = engines, replace, requests
        self._at_a_time, self._joins, self._deadline, self._drain = at_a_time, joins, deadline, drain
        self._lost: list[RoleLost] = []  # to be replaced, with `drain`
        self._waiting = deque(range(len(requests.prompts)))
        self._share = -(-len(self._waiting) // len(engines))
        self._taken: dict[int, set[int]] = {rank: set() for rank in range(len(engines))}
        self._calls: dict[int, deque[Call]] = {rank: deque() for rank in self._taken}

    def run(self) -> list[list[Sample]]:
        """Return the responses to each prompt.

        Prompts of a lost engine are handed out again, first of all.

        Raises:
            RoleLost: an engine is lost, and may not be replaced.
        """
        finished: dict[int, list[Sample]] = {}
        self._hand_out_to_all()
        while (oldest := {rank: calls[0].answer for rank, calls in self._calls.items() if calls}) or self._lost:
            if not oldest:
                self._replace_lost()
                continue
            try:
                answers = self._engines.wait_any(oldest, deadline=self._deadline, what="generate")
            except RoleLost as lost:
                self._take_back(lost)
                continue
            for rank, samples in answers.items():
                self._calls[rank].popleft()
                finished.update(samples)
                self._taken[rank] -= samples.keys()
                self._hand_out(rank)
        return [finished[number] for number in range(len(finished))]

    def _hand_out_to_all(self) -> None:
        for calls in range(1, CALLS + 1):
            for rank in self._taken:
                if len(self._calls[rank]) < calls:
                    self._hand_out(rank)

    def _hand_out(self, rank: int) -> None:
        """Queue an engine's next call; none if it would bring no prompts and the engine finishes what it has without it."""
        taken, calls, requests = self._taken[rank], self._calls[rank], self._requests
        room = self._ahead if calls else self._at_a_time + self._ahead - len(taken)
        room = 0 if self._lost else min(room, self._share - len(taken), len(self._waiting))
        numbers = [self._waiting.popleft() for _ in range(room)]
        taken.update(numbers)
        is_last = not self._joins or not self._waiting or bool(self._lost)
        if numbers or (taken and (not calls or (is_last and calls[-1].leave))):
            leave = 0 if is_last else min(self._at_a_time, len(taken) - 1)
            arguments = (numbers, [requests.prompts[n] for n in numbers], [requests.seeds[n] for n in numbers])
            seen = {"pictures": [requests.pictures[n] for n in numbers]} if requests.pictures else {}
            calls.append(Call(self._engines.submit_one(rank, "serve", *arguments, leave=leave, **requests.options, **seen), leave))

    @property
    def _ahead(self) -> int:
        """Prompts that a call brings an engine which has as many as it samples."""
        if not self._joins:
            return 0
        return max(1, self._at_a_time // LEAST, min(self._at_a_time, len(self._waiting) // (PARTS * len(self._taken))))

    def _take_back(self, lost: RoleLost) -> None:
        for rank in lost.ranks:
            self._calls[rank].clear()
            self._waiting.extendleft(sorted(self._taken[rank], reverse=True))
            self._taken[rank].clear()
        if not lost.ranks:
            raise lost
        if self._drain:
            self._lost.append(lost)
            return
        self._replace(lost)
        self._hand_out_to_all()

    def _replace_lost(self) -> None:
        """Replace the engines that were lost, now that the others have finished what they had, and hand out prompts to all."""
        lost = RoleLost("; ".join(map(str, self._lost)), sorted({rank for one in self._lost for rank in one.ranks}))
        self._lost = []
        self._replace(lost)
        self._hand_out_to_all()
