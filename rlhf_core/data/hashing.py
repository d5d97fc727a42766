"""Hashing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import TypeVar

import numpy as np

from rlhf_core.data.schema import Message, Split

ID_BYTES = 8
KEY_BYTES = 16  # two of 10**9 texts share a key with a chance of 10**-21

PART = 1024  # items whose keys are looked up together
T = TypeVar("T")


def conversation_text(messages: Sequence[Message]) -> str:
    """Canonical text of a conversation: case and white space don't make another one."""
    return "\n".join(f"{m['role']}\t{' '.join([*m['content'].split(), *(m.get('extra') or '').split()]).casefold()}" for m in messages)


def split_of(text: str, *, validation_fraction: float, test_fraction: float, promotion_fraction: float) -> Split:
    """The split of a conversation's canonical text, the same in every use and for every seed.

    Promotion lies beside test: what one of the two gives to the other moves no row into or out of validation and train.
    """
    position = _fraction(text)
    if position < test_fraction:
        return "test"
    if position < test_fraction + promotion_fraction:
        return "promotion"
    return "validation" if position < test_fraction + promotion_fraction + validation_fraction else "train"


class Ids:
    """Ids of the rows of one source and use: a hash of source and row and, of equal rows, of how many came before.

    The order of the rows changes no id, nor do slices and origins. Eight bytes of each row are in memory.
    """

    def __init__(self, source: str):
        self._source = source
        self._seen = Seen()

    def of_next(self, rows: Sequence[dict]) -> np.ndarray:
        """[rows] uint64, the beginnings of the hashes; `hexadecimal` writes one."""
        contents = [self._content(row) for row in rows]
        ids = np.array([_id(content, 0) for content in contents], dtype=np.uint64)
        before = self._seen.count_and_add(ids)  # equal rows have equal hashes
        for i in np.flatnonzero(before):
            ids[i] = _id(contents[i], before[i])
        return ids

    def _content(self, row: dict) -> str:
        plain = {key: value for key, value in row.items() if key not in ("slices", "origin")}
        return json.dumps([self._source, plain], sort_keys=True, ensure_ascii=False)


def _id(content: str, before: int) -> int:
    return int.from_bytes(text_key(f"{content}#{before}")[:ID_BYTES], "big")


def hexadecimal(number: int) -> str:
    """An id as it stands in files."""
    return f"{number:0{2 * ID_BYTES}x}"


def with_ids(rows: Sequence[dict], source: str) -> list[dict]:
    """Rows with source and id."""
    numbers = Ids(source).of_next(rows)
    return [{"id": hexadecimal(number), "source": source, **row} for number, row in zip(numbers.tolist(), rows, strict=True)]


def kept(ids: np.ndarray, share: float, max_rows: int | None) -> np.ndarray:
    """Which rows stay, [rows] bool: the given share, at most `max_rows`, those with the lowest ids, which are hashes.

    A smaller share is a part of a larger one.

    Args:
        ids: [rows] uint64, the ids read as hexadecimal numbers.
    """
    count = round(share * len(ids))
    if max_rows is not None:
        count = min(count, max_rows)
    if count == len(ids):
        return np.ones(len(ids), dtype=bool)
    return ids <= np.partition(ids, count - 1)[count - 1] if count else np.zeros(len(ids), dtype=bool)


def text_key(text: str) -> bytes:
    """The beginning of a SHA-256, which stands for a text that would fill the memory."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:KEY_BYTES]


def _fraction(text: str) -> float:
    """A hash of the text as a number in [0, 1)."""
    return int.from_bytes(text_key(text)[:8], "big") / 2**64


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
