"""How many actors may be replaced within a run."""

from __future__ import annotations

import logging

from rlhf_core.engines.ray_actors import RoleLost

log = logging.getLogger("rlhf")


class Replacements:
    """Counts the actors that were replaced, rollout engines and the scorers' together.

    Args:
        limit: rl.max_replacements, of a run of the job.
    """

    def __init__(self, limit: int):
        self.limit, self.count = limit, 0

    def allow(self, lost: RoleLost) -> bool:
        """Whether those that are lost may be replaced once more; then they count, and the log says so."""
        if self.count + len(lost.ranks) > self.limit:
            log.warning("%s; %d were replaced before, and rl.max_replacements=%d allows no more", lost, self.count, self.limit)
            return False
        self.count += len(lost.ranks)
        log.warning("%s; replaced (%d of at most rl.max_replacements=%d) and asked again", lost, self.count, self.limit)
        return True
