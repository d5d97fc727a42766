"""Rows that the key `drop` of their source takes away.

What `empty`, `identical`, `contradictory` and `too_long` mean is what the expectations of these names count
(rlhf_core.data.expectations), so that they find nothing afterwards.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from rlhf_core.config import DataConfig
from rlhf_core.data.schema import TEXTS, RowWriter, open_rows, read_batches
from rlhf_core.data.seen import key_of

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
    from rlhf_core.data.measures import measure

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
