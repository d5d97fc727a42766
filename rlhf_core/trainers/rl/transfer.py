"""Weights from the policy's trainer ranks to the rollout engines: the driver's side."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.ray.places import RoleLost
from rlhf_core.engines.transfer.sender import Sent, Target
from rlhf_core.trainers.rl.groups import TrainerGroup


class WeightTransfer:
    """Transfers of the policy's weights, as the driver calls them.

    Args:
        ways: of each engine.
        workers: processes of an engine that have weights.
        deadline: seconds of a transfer.

    nbytes: sent so far, to all engines together.
    """

    def __init__(self, policy: TrainerGroup, engines: ActorGroup, ways: Sequence[str], *, workers: int, deadline: float):
        self._policy, self._engines, self._ways, self._workers, self._deadline = policy, engines, ways, workers, deadline
        self.nbytes = 0

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
        self.nbytes += sent.nbytes
        wrong = {engine: found for engine, (found, _) in sent.answers.items() if found != version}
        if wrong:
            raise RuntimeError(f"rollout engines: expected policy version {version} everywhere, got {wrong}")
        return sent, self._engines.given_up(sent.lost, "receive_weights") if sent.lost else None
