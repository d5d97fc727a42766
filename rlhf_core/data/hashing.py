"""Decisions by hash, never by position: ids of rows, splits of conversations, which rows stay, and which texts repeat."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from rlhf_core.data.schema import Message, Split

ID_BYTES = 8
CHUNK = 1024  # items whose keys are looked up together
T = TypeVar("T")


def conversation_text(messages: Sequence[Message]) -> str:
    """Return canonical text of a conversation: differences in case and white space are ignored."""
    return "\n".join(f"{m['role']}\t{' '.join([*m['content'].split(), *(m.get('extra') or '').split()]).casefold()}" for m in messages)


def prompt_name(messages: Sequence[Message]) -> str:
    """Return a name that equal conversations share, for tables."""
    return hashlib.sha256(conversation_text(messages).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def distinct_prompts(rows: Sequence[dict]) -> list[dict]:
    """Return the first row of each conversation."""
    first: dict[str, dict] = {}
    for row in rows:
        first.setdefault(conversation_text(row["messages"]), row)
    return list(first.values())


def split_text(row: Mapping[str, Any]) -> str:
    """Return the text that decides a row's split: of a conversation its beginning, up to the first message of the user.

    So a conversation and its continuations, whose earlier turns may be trained on, are in one split.
    """
    if "text" in row:
        return row["text"]
    return conversation_text(beginning(row["messages"]))


def beginning(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the messages up to the first one of the user; all of them if there is none."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return messages[: first + 1]


def split_of(text: str, *, validation_fraction: float, test_fraction: float, promotion_fraction: float) -> Split:
    """Return the split of a row's `split_text`: the same in every use and for every seed.

    The promotion split takes its share next to the test split, so moving the boundary between these two leaves validation and train as
    they are.
    """
    position = text_hash(text) / 2**64
    if position < test_fraction:
        return "test"
    if position < test_fraction + promotion_fraction:
        return "promotion"
    return "validation" if position < test_fraction + promotion_fraction + validation_fraction else "train"


def kept_by_weight(ids: np.ndarray, share: float, max_rows: int | None) -> np.ndarray:
    """Return which rows stay, [rows] bool: the given share, at most `max_rows`; the lowest ids win, and ids are hashes.

    The rows of a smaller share are a subset of the rows of a larger one.

    Args:
        ids: [rows] uint64.
    """
    count = round(share * len(ids))
    if max_rows is not None:
        count = min(count, max_rows)
    if count == len(ids):
        return np.ones(len(ids), dtype=bool)
    return ids <= np.partition(ids, count - 1)[count - 1] if count else np.zeros(len(ids), dtype=bool)


class Ids:
    """Ids of the rows of one source and use: a hash of source, row and the number of equal rows before it.

    The order of rows, their slices and their origins change no id. Memory: eight bytes a row.
    """

    def __init__(self, source: str):
        self._source = source
        self._seen = SeenKeys()

    def assign(self, rows: Sequence[dict]) -> np.ndarray:
        """Return the ids of the source's next rows, [rows] uint64; `hexadecimal` writes one as files have it."""
        contents = [self._content(row) for row in rows]
        ids = np.array([text_hash(f"{content}#0") for content in contents], dtype=np.uint64)
        before = self._seen.count_and_add(ids)  # equal rows have equal hashes
        for i in np.flatnonzero(before):
            ids[i] = text_hash(f"{contents[i]}#{before[i]}")
        return ids

    def _content(self, row: dict) -> str:
        plain = {key: value for key, value in row.items() if key not in ("slices", "origin")}
        return json.dumps([self._source, plain], sort_keys=True, ensure_ascii=False)


def hexadecimal(number: int) -> str:
    """Return an id as files have it."""
    return f"{number:0{2 * ID_BYTES}x}"


def with_ids(rows: Sequence[dict], source: str) -> list[dict]:
    """Return the rows with the columns id and source."""
    numbers = Ids(source).assign(rows)
    return [{"id": hexadecimal(number), "source": source, **row} for number, row in zip(numbers.tolist(), rows, strict=True)]


def text_hash(text: str) -> int:
    """Return 64 bits of the text's SHA-256: among 10**7 texts two share a hash with probability 10**-5."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:ID_BYTES], "big")


class SeenKeys:
    """Counts repetitions among very many 64-bit keys, in eight bytes for each occurrence.

    The keys are in sorted runs. A new run is merged with the one before it as long as that one is at most twice as long.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def count_and_add(self, keys: np.ndarray) -> np.ndarray:
        """Add the keys, and return how often each came before, [keys] int64; earlier positions in `keys` count too.

        Args:
            keys: [keys] uint64.
        """
        order = np.argsort(keys, kind="stable")
        ascending = keys[order]
        before = np.empty(len(keys), dtype=np.int64)
        before[order] = np.arange(len(keys)) - np.searchsorted(ascending, ascending)
        for run in self._runs:
            before += np.searchsorted(run, keys, side="right") - np.searchsorted(run, keys)
        while self._runs and 2 * len(ascending) >= len(self._runs[-1]):
            ascending = np.concatenate([self._runs.pop(), ascending])
            ascending.sort(kind="stable")  # a merge sort: both halves are sorted
        self._runs.append(ascending)
        return before


def chunks(items: Iterable[T], size: int = CHUNK) -> Iterator[list[T]]:
    """Yield the items as lists of at most `size`."""
    iterator = iter(items)
    while chunk := list(islice(iterator, size)):
        yield chunk
