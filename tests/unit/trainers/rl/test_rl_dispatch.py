"""Prompts handed out to engines as these become free: on simulated engines, which sample several prompts at a time, a token per tick."""

from __future__ import annotations

import heapq
import math
from typing import Any

import numpy as np
import pytest

from rlhf_core.engines.ray.actors import RoleLost
from rlhf_core.trainers.rl.dispatch import Dispatcher, Requests
from rlhf_core.trainers.rl.recovery import Replacements

SLOTS = 8


class SimulatedEngines:
    """A group of engines in virtual time. Prompt [n] takes n ticks of a slot, and its response is its number.

    dies: the engine of this rank is lost at its third call.
    away: ticks from an answer until the caller's next call.
    """

    def __init__(self, count: int, *, dies: int | None = None, away: float = 0.0):
        self.unfinished: list[list[tuple[float, int]]] = [[] for _ in range(count)]  # (end, number), a heap
        self.free = [[0.0] * SLOTS for _ in range(count)]  # when each slot is free
        self.clock, self.calls, self.dies = [0.0] * count, [0] * count, dies
        self.now, self.away = 0.0, away  # the caller's time

    def __len__(self) -> int:
        return len(self.clock)

    def submit_one(self, rank: int, method: str, numbers: list[int], prompts: list, seeds: list, *, leave: int) -> tuple[float, int, Any]:
        assert method == "serve" and len(numbers) == len(prompts) == len(seeds)
        self.calls[rank] += 1
        self.clock[rank] = max(self.clock[rank], self.now)
        for number, (ticks,) in zip(numbers, prompts, strict=True):
            end = max(heapq.heappop(self.free[rank]), self.clock[rank]) + ticks
            heapq.heappush(self.free[rank], end)
            heapq.heappush(self.unfinished[rank], (end, number))
        finished = {}
        while len(self.unfinished[rank]) > leave:
            self.clock[rank], number = heapq.heappop(self.unfinished[rank])
            finished[number] = [number]
        lost = self.dies == rank and self.calls[rank] == 3
        return self.clock[rank], rank, RoleLost(f"rollout rank {rank}: dead", [rank]) if lost else finished

    def wait_any(self, references: dict[int, tuple], **_: Any) -> dict[int, Any]:
        ended, rank, answer = min(references.values(), key=lambda reference: reference[:2])
        self.now = ended + self.away
        if isinstance(answer, RoleLost):
            raise answer
        return {rank: answer}


class Replacing:
    """Replaces a lost engine by one that has nothing to do."""

    def __init__(self, engines: SimulatedEngines, limit: int = 1):
        self.engines, self.replacements = engines, Replacements(limit)

    def __call__(self, lost: RoleLost) -> None:
        if not self.replacements.allow(lost):
            raise lost
        for rank in lost.ranks:
            self.engines.unfinished[rank], self.engines.free[rank] = [], [self.engines.clock[rank]] * SLOTS


def run(engines: SimulatedEngines, ticks: list[int], **limits: int) -> list[list[int]]:
    requests = Requests([[n] for n in ticks], list(range(len(ticks))), {})
    return Dispatcher(engines, Replacing(engines, **limits), requests, at_a_time=SLOTS, joins=True, deadline=1.0).run()


def in_equal_shares(ticks: list[int], count: int) -> float:
    engines = SimulatedEngines(count)
    for rank in range(count):
        share = ticks[rank::count]
        engines.submit_one(rank, "serve", list(range(len(share))), [[n] for n in share], share, leave=0)
    return max(engines.clock)


@pytest.mark.parametrize("count", [2, 4])
def test_with_lengths_of_a_heavy_tail_the_time_is_near_the_ideal(count: int):
    """Lengths are log-normal up to a limit, and every fourth prompt is a harder one."""
    generator = np.random.default_rng(0)
    lengths = generator.lognormal(4, 1, size=1600)
    lengths[::4] *= 3  # with 2 or 4 engines all of these belong to one of equal shares
    ticks = lengths.clip(1, 500).astype(int).tolist()
    ideal = sum(ticks) / count / SLOTS
    engines = SimulatedEngines(count)
    assert run(engines, ticks) == [[n] for n in range(len(ticks))]
    assert max(engines.clock) < 1.1 * ideal < 1.25 * ideal < in_equal_shares(ticks, count)


def test_an_engine_does_not_wait_for_its_caller():
    """An engine works only in calls here: it would lose 20 ticks between two of them, were the next one not queued."""
    ticks = np.random.default_rng(0).lognormal(4, 1, size=1600).clip(1, 500).astype(int).tolist()
    prompt, late = SimulatedEngines(2), SimulatedEngines(2, away=20.0)
    assert run(late, ticks) == run(prompt, ticks) == [[n] for n in range(1600)]
    assert max(late.clock) < 1.02 * max(prompt.clock)
    assert max(late.calls) < 150  # of 800 prompts each; a call costs the engine something too


def test_an_engine_whose_batch_cannot_be_joined_gets_whole_batches():
    class Batches(SimulatedEngines):
        def submit_one(self, rank: int, method: str, numbers: list[int], prompts: list, seeds: list, *, leave: int):
            sizes.append(len(numbers))
            return super().submit_one(rank, method, numbers, prompts, seeds, leave=0)

    sizes: list[int] = []
    requests = Requests([[n] for n in [3, 9, 1, 30] * 20], list(range(80)), {})
    engines = Batches(2)
    found = Dispatcher(engines, Replacing(engines), requests, at_a_time=SLOTS, joins=False, deadline=1.0).run()
    assert found == [[n] for n in range(80)] and sizes == [SLOTS] * 10


@pytest.mark.parametrize("prompts", [0, 1, 3, 16, 17, 40])
def test_any_number_of_prompts_is_answered_once_each(prompts: int):
    engines = SimulatedEngines(2)
    assert run(engines, [5] * prompts) == [[n] for n in range(prompts)]
    assert prompts > 2 or math.isclose(sum(engines.clock), 5 * prompts)


def test_prompts_of_a_lost_engine_are_handed_out_again():
    engines = SimulatedEngines(2, dies=1)
    assert run(engines, [3, 9, 1, 30] * 20) == [[n] for n in range(80)]
    assert engines.calls[1] > 3


def test_a_lost_engine_is_replaced_when_the_others_have_finished_what_they_had():
    engines, unfinished = SimulatedEngines(3, dies=1), []

    class Watched(Replacing):
        def __call__(self, lost: RoleLost) -> None:
            unfinished.append([len(engines.unfinished[rank]) for rank in (0, 2)])
            super().__call__(lost)

    ticks = [3, 9, 1, 30] * 20
    requests = Requests([[n] for n in ticks], list(range(80)), {})
    found = Dispatcher(engines, Watched(engines), requests, at_a_time=SLOTS, joins=True, deadline=1.0, drain=True).run()
    assert found == [[n] for n in range(80)] and unfinished == [[0, 0]] and min(engines.calls) > 3


def test_a_loss_beyond_the_limit_ends_the_step():
    with pytest.raises(RoleLost, match="rollout rank 1: dead"):
        run(SimulatedEngines(2, dies=1), [3, 9, 1, 30] * 20, limit=0)
