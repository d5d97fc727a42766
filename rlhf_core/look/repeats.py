"""Finds held-out prompts of a source that its training split repeats, as validate_data counts them over all sources."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.config import Params
from rlhf_core.data.hashing import conversation_text, split_of, split_text, text_hash
from rlhf_core.data.schema import SPLITS
from rlhf_core.preparation.near_duplicates import Compared, Named, compare

MAX_CONVERSATIONS = 100_000  # kept in memory
LIMITS = {"near": "max_near_duplicate_fraction", "contained": "max_contained_fraction"}  # kind -> key of validation


class Repeats:
    """The first MAX_CONVERSATIONS distinct conversations of each split."""

    def __init__(self, params: Params):
        data = params.data
        self._fractions = {name: getattr(data, name) for name in ("validation_fraction", "test_fraction", "promotion_fraction")}
        self._seen: set[int] = set()
        self._rows: dict[str, list[Named]] = {split: [] for split in SPLITS}

    def add(self, where: str, row: dict[str, Any]) -> None:
        """Add a row's conversation.

        where: the place of the row's record.
        """
        if "messages" in row and len(self._seen) < MAX_CONVERSATIONS:
            key = text_hash(conversation_text(row["messages"]))
            if key not in self._seen:
                self._seen.add(key)
                self._rows[split_of(split_text(row), **self._fractions)].append((where, row["messages"]))

    def counted(self) -> dict[str, list[Compared]]:
        """Return each held-out split's prompts, compared with training."""
        return compare({split: rows for split, rows in self._rows.items() if split != "train" and rows}, lambda: self._rows["train"])


def shares(repeats: Mapping[str, Sequence[Compared]], kind: str) -> dict[str, tuple[int, int]]:
    """Return, for each held-out split with repeated prompts, the number of prompts that training repeats in one way of LIMITS, and the
    number of all its prompts.
    """
    counts = {split: sum(getattr(prompt, kind) is not None for prompt in prompts) for split, prompts in repeats.items()}
    return {split: (count, len(repeats[split])) for split, count in counts.items() if count}


def lines(repeats: Mapping[str, Sequence[Compared]], params: Params) -> Iterator[str]:
    """Lines for people: the counts, their limits, and the first repeated prompt."""
    words = {
        "near": "are in training again, with other marks or text around them",
        "contained": "are part of a longer training prompt",
    }
    for kind, limit in LIMITS.items():
        allowed = getattr(params.validation, limit)
        for split, (count, prompts) in shares(repeats, kind).items():
            stops = ": validate_data stops; take them out" if count / prompts > allowed else ""
            first = next(prompt for prompt in repeats[split] if getattr(prompt, kind) is not None)
            share = f"{count} of {prompts} prompts ({count / prompts:.1%})"
            where = f"the first: {first.name}, in training {getattr(first, kind)}"
            yield f"{split} split: {share} {words[kind]}; validation.{limit} is {allowed:g}{stops}; {where}"
