"""Episodes ahead of the trainer: those of several steps are played at the same time, while it trains (ahead.py says which ones).

Between two weight updates the engines are called several times. A call has every reply that is asked for by then, and ends once those of
the step that is due have ended, and after twice the tokens of a mean reply; a later step's reply that hasn't ended then is cut, and is
continued in the next call, after an update with new weights.

Tools run while the engines sample and the trainer trains. What an episode does after a reply is awaited at a counted place, whatever the
clock says: before the next call but one; if there is nothing to call the engines for, before the next one; and what hasn't been awaited at
an update, before the first call after it. So calls depend on seeds, weights and what environments answer, not on how long they take, and a
run has the same bits each time. An interrupted run plays its episodes again, with the replies that they had.

That is rl.rollout.schedule `counted`. With `free` a call has the replies of any step that are asked for by then, and takes twice the tokens
of a mean reply; calls go on until the update has ended.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from rlhf_core.agents.chat import Sampled
from rlhf_core.agents.environment import Asked, Environment, Episodes
from rlhf_core.engines.rollout.requests import Request, Sample, request_seeds, segment_seed
from rlhf_core.trainers.rl.ahead import Admitted, Place, RolloutsAhead, extended
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.rollouts import Dealt, RolloutEngines
from rlhf_core.types import Prompt, Rollout

POLL_SECONDS = 0.1  # between two looks at whether the update has ended
REPLIES = 2  # a call of the engines is as long as so many replies of the mean length, or as those that are due

log = logging.getLogger("rlhf")


class EpisodesAhead(RolloutsAhead):
    """Draws each step's episodes, and those of later steps at the same time."""

    def __init__(self, job: RlJob, engines: RolloutEngines, environment: Environment):
        super().__init__(job, engines)
        self._environment = environment
        self._episodes = environment.begin(job.rl.rollout.max_new_tokens)
        self._compared: Future[list[Sample]] = Future()
        self._played: Future[Admitted] | None = None
        self._trained = threading.Event()  # the update has ended

    def _complete(self, admitted: Admitted, *, due: int) -> Admitted:
        return self._play(admitted, due=due, calls=0, tokens=self._rl.rollout.max_new_tokens)

    def _whole(self, prompts: Sequence[Prompt], *, step: int, turn: int) -> list[Rollout]:
        return self._engines.generate(prompts, step=step, turn=turn)

    def begin(self, *, step: int) -> None:
        """Begin as `RolloutsAhead.begin` does. A thread calls the engines."""
        if step + 1 == self._rl.steps:
            return
        self._short, self._compared = self._submit_short(step + 1), Future()
        trained, dealt, drawn = self._drawn.rollouts[step], self._short[1], self._drawn
        # Episodes that are in flight during max_lag updates then end in time for theirs, if they have no more turns than these.
        calls = math.ceil(max(r.dialogue.turns for r in trained) / self._rl.rollout.max_lag)
        tokens = math.ceil(REPLIES * sum(r.num_sampled for r in trained) / sum(r.dialogue.turns for r in trained))
        self._trained.clear()

        def work() -> Admitted:
            settle(self._compared, lambda: self._engines.wait_segments(dealt))
            self._compared.result()
            if self._rl.rollout.samples_freely:
                return self._play_freely(drawn, due=step + 1, tokens=tokens)
            return self._play(drawn, due=step + 1, calls=calls, tokens=tokens)

        self._played = in_background(work)

    def end(self) -> None:
        played, self._played = self._played, None
        self._trained.set()
        self._admitted = self._drawn if played is None else played.result()

    def look(self) -> None:
        """Raise what has ended the thread that calls the engines, or what plays episodes."""
        self._environment.look()
        if self._played is not None:
            if not self._played.done():
                return  # its thread calls the engines, and replaces those that die
            self._played.result()
        super().look()

    def _wait_short(self, dealt: Dealt) -> list[Sample]:
        return self._compared.result()

    def _play(self, admitted: Admitted, *, due: int, calls: int, tokens: int) -> Admitted:
        """Play until the episodes of a step have ended.

        Args:
            calls: of the engines, at least.    tokens: one after the other, in each call at least.
        """
        table = _Table(self._job, self._engines, self._episodes, admitted)
        awaited, late = table.playing(), list[Place]()  # late: to be awaited before the next call but one
        asked: dict[Place, Asked] = {}
        while True:
            asked |= table.wait(awaited)
            if not asked and calls <= 0:  # if this is the end, tools of other steps needn't be awaited
                asked = table.wait([place for place in late if place[0] == due])
                late = [place for place in late if place[0] != due] if table.playing(due) else []
                asked, late = asked | table.wait(late), []
            elif not asked:
                asked, late = table.wait(late), []
            if not asked or (calls <= 0 and not table.playing(due)):
                return table.admitted(complete=due)
            answered = table.call(asked, due=due, tokens=tokens)
            asked = {place: one for place, one in asked.items() if place not in answered}
            awaited, late, calls = late, answered, calls - 1

    def _play_freely(self, admitted: Admitted, *, due: int, tokens: int) -> Admitted:
        """Play until the episodes of a step have ended, and the update too.

        Args:
            tokens: of a call of the engines, one after the other.
        """
        table, asked = _Table(self._job, self._engines, self._episodes, admitted), dict[Place, Asked]()
        while table.playing() and not (self._trained.is_set() and not table.playing(due)):
            tools = [place for place in table.playing() if place not in asked]
            asked |= table.poll(tools, 0.0 if asked else POLL_SECONDS)
            if asked:
                answered = table.call(asked, due=None, tokens=tokens)
                asked = {place: one for place, one in asked.items() if place not in answered}
        return table.admitted(complete=due)


