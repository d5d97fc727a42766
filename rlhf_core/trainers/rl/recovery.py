"""Recovery of rollout engines: one that dies or misses a deadline is replaced, gets the policy's weights, and repeats its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlhf_core.engines.ray_actors import ActorGroup, Pending, RoleLost
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.mismatch import WeightSyncCheck
from rlhf_core.trainers.rl.turns import Turns

log = logging.getLogger("rlhf")


class Replacements:
    """Counts replaced actors of a run of the job, rollout engines and scorers together.

    Args:
        limit: rl.max_replacements.
    """

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0

    def allow(self, lost: RoleLost) -> bool:
        """Whether the lost actors may be replaced. If so, they are counted and logged."""
        if self.count + len(lost.ranks) > self.limit:
            log.warning("%s; %d actors were replaced before, and rl.max_replacements=%d allows no more", lost, self.count, self.limit)
            return False
        self.count += len(lost.ranks)
        log.warning("%s; replaced (%d of at most rl.max_replacements=%d), and the call is repeated", lost, self.count, self.limit)
        return True


@dataclass(frozen=True)
class EngineCall:
    """A call of every rollout engine that may have to be repeated.

    per_rank: each engine's arguments.    kwargs: arguments of all.    pending: each engine's result.
    """

    method: str
    per_rank: list[tuple]
    kwargs: dict[str, Any]
    pending: list[Pending]


class RolloutRecovery:
    """Calls of rollout engines, repeated by new engines where one is lost.

    Args:
        replacements: how many actors may be replaced.
        sync_check: what the probe must show of a new engine's weights.
        packed_weights: the trainer's policy, packed for an engine.
        turns: of engines and trainer ranks.
        renew: sends every engine the weights of `version` again.

    version: of the policy that every engine has.
    loaded: that policy's weights, where the trainer's policy may be newer than the engines' (rollout.one_step_off_policy).
    background: a call that runs while others are waited for; a new engine gets it too.
    """

    def __init__(
        self,
        job: RlJob,
        engines: ActorGroup,
        *,
        replacements: Replacements,
        sync_check: WeightSyncCheck,
        packed_weights: Callable[[], Pending],
        turns: Turns,
        renew: Callable[[], None],
    ):
        self.engines, self.version = engines, 0
        self.loaded: Pending | None = None
        self.background: EngineCall | None = None
        self._replacements, self._sync_check, self._packed_weights = replacements, sync_check, packed_weights
        self._turns, self._renew = turns, renew
        turns.start = self._start
        self._deadline, self._one_step_off_policy = job.rl.deadlines.step, job.rl.rollout.one_step_off_policy

    def submit(self, method: str, per_rank: list[tuple], **kwargs: Any) -> EngineCall:
        """Call every engine, without waiting."""
        return EngineCall(method, per_rank, kwargs, self.engines.submit(method, per_rank, **kwargs))

    def wait(self, call: EngineCall, *, given_by: ActorGroup | None = None) -> list[Any]:
        """Results of a call that needs no weights: the probe of the initial model, or the weights themselves.

        Args:
            given_by: the actors whose results are among the arguments; if one of them is lost, the engines are not to blame.
        Raises:
            RoleLost: an engine is lost, and may not be replaced.
        """
        return self._wait(call, self._start, given_by)

    def wait_with_weights(self, call: EngineCall) -> list[Any]:
        """Results of a call that needs the policy's weights, which a new engine gets first.

        Raises:
            RoleLost: an engine is lost, and may not be replaced; or the probe shows that a new engine's weights aren't the trainer's.
        """
        return self._wait(call, self.replace, None)

    def _wait(self, call: EngineCall, replace: Callable[[RoleLost], None], given_by: ActorGroup | None) -> list[Any]:
        return self.engines.wait_and_replace(
            call.pending, call.method, call.per_rank, deadline=self._deadline, replace=replace, given_by=given_by, **call.kwargs
        )

    def _start(self, lost: RoleLost) -> None:
        """Start new engines, which load the initial model.

        Raises:
            RoleLost: the limit of replacements is reached, or the cluster has no room.
        """
        if not self._replacements.allow(lost):
            raise lost
        try:
            with self._turns.room(lost.ranks):
                self.engines.replace(lost.ranks)
        except RoleLost as again:
            if not (self._turns.on and again.ranks):
                raise
            self._start(again)

    def replace(self, lost: RoleLost) -> None:
        """Start new engines, load the weights that the other engines have, and repeat the background call."""
        self._start(lost)
        if self._turns.on:  # the trainer's turn, in which all engines forget their weights
            self._renew()
            log.warning("rollout rank %s: replaced; all engines have policy version %d", lost.ranks, self.version)
            return
        weights = self.loaded if self._one_step_off_policy else self._packed_weights()
        for rank in lost.ranks:
            version, probe = self._load(rank, weights)
            reason = self._sync_check.disagreement(probe)
            if version != self.version or reason:
                raise RoleLost(
                    f"{lost}; rollout rank {rank}: expected a new engine with policy version {self.version} and the trainer's "
                    f"log-probabilities, got version {version}{' and ' + reason if reason else ''}"
                )
            log.warning("rollout rank %d: replaced; it has policy version %d and gives the trainer's log-probabilities", rank, version)
        if (call := self.background) is not None:
            self.engines.submit_again(lost.ranks, call.pending, call.method, call.per_rank, **call.kwargs)

    def _load(self, rank: int, weights: Pending | None) -> tuple[int, list[float]]:
        """Load weights into a new engine; None: the initial model's, which it has. An engine that is lost here is replaced in turn.

        Returns:
            The version of its weights, and the probe's log-probabilities.
        """
        ids = self._sync_check.probe_ids
        while True:
            try:
                if weights is None:
                    return self.version, self.engines.call_one(rank, "probe", ids, deadline=self._deadline)
                return self.engines.call_one(rank, "load_weights", weights, self.version, ids, deadline=self._deadline)
            except RoleLost as lost:
                self._start(lost)
