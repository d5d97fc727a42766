"""Which split a conversation belongs to, which rows of a source are kept, and the ids of rows: all by hash, never by position."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence

from rlhf_core.data.schema import Message, Split


def conversation_text(messages: Sequence[Message]) -> str:
    """Canonical text of a conversation: case and white space don't make another one."""
    return "\n".join(f"{m['role']}\t{' '.join(m['content'].split()).casefold()}" for m in messages)


def split_of(text: str, *, validation_fraction: float, test_fraction: float) -> Split:
    """The split of a conversation's canonical text, the same in every use and for every seed."""
    position = _fraction(text)
    if position < test_fraction:
        return "test"
    return "validation" if position < test_fraction + validation_fraction else "train"


def with_ids(rows: Sequence[dict], source: str) -> list[dict]:
    """Rows with source and id, a hash of both and, of equal rows, of how many came before: order changes no id, nor do slices."""
    seen: Counter[bytes] = Counter()  # by hash: contents would fill the memory
    identified = []
    for row in rows:
        content = json.dumps([source, {key: value for key, value in row.items() if key != "slices"}], sort_keys=True, ensure_ascii=False)
        digest = hashlib.sha256(content.encode("utf-8", "surrogatepass"))
        before = seen[digest.digest()]
        seen[digest.digest()] += 1
        digest.update(f"#{before}".encode())
        identified.append({"id": digest.hexdigest()[:16], "source": source, **row})
    return identified


def keep_share(rows: list[dict], share: float, max_rows: int | None) -> list[dict]:
    """The given share of the rows, at most `max_rows`, in their order: those with the lowest ids, which are hashes.

    A smaller share is a part of a larger one.
    """
    count = round(share * len(rows))
    if max_rows is not None:
        count = min(count, max_rows)
    kept = {row["id"] for row in sorted(rows, key=lambda row: row["id"])[:count]}
    return [row for row in rows if row["id"] in kept]


def _fraction(text: str) -> float:
    """A hash of the text as a number in [0, 1)."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
