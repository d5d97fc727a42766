"""Which of very many keys came before, in eight bytes for each time that one came."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import TypeVar

import numpy as np

PART = 1024  # items whose keys are looked up together
T = TypeVar("T")


def key_of(text: str) -> int:
    """64 bits of a hash: of 10**7 texts two others have the same key with a chance of 10**-5."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big")


class Seen:
    """Keys in sorted runs, of which two are merged as soon as the later one is no smaller than half of the other."""

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def count_and_add(self, keys: np.ndarray) -> np.ndarray:
        """How often each key came before, [keys] int64, among those before it in `keys` too.

        Args:
            keys: [keys] uint64.
        """
        order = np.argsort(keys, kind="stable")
        ascending = keys[order]
        before = np.empty(len(keys), dtype=np.int64)
        before[order] = np.arange(len(keys)) - np.searchsorted(ascending, ascending)
        for run in self._runs:
            before += np.searchsorted(run, keys, side="right") - np.searchsorted(run, keys)
        self._add(ascending)
        return before

    def _add(self, run: np.ndarray) -> None:
        while self._runs and 2 * len(run) >= len(self._runs[-1]):
            run = np.concatenate([self._runs.pop(), run])
            run.sort(kind="stable")  # which merges
        self._runs.append(run)


def in_parts(items: Iterable[T], size: int = PART) -> Iterator[list[T]]:
    """The items, at most `size` at a time."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
