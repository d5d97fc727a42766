"""What is left out of a source while it is read: reasons, counts, and where the first records of each stand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import shown

EXAMPLES = 3  # of each reason
EXCERPT = 200  # characters


@dataclass(frozen=True)
class Example:
    """Where a record stands and how it starts; both can be shown."""

    where: str
    excerpt: str


class LeftOut(Counter[str]):
    """Reason -> what was left out for it.

    Attributes:
        read: records so far.
        records: of these, left out.
        examples: reason -> the first records.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = self.records = 0
        self.examples: dict[str, list[Example]] = {}

    def add(self, reason: str, where: str, values: Mapping[str, Any]) -> None:
        """Count one record."""
        self[reason] += 1
        self.records += 1
        if len(first := self.examples.setdefault(reason, [])) < EXAMPLES:
            first.append(Example(where, excerpt(values)))


def excerpt(values: Mapping[str, Any]) -> str:
    """The start of a record as JSON."""
    try:
        return shown(json.dumps(values, ensure_ascii=False, default=str), EXCERPT)
    except (TypeError, ValueError, RecursionError):  # it may be anything
        return shown(", ".join(map(str, values)), EXCERPT)
