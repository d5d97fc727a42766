"""Logs why responses have no score, once for each reason."""

from __future__ import annotations

import logging

from rlhf_core.config import shown

log = logging.getLogger("rlhf")


class Reasons:
    """Logs each reason of one scorer once. Reasons are the same if their text up to the first colon is."""

    def __init__(self, name: str):
        self._name, self._said = name, set()

    def __call__(self, reason: str, *, count: int) -> None:
        kind = reason.partition(":")[0]
        if kind not in self._said:
            self._said.add(kind)
            log.warning("scorer %s: expected a score for every response, got none for %d; %s", self._name, count, shown(reason, 1000))
