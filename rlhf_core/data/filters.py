"""Filters."""

from __future__ import annotations

import json
import re
from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rlhf_core.config import DataConfig
from rlhf_core.data.hashing import Seen, key_of
from rlhf_core.data.schema import TEXTS, Message, RowWriter, open_rows, read_batches
from rlhf_core.models.turns import Unrenderable, conversation_key, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


REASONS = {
    "empty": "with a text of white space only (empty)",
    "identical": "whose chosen and rejected are the same text (identical)",
    "contradictory": "that another row contradicts (contradictory)",
    "too_long": "longer than model.max_length (too_long)",
}
_SIDE = np.uint64(1)


def fault(row: Mapping[str, Any], drop: Collection[str]) -> str | None:
    """Which of `empty` and `identical`, as far as they are in `drop`, is true of a row alone."""
    if "empty" in drop and _is_empty(row):
        return "empty"
    sides = row.get("chosen"), row.get("rejected")
    if "identical" in drop and None not in sides and sides[0].strip() == sides[1].strip():
        return "identical"
    return None


def _is_empty(row: Mapping[str, Any]) -> bool:
    texts = (row[name] for name in TEXTS if row.get(name) is not None)
    messages = row.get("messages") or ()
    return any(not text.strip() for text in texts) or any(not (m["content"].strip() or m.get("extra")) for m in messages)


def sources_that_drop(config: DataConfig, kind: str) -> set[str]:
    return {source.name for source in config.sources if kind in source.drop}


def contradictory(path: Path, sources: Collection[str]) -> np.ndarray:
    """Which rows of these sources another row of the same conversation contradicts, [rows] bool; of every pair 8 bytes are in memory.

    63 bits of a hash tell which rows have the same texts: of 10**7 pairs two others are taken for such with a chance of 10**-5.
    """
    keys = array("Q")
    asked: list[np.ndarray] = []
    for batch in read_batches(open_rows(path), ["source", "messages", "chosen", "rejected"]):
        rows = batch.to_pylist()
        keys.extend(_pair_key(row) for row in rows)
        asked.append(np.fromiter((row["source"] in sources for row in rows), dtype=bool, count=len(rows)))
    found = np.frombuffer(keys, dtype=np.uint64)
    distinct = np.unique(found)
    twice = distinct[:-1][(distinct[1:] ^ distinct[:-1]) == _SIDE] | _SIDE  # both sides of it are there, and lie beside each other
    twice = twice[twice > _SIDE]
    if not len(twice):
        return np.zeros(len(found), dtype=bool)
    either = found | _SIDE
    return (twice[np.searchsorted(twice, either).clip(max=len(twice) - 1)] == either) & np.concatenate(asked)


def _pair_key(row: Mapping[str, Any]) -> int:
    """63 bits for conversation and texts, one for which text is preferred; 0 or 1 where there is nothing to compare."""
    chosen, rejected = row["chosen"], row["rejected"]
    if row["messages"] is None or (chosen is None and rejected is None):
        return 0
    paired = chosen is not None and rejected is not None
    sides = sorted([chosen or "", rejected or ""])
    text = json.dumps([row["messages"], paired, *sides], ensure_ascii=False)
    first = chosen == sides[0] if paired else chosen is not None
    return key_of(text) & ~1 | first


