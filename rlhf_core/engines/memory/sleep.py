"""Tracks what is awake in a rollout engine that takes turns with a trainer on its GPU: weights, and the cache of keys and values."""

from __future__ import annotations

from collections.abc import Sequence

TAGS = ("weights", "kv_cache")  # vLLM's names


class Awake:
    """Parts of an engine that are awake; all are at first.

    has_weights: False from a sleep of level 2, which drops the weights, until new ones are loaded.
    """

    def __init__(self) -> None:
        self._asleep: set[str] = set()
        self.has_weights = True

    @property
    def is_awake(self) -> bool:
        return not self._asleep

    @property
    def is_half_awake(self) -> bool:
        return len(self._asleep) == 1

    def falls_asleep(self, level: int) -> bool:
        """Mark all parts as asleep. Return False if they were already."""
        if self._asleep == set(TAGS):
            return False
        self._asleep = set(TAGS)
        self.has_weights = self.has_weights and level == 1
        return True

    def wakes_up(self, tags: Sequence[str] | None) -> tuple[str, ...]:
        """Mark the sleeping parts among `tags` as awake and return them; None wakes all."""
        woken = tuple(tag for tag in TAGS if tag in self._asleep and (tags is None or tag in tags))
        self._asleep -= set(woken)
        return woken

    def loads_weights(self) -> None:
        """Mark the weights as loaded.

        Raises:
            RuntimeError: the weights have no memory.
        """
        if "weights" in self._asleep:
            raise RuntimeError("rollout engine: expected it to be awake for new weights, got an engine that sleeps; call wake_up first")
        self.has_weights = True

    def need(self, what: str) -> None:
        """Check that the engine is awake and has weights for `what`.

        Raises:
            RuntimeError: the engine is asleep, or has no weights yet.
        """
        if self._asleep:
            raise RuntimeError(f"rollout engine: expected it to be awake for {what}, got an engine that sleeps; call wake_up first")
        if not self.has_weights:
            raise RuntimeError(f"rollout engine: expected weights for {what}, got none since a sleep of level 2; load them first")
