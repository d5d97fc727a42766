"""Rows whose conversation the model's chat template refuses: left out of the prepared data and counted, up to a limit."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from rlhf_core.data.schema import Message, RowWriter, open_rows, read_batches
from rlhf_core.data.seen import Seen, key_of
from rlhf_core.models.turns import Unrenderable, conversation_key, render

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