def too_long(use: str, path: Path, sources: Collection[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> np.ndarray:
    """Which rows of these sources have more tokens than a stage takes, [rows] bool."""
    from rlhf_core.data.validation.measures import measure

    parts = []
    for batch in read_batches(open_rows(path)):
        asked = np.array([source in sources for source in batch["source"].to_pylist()], dtype=bool)
        rows = batch.filter(pa.array(asked)).to_pylist()
        asked[asked] = (measure(use, rows, tokenizer)["tokens"] > max_length).to_numpy(dtype=bool)
        parts.append(asked)
    return np.concatenate(parts)


def take_out(path: Path, leaves: np.ndarray) -> Iterator[dict]:
    """Write a file anew without the rows of a mask, [rows] bool; the rows that leave. Without others there is no file."""
    if not leaves.any():
        return
    aside, start = path.with_suffix(".left"), 0
    with RowWriter(aside, open_rows(path).schema_arrow) as rows:
        for batch in read_batches(open_rows(path)):
            of_batch = leaves[start : start + batch.num_rows]
            start += batch.num_rows
            rows.write(batch.filter(pa.array(~of_batch)))
            yield from batch.filter(pa.array(of_batch)).to_pylist()
    if aside.exists():
        aside.replace(path)
    else:
        path.unlink()


Refused = Counter[tuple[str, str, str, str]]


def drop_unrenderable(folder: Path, uses: list[str], tokenizer: PreTrainedTokenizerBase, *, limit: float) -> Refused:
    """Write the files of these uses anew without such rows, where there are any.

    Args:
        limit: the largest share of a use's rows that may be left out.
    Returns:
        (source, use, split, the template's words) -> rows left out.
    Raises:
        ValueError: there are more.
    """
    refused: Refused = Counter()
    known = Known()
    for use in (use for use in uses if use != "pretrain"):
        path = folder / f"{use}.parquet"
        of_use = _copy_renderable(path, tokenizer, known)
        rows, total = sum(of_use.values()), open_rows(path).metadata.num_rows
        if rows > limit * total:
            words = "; ".join(reason for reason, _ in Counter(r for _, _, r in of_use.elements()).most_common(3))
            raise ValueError(
                f"{use}: expected a chat template that renders all conversations but {limit:.2%}, got {rows} of {total} refused: {words}; "
                "correct the data, use another template, or raise data.max_unrenderable_fraction"
            )
        aside = _aside(path)
        if aside.exists():
            aside.replace(path)
        elif of_use:  # nothing is left
            path.unlink()
        refused.update({(source, use, split, reason): count for (source, split, reason), count in of_use.items()})
    return refused


def _aside(path: Path) -> Path:
    return path.with_suffix(".renderable")


def _copy_renderable(path: Path, tokenizer: PreTrainedTokenizerBase, known: Known) -> Counter[tuple[str, str, str]]:
    """Copy the other rows aside, if there are such; return (source, split, the template's words) -> rows. `known`: found before."""
    refused: Counter[tuple[str, str, str]] = Counter()
    kept: list[np.ndarray] = []
    for batch in read_batches(open_rows(path), ["source", "split", "messages"]):
        reasons = known.reasons(tokenizer, batch["messages"].to_pylist())
        kept.append(np.array([reason is None for reason in reasons], dtype=bool))
        places = zip(batch["source"].to_pylist(), batch["split"].to_pylist(), reasons, strict=True)
        refused.update(place for place in places if place[-1] is not None)
    if refused:
        with RowWriter(_aside(path), open_rows(path).schema_arrow) as rows:
            for batch, stays in zip(read_batches(open_rows(path)), kept, strict=True):
                rows.write(batch.filter(pa.array(stays)))
    return refused


class Known:
    """What the template said of each conversation, which has rows in several uses. Of one that it takes, 8 bytes are in memory."""

    def __init__(self) -> None:
        self._taken = Seen()
        self._refused: dict[int, str] = {}

    def reasons(self, tokenizer: PreTrainedTokenizerBase, conversations: list[list[Message]]) -> list[str | None]:
        """The template's words for each that it takes neither waiting for an answer nor with one; None for the others."""
        keys = [_key(messages) for messages in conversations]
        new = self._taken.count_and_add(np.array(keys, dtype=np.uint64)) == 0
        for key, messages in (pair for pair, first in zip(zip(keys, conversations, strict=True), new, strict=True) if first):
            if (words := _refusal(tokenizer, messages)) is not None:
                self._refused[key] = words
        return [self._refused.get(key) for key in keys]


def _key(messages: list[Message]) -> int:
    return key_of(conversation_key(messages))


def _refusal(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> str | None:
    try:
        render(tokenizer, messages, waits=True)
        render(tokenizer, [*messages, {"role": "assistant", "content": "Yes."}], waits=False)
    except Unrenderable as error:
        return re.sub(r"\d+", "N", error.words)
    return None