class _Table:
    """The admitted episodes while they are played."""

    def __init__(self, job: RlJob, engines: RolloutEngines, episodes: Episodes, admitted: Admitted):
        self._engines, self._episodes, self._before = engines, episodes, admitted
        self._rollouts = {(step, i): rollout for step, rows in admitted.rollouts.items() for i, rollout in enumerate(rows)}
        self._seeds = {step: request_seeds(job.seed, step, len(rows)) for step, rows in admitted.rollouts.items()}
        for place in self.playing():
            if place not in episodes:
                episodes.start(place, self._rollouts[place])

    def playing(self, step: int | None = None) -> list[Place]:
        """Return the episodes that haven't ended; of a step, or of all."""
        return [place for place, rollout in self._rollouts.items() if rollout.dialogue is None and step in (None, place[0])]

    def admitted(self, *, complete: int) -> Admitted:
        rollouts = {step: [self._rollouts[step, i] for i in range(len(rows))] for step, rows in self._before.rollouts.items()}
        return replace(self._before, rollouts=rollouts, complete=complete)

    def wait(self, places: Sequence[Place]) -> dict[Place, Asked]:
        """Return the replies that these episodes ask for; those that don't have ended."""
        found: dict[Place, Asked] = {}
        while places:
            further, places = self._note(*self._episodes.wait(places))
            found |= further
        return found

    def poll(self, places: Sequence[Place], seconds: float) -> dict[Place, Asked]:
        """Return the replies that these episodes ask for by now; if none does, waits for one so long."""
        return self._note(*self._episodes.poll(places, seconds))[0]

    def _note(self, asked: dict[Place, Asked], ended: dict[Place, Rollout]) -> tuple[dict[Place, Asked], list[Place]]:
        """Return the replies that are asked for, and the places of those that an interrupted run had already, which get them."""
        for place, rollout in (ended | {place: one.so_far for place, one in asked.items()}).items():
            self._rollouts[place] = resumed(self._rollouts[place], rollout)
        full = [place for place, one in asked.items() if self._is_complete(place, one)]
        self._deliver({place: asked[place] for place in full})
        return {place: one for place, one in asked.items() if place not in full}, full

    def call(self, asked: dict[Place, Asked], *, due: int | None, tokens: int) -> list[Place]:
        """Continue replies by one call of the engines. Returns the places of those that have ended.

        Args:
            due: the step whose replies end the call; None: it is as long as `tokens`.
        """
        places = sorted(asked, key=lambda place: (place[0] != due, place))
        requests = [self._request(place, asked[place]) for place in places]
        dealt = self._engines.submit_segments(requests, due=sum(step == due for step, _ in places), least=tokens)
        for place, sample in zip(places, self._engines.wait_segments(dealt), strict=True):
            self._rollouts[place] = extended(self._rollouts[place], sample)
        complete = [place for place in asked if self._is_complete(place, asked[place])]
        self._deliver({place: asked[place] for place in complete})
        return complete

    def _request(self, place: Place, asked: Asked) -> Request:
        """Return the request for what is left of a reply. Its seed follows from the episode's and the number of all tokens before."""
        (step, i), before, ids = place, asked.so_far.ids, self._rollouts[place].ids
        given = ids[len(before) :]
        return Request(before, given, segment_seed(self._seeds[step][i], len(ids)), asked.room - len(given))

    def _is_complete(self, place: Place, asked: Asked) -> bool:
        rollout = self._rollouts[place]
        return rollout.finished or rollout.num_tokens - asked.so_far.num_tokens == asked.room

    def _deliver(self, asked: dict[Place, Asked]) -> None:
        self._episodes.deliver(
            {
                place: Sampled(self._rollouts[place].spans[len(one.so_far.spans) :], self._rollouts[place].finished)
                for place, one in asked.items()
            }
        )


def resumed(before: Rollout, now: Rollout) -> Rollout:
    """Return an episode that asks for a reply or has ended, with the tokens that this reply has already.

    Args:
        before: as it was known.    now: as `play` has it.
    """
    kept, spans = len(now.spans), before.spans
    if now.dialogue is None and len(spans) > kept and replace(before, spans=spans[:kept]).ids == now.ids:
        return replace(now, spans=[*now.spans, *spans[kept:]], finished=before.finished)
    sampled = max((i + 1 for i, span in enumerate(spans) if span.version is not None), default=0)
    known = replace(before, spans=spans[:sampled]).ids
    if sampled and now.ids[: len(known)] != known:
        log.warning(
            "rl.environment: expected an interrupted episode to go on as before, got other texts of its tools or users; it goes on from "
            "these, and the run won't end with the bits of one that was not interrupted"
        )
    return now


def settle(future: Future[Any], work: Callable[[], Any]) -> None:
    """Give a future what a function returns or raises."""
    try:
        future.set_result(work())
    except BaseException as error:  # raised where the future is waited for
        future.set_exception(error)


def in_background(work: Callable[[], Any]) -> Future[Any]:
    """Return what a function returns or raises in a thread, which doesn't keep the process from ending."""
    future: Future[Any] = Future()
    threading.Thread(target=settle, args=(future, work), name="episodes ahead", daemon=True).start()
    return future
