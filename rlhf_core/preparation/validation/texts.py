"""The texts of prepared rows as tables, as far as no tokenizer is needed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import pandas as pd

from rlhf_core.data.control import is_blank
from rlhf_core.data.hashing import beginning, conversation_text
from rlhf_core.data.schema import Message, edgeless

# Columns with the texts that a model learns to write.
TEXT_COLUMNS: dict[str, tuple[str, ...]] = {
    "pretrain": ("text",),
    "sft": ("response",),
    "preference": ("chosen", "rejected"),
    "stepwise": ("response",),
    "prompt": (),
}


def read_texts(use: str, rows: Sequence[dict]) -> pd.DataFrame:
    """Return the columns of `measure` that need no tokenizer, without pair and preference."""
    frame = pd.DataFrame({column: strings(row[column] for row in rows) for column in ("id", "source", "split", *TEXT_COLUMNS[use])})
    return frame if use == "pretrain" else frame.assign(**_conversation_columns([row["messages"] for row in rows]))


def pair_columns(frame: pd.DataFrame) -> dict[str, pd.Series]:
    """Return the columns pair and preference. White space at the edges of texts doesn't count."""
    is_pair, is_unpaired = kinds(frame)
    chosen, rejected = frame["chosen"].str.strip(), frame["rejected"].str.strip()
    sides = [sorted([c, r]) for c, r in zip(chosen.fillna(""), rejected.fillna(""), strict=True)]
    conversations = {text: edgeless(json.loads(text)) for text in frame["conversation"].dropna().unique().tolist()}
    keys = (
        json.dumps([conversations.get(conversation), bool(paired), *texts], ensure_ascii=False)
        for conversation, paired, texts in zip(frame["conversation"], is_pair, sides, strict=True)
    )
    return {
        "pair": strings(keys).where(frame["conversation"].notna() & (is_pair | is_unpaired)),
        "preference": chosen.where(is_pair, frame["chosen"].notna().map({True: "chosen", False: "rejected"})),
    }


def strings(values: Iterable[str | None]) -> pd.Series:
    """Return a column of texts, in which some may be missing."""
    return pd.Series(list(values), dtype="str")


def _conversation_columns(conversations: list[list[Message] | None]) -> dict[str, pd.Series]:
    """Return the columns about conversations, computed once for each distinct one: most have many rows."""
    keys = [None if messages is None else json.dumps(messages, ensure_ascii=False) for messages in conversations]
    distinct = {key: messages for key, messages in zip(keys, conversations, strict=True) if messages is not None}
    views = {key: _views(messages) for key, messages in distinct.items()}
    nothing = (None, None, None)
    columns = list(zip(*(views.get(key, nothing) for key in keys), strict=True)) or [(), (), ()]
    names = ("roles", "shortest_message", "beginning")
    return {"conversation": strings(keys), **{name: strings(column) for name, column in zip(names, columns, strict=True)}}


def _views(messages: list[Message | None]) -> tuple[str, str | None, str]:
    """Return roles, the shortest message and the canonical text of the beginning; nulls count as empty texts."""
    filled: list[Message] = [
        {"role": (m or {}).get("role") or "", "content": (m or {}).get("content") or "", "extra": (m or {}).get("extra")} for m in messages
    ]
    shortest = min((("" if is_blank(m["content"]) else m["content"].strip()) or m["extra"] or "" for m in filled), key=len, default=None)
    return ",".join(m["role"] for m in filled), shortest, conversation_text(beginning(filled))


def kinds(frame: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """Return two masks: rows that are pairs, and rows with one text only."""
    return frame["chosen"].notna() & frame["rejected"].notna(), frame["chosen"].notna() ^ frame["rejected"].notna()
