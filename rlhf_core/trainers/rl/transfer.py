"""Weights from the policy's trainer ranks to the rollout engines: the driver's side."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.ray.places import RoleLost
from rlhf_core.engines.transfer.sender import Sent, Target, Traffic
from rlhf_core.trainers.rl.groups import TrainerGroup

log = logging.getLogger("rlhf")


class WeightTransfer:
    """Transfers of the policy's weights, as the driver calls them.

    Args:
        ways: of each engine.
        workers: processes of an engine that have weights.
        deadline: seconds of a transfer.
        sends_changes: rl.rollout.send_changes.

    traffic: sent since it was last taken.
    """

    def __init__(
        self, policy: TrainerGroup, engines: ActorGroup, ways: Sequence[str], *, workers: int, deadline: float, sends_changes: bool = False
    ):
        self._policy, self._engines, self._ways, self._workers, self._deadline = policy, engines, ways, workers, deadline
        self._sends_changes = sends_changes
        self._compared: int | None = None  # the last version that was compared with the one before
        self.traffic = Traffic()

    def take_traffic(self) -> dict[str, float]:
        """Return columns of the timings for what was sent since the last call: bytes to all engines, and with rl.rollout.send_changes the
        fraction of numbers that had changed, and the layers that were sent again.
        """
        sent, self.traffic = self.traffic, Traffic()
        if not self._sends_changes:
            return {"sync_bytes": sent.nbytes}
        changed = sent.changed / sent.numbers if sent.numbers else math.nan
        return {"sync_bytes": sent.nbytes, "sync_changed": changed, "sync_resent": len(sent.resent)}

    def send(
        self, ranks: Sequence[int], *, version: int, ids: Sequence[int], engines_probe: bool = True, kept: bool = False
    ) -> tuple[Sent, RoleLost | None]:
        """Send the policy's weights to these engines.

        Args:
            ids: of the probe, which the trainer computes in the end.
            engines_probe: so do the engines.
            kept: send what was sent last.
        Returns:
            What has arrived; and the loss of the other engines.
        Raises:
            RoleLost: a trainer rank is lost.
        """
        targets = [Target(rank, self._engines.peer(rank), self._ways[rank], self._workers) for rank in ranks]
        pending = self._policy.submit(
            "send_weights", [(targets,)] * len(self._policy), version=version, ids=list(ids), engines_probe=engines_probe, kept=kept
        )
        sent, *_ = self._policy.wait(pending, deadline=self._deadline, what="send_weights")
        if version == self._compared:  # sent again, for a new engine: compared with itself
            sent.traffic.numbers = sent.traffic.changed = 0
        self._compared = version
        self.traffic.add(sent.traffic)
        for what in sent.traffic.resent:
            log.warning("weight sync, version %d: rollout %s: the changes gave other bytes than the trainer's; sent whole", version, what)
        wrong = {engine: found for engine, (found, _) in sent.answers.items() if found != version}
        if wrong:
            raise RuntimeError(f"rollout engines: expected policy version {version} everywhere, got {wrong}")
        return sent, self._engines.given_up(sent.lost, "receive_weights") if sent.lost else None
