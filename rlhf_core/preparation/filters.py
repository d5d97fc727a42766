"""Rows that prepare_data removes: what a source's key `drop` names, and what the chat template refuses.

The kinds are defined as in the expectations of their names (data.validation.expectations), which then find nothing.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rlhf_core.data.control import is_blank
from rlhf_core.data.hashing import SeenKeys, text_hash
from rlhf_core.data.schema import TEXTS, Message, RowWriter, edgeless, open_rows, read_batches
from rlhf_core.models.template import Unrenderable, conversation_key, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REASONS = {
    "empty": "with a text in which nothing is visible (empty)",
    "identical": "whose chosen and rejected are the same text (identical)",
    "contradictory": "that another row contradicts (contradictory)",
    "duplicate": "that another row repeats (duplicate)",
    "too_long": "longer than model.max_length (too_long)",
}
_SIDE = np.uint64(1)  # the lowest bit of a pair's key: which side is preferred


def row_fault(row: Mapping[str, Any], drop: Collection[str]) -> str | None:
    """Return the first of `empty` and `identical` that is in `drop` and true of the row."""
    if "empty" in drop:
        texts = [row[name] for name in TEXTS if row.get(name) is not None]
        messages = row.get("messages") or ()
        if any(map(is_blank, texts)) or any(is_blank(m["content"]) and not m.get("extra") for m in messages):
            return "empty"
    sides = row.get("chosen"), row.get("rejected")
    if "identical" in drop and None not in sides and sides[0].strip() == sides[1].strip():
        return "identical"
    return None


class KeptRows:
    """The rows of a file that haven't been dropped. The file has all of them until `write`.

    Memory: a byte for each row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._kept = np.ones(open_rows(path).metadata.num_rows, dtype=bool)

    def batches(self, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        return self._chosen(self._kept, columns)

    def drop(self, dropped: np.ndarray) -> Iterator[dict]:
        """Drop the rows of a mask over those that are kept, [rows] bool. Returns them."""
        whole = np.zeros_like(self._kept)
        whole[self._kept] = dropped
        self._kept = self._kept & ~whole
        return (row for batch in self._chosen(whole) for row in batch.to_pylist())

    def _chosen(self, chosen: np.ndarray, columns: list[str] | None = None) -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in read_batches(open_rows(self._path), columns) if chosen.any() else ():
            of_batch = chosen[start : start + batch.num_rows]
            start += batch.num_rows
            yield batch if of_batch.all() else batch.filter(pa.array(of_batch))

    def write(self) -> None:
        """Rewrite the file with the rows that are kept, if some aren't. If none is left, the file is deleted."""
        if self._kept.all():
            return
        aside = self._path.with_suffix(".left")
        with RowWriter(aside, open_rows(self._path).schema_arrow) as rows:
            for batch in self.batches():
                rows.write(batch)
        if aside.exists():
            aside.replace(self._path)
        else:
            self._path.unlink()
        self._kept = np.ones(int(self._kept.sum()), dtype=bool)


def contradictory_rows(pairs: KeptRows, sources: Collection[str]) -> np.ndarray:
    """Return the rows of these sources for which another row of the same conversation prefers the opposite, [rows] bool.

    Memory: eight bytes a pair. Pairs are compared by 63-bit hashes: among 10**7 pairs two others share one with probability 10**-5.
    """
    found, of_sources = _pair_keys(pairs, sources)
    distinct = np.unique(found)
    # Where both preferences of a pair occur, their keys differ in the lowest bit and are neighbours in sorted order.
    both = distinct[:-1][(distinct[1:] ^ distinct[:-1]) == _SIDE] | _SIDE
    both = both[both > _SIDE]
    if not len(both):
        return np.zeros(len(found), dtype=bool)
    either = found | _SIDE
    return (both[np.searchsorted(both, either).clip(max=len(both) - 1)] == either) & of_sources


def duplicate_rows(pairs: KeptRows, sources: Collection[str]) -> np.ndarray:
    """Return the rows of these sources that repeat a row of another source or an earlier one of these, [rows] bool. Memory and comparison
    are as in `contradictory_rows`.
    """
    found, of_sources = _pair_keys(pairs, sources)
    removed = of_sources & (found > _SIDE)
    candidates = np.flatnonzero(removed)
    _, first = np.unique(found[candidates], return_index=True)
    removed[candidates[first]] = np.isin(found[candidates[first]], found[~of_sources])
    return removed


def _pair_keys(pairs: KeptRows, sources: Collection[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return each row's `_pair_key`, [rows] uint64, and whether the row is of these sources, [rows] bool."""
    keys = array("Q")
    of_sources: list[np.ndarray] = []
    for batch in pairs.batches(["source", "messages", "chosen", "rejected"]):
        rows = batch.to_pylist()
        keys.extend(_pair_key(row) for row in rows)
        of_sources.append(np.fromiter((row["source"] in sources for row in rows), dtype=bool, count=len(rows)))
    return np.frombuffer(keys, dtype=np.uint64), np.concatenate(of_sources)


def _pair_key(row: Mapping[str, Any]) -> int:
    """Return 63 bits for the conversation and its texts and one bit for the preferred text; 0 or 1 where there is nothing to compare.

    White space at the edges of texts doesn't count.
    """
    chosen, rejected = (None if row[side] is None else row[side].strip() for side in ("chosen", "rejected"))
    if row["messages"] is None or (chosen is None and rejected is None):
        return 0
    paired = chosen is not None and rejected is not None
    sides = sorted([chosen or "", rejected or ""])
    text = json.dumps([edgeless(row["messages"]), paired, *sides], ensure_ascii=False)
    first = chosen == sides[0] if paired else chosen is not None
    return text_hash(text) & ~1 | first


class TemplateRefusals:
    """The conversations that a chat template refuses. One is rendered once, however many rows and uses have it.

    Memory: eight bytes for each conversation that the template accepts.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._seen = SeenKeys()
        self._refused: dict[int, str] = {}

    def of_rows(self, kept: KeptRows) -> tuple[np.ndarray, list[str]]:
        """Return the refused rows, [rows] bool, and for each of them the template's message."""
        masks, messages = [np.zeros(0, dtype=bool)], []
        for batch in kept.batches(["messages"]):
            found = self._of_conversations(batch["messages"].to_pylist())
            masks.append(np.array([message is not None for message in found], dtype=bool))
            messages += [message for message in found if message is not None]
        return np.concatenate(masks), messages

    def _of_conversations(self, conversations: list[list[Message]]) -> list[str | None]:
        keys = [text_hash(conversation_key(messages)) for messages in conversations]
        before = self._seen.count_and_add(np.array(keys, dtype=np.uint64))
        for key, messages, times in zip(keys, conversations, before, strict=True):
            if times == 0:
                try:
                    render(self._tokenizer, messages, waits=True)
                    render(self._tokenizer, [*messages, {"role": "assistant", "content": "Yes."}], waits=False)
                except Unrenderable as error:
                    self._refused[key] = re.sub(r"\d+", "N", error.words)
        return [self._refused.get(key) for key in keys]
