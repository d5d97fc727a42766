"""Recovery of rollout engines: one that dies or misses a deadline is replaced, gets the policy's weights, and repeats its calls."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.engines.ray.actors import ActorGroup, Pending, RoleLost
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.mismatch import WeightSyncCheck
from rlhf_core.trainers.rl.transfer import WeightTransfer
from rlhf_core.trainers.rl.turns import GpuTimeSharing

log = logging.getLogger("rlhf")


class Replacements:
    """Counts replaced actors of a run of the job, rollout engines and scorers together.

    Args:
        limit: rl.max_replacements.
    """

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0

    def has_room(self, lost: RoleLost) -> bool:
        """Return whether the lost actors may be replaced."""
        return self.count + len(lost.ranks) <= self.limit

    def allow(self, lost: RoleLost) -> bool:
        """As `has_room`; if so, they are counted and logged."""
        if not self.has_room(lost):
            log.warning("%s; %d actors were replaced before, and rl.max_replacements=%d allows no more", lost, self.count, self.limit)
            return False
        self.count += len(lost.ranks)
        log.warning("%s; to be replaced (%d of at most rl.max_replacements=%d), and the call is repeated", lost, self.count, self.limit)
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
        transfer: sends the trainer's policy to engines.
        turns: of engines and trainer ranks.
        renew: sends every engine the weights of `version` again.
        check_trainers: raises RoleLost if a trainer rank is lost.

    version: of the policy that every engine has.
    loaded: whether engines have another policy than the initial model.
    background: a call that runs while others are waited for; a new engine gets it too.
    """

    def __init__(
        self,
        job: RlJob,
        engines: ActorGroup,
        *,
        replacements: Replacements,
        sync_check: WeightSyncCheck,
        transfer: WeightTransfer,
        turns: GpuTimeSharing,
        renew: Callable[[], None],
        check_trainers: Callable[[], None],
    ):
        self.engines, self.version, self.loaded = engines, 0, False
        self.background: EngineCall | None = None
        self._replacements, self._sync_check, self._transfer = replacements, sync_check, transfer
        self._turns, self._renew, self._check_trainers = turns, renew, check_trainers
        turns.start = self._start
        self._deadline, self._samples_ahead = job.rl.deadlines.step, job.rl.rollout.max_lag > 0

    def submit(self, method: str, per_rank: list[tuple], **kwargs: Any) -> EngineCall:
        """Call every engine, without waiting."""
        return EngineCall(method, per_rank, kwargs, self.engines.submit(method, per_rank, **kwargs))

    def look(self) -> None:
        """Log an engine that has died while others are waited for. Its next call replaces it.

        Raises:
            RoleLost: it may not be replaced.
        """
        if dead := self.engines.find_newly_dead():
            lost = self.engines.dead(dead, "its work")
            if not self._replacements.has_room(lost):
                raise lost
            log.warning("%s; to be replaced once it is called", lost)

    def wait_with_weights(self, call: EngineCall) -> list[Any]:
        """Return the results of a call that needs the policy's weights, which a new engine gets first.

        Raises:
            RoleLost: an engine is lost, and may not be replaced; or the probe shows that a new engine's weights aren't the trainer's.
        """
        return self._wait(call, self.replace)

    def _wait(self, call: EngineCall, replace: Callable[[RoleLost], None]) -> list[Any]:
        return self.engines.wait_and_replace(
            call.pending, call.method, call.per_rank, deadline=self._deadline, replace=replace, **call.kwargs
        )

    def load_weights(self, *, version: int) -> tuple[list[list[float]], list[float]]:
        """Send the trainer's policy to every engine. One that is lost in the meantime is replaced, and the new one gets it.

        Returns:
            Log-probabilities of the probe: each engine's, and the trainer's.
        Raises:
            RoleLost: an engine is lost, and may not be replaced; or a trainer rank is lost.
        """
        while True:
            self._turns.transfer()
            probes, trainer = self._send(range(len(self.engines)), version=version)
            self.version, self.loaded, self._turns.stale = version, True, False
            if not self._turns.on:
                return [probes[rank] for rank in sorted(probes)], trainer
            self._turns.engines()
            found = self.probes()
            if not self._turns.stale:
                return found, trainer

    def probes(self) -> list[list[float]]:
        """Return each engine's log-probabilities of the probe, with the weights that it has."""
        return self._wait(self.submit("probe", [(self._sync_check.probe_ids,)] * len(self.engines)), self._start)

    def _send(self, ranks: Sequence[int], *, version: int, kept: bool = False) -> tuple[dict[int, list[float]], list[float]]:
        """Send weights to some engines, and to the new ones of those that are lost. Returns the probes, by rank, and the trainer's.

        Where engines and trainer take turns, engines have no cache yet and no probe.
        """
        ids, probes = self._sync_check.probe_ids, {}
        while True:
            sent, lost = self._transfer.send(ranks, version=version, ids=ids, engines_probe=not self._turns.on, kept=kept)
            probes |= {rank: probe for rank, (_, probe) in sent.answers.items()}
            if lost is None:
                return probes, sent.probe
            self._start(lost)
            ranks = lost.ranks

    def _start(self, lost: RoleLost) -> None:
        """Start new engines, which load the initial model.

        Raises:
            RoleLost: the limit of replacements is reached, or the cluster has no room; or a trainer rank is lost too, whose node may have
                been the engine's.
        """
        if not self._replacements.allow(lost):
            raise lost
        try:
            with self._turns.room(lost.ranks):
                self.engines.replace(lost.ranks, self._check_no_trainer_lost)
        except RoleLost as again:
            if not (self._turns.on and again.ranks):
                raise
            self._start(again)

    def _check_no_trainer_lost(self) -> None:
        try:
            self._check_trainers()
        except RoleLost as lost:
            raise RoleLost(str(lost)) from lost  # without its ranks, which aren't engines

    def replace(self, lost: RoleLost) -> None:
        """Start new engines, load the weights that the other engines have, and repeat the background call."""
        self._start(lost)
        if self._turns.on:  # the trainer's turn, in which all engines forget their weights
            self._renew()
            log.warning("rollout rank %s: replaced; all engines have policy version %d", lost.ranks, self.version)
            return
        for rank, probe in self._load(lost.ranks).items():
            if reason := self._sync_check.disagreement(probe):
                raise RoleLost(f"{lost}; rollout rank {rank}: expected a new engine with the trainer's log-probabilities, got {reason}")
            log.warning("rollout rank %d: replaced; it has policy version %d and gives the trainer's log-probabilities", rank, self.version)
        if (call := self.background) is not None:
            self.engines.submit_again(lost.ranks, call.pending, call.method, call.per_rank, **call.kwargs)

    def _load(self, ranks: Sequence[int]) -> dict[int, list[float]]:
        """Give new engines the weights that the other engines have. Returns their log-probabilities of the probe.

        With rollouts ahead the trainer's policy may be newer than the engines'.
        """
        if self.loaded or not self._samples_ahead:
            return self._send(ranks, version=self.version, kept=self._samples_ahead)[0]
        found: dict[int, list[float]] = {}
        for rank in ranks:
            while rank not in found:
                try:
                    found[rank] = self.engines.call_one(rank, "probe", self._sync_check.probe_ids, deadline=self._deadline)
                except RoleLost as lost:
                    self._start(lost)
        return found
