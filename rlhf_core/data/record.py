"""One record of somebody's data set, seen through the source's column mapping."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.dropped import Dropped, Misfit
from rlhf_core.data.messages import kind, not_finite, other_keys, read_messages, read_text
from rlhf_core.data.schema import Message

# Columns that carry meaning in many data sets. They count only where the source maps them; where it doesn't, that is said.
WELL_KNOWN = ("system", "system_prompt", "history", "context", "tools", "functions")
_MESSAGES = ("prompt", "messages", "chosen", "rejected", "first", "second", "completion")  # our columns that can hold them
# How true and false are written, in lower case. Not -1: beside it 0 is neither, and here 0 is false.
BOOLEANS = {
    **dict.fromkeys(("true", "1", "yes", "good", "up"), True),
    **dict.fromkeys(("false", "0", "no", "bad", "down"), False),
}
_MISSING = object()


class Record:
    """One record, seen through the source's column mapping."""

    def __init__(self, values: Mapping[str, Any], source: SourceConfig):
        self.values = values
        self.source = source

    def get(self, name: str) -> Any:
        """The value of one of our columns.

        Raises:
            Misfit: the record doesn't have that column.
        """
        return self.at(self.source.columns.get(name, name), wanted_for=name)

    def optional(self, name: str) -> Any:
        """The value of a column that the format can do without, unless the mapping names it: then it must be there."""
        return self.get(name) if name in self.source.columns else self.values.get(name)

    def mapped(self, name: str) -> Any:
        """The value of a column that counts only where the mapping names it."""
        return self.get(name) if name in self.source.columns else None

    def has(self, name: str) -> bool:
        return name in self.source.columns or name in self.values

    def text(self, name: str) -> str:
        return read_text(self.get(name), self.source.columns.get(name, name))

    def prompt(self, name: str = "prompt") -> list[Message]:
        """A prompt, given as text or as messages, which isn't empty."""
        value = self.get(name)
        if isinstance(value, list | Mapping):
            return read_messages(value, name)
        if not (text := read_text(value, name)):
            raise Dropped(f"{name} is empty")
        return [{"role": "user", "content": text}]

    def label(self) -> str | None:
        """The expected answer, found by `label_pattern` where there is one; stripped.

        Raises:
            Dropped: the pattern finds nothing.
        """
        value = self.optional("label")
        if value is None:
            return None
        text = read_scalar(value, "label")
        if self.source.label_pattern is None:
            return text
        match = re.search(self.source.label_pattern, text)
        if match is None:
            raise Dropped("label_pattern finds nothing in the label")
        return match.group(1 if match.re.groups else 0).strip()

    def at(self, path: str, *, wanted_for: str) -> Any:
        """Follow a dotted path; a column whose own name has dots comes first."""
        value = self.values.get(path, _MISSING)
        if value is _MISSING:
            value = self.values
            for part in path.split("."):
                if not isinstance(value, Mapping) or part not in value:
                    there = ", ".join(map(str, value)) if isinstance(value, Mapping) else kind(value)
                    got = f"{shown(there)}; map {wanted_for} in the source's columns"
                    raise Misfit(f"expected a column {path!r} for {wanted_for!r}, got {got}", f"no column {path}")
                value = value[part]
        return value


def unmapped(values: Mapping[str, Any], source: SourceConfig) -> list[str]:
    """Well-known columns that a record has and the source doesn't use."""
    there = [name for name in WELL_KNOWN if values.get(name)]
    return there and [name for name in there if all(name not in theirs for theirs in map(_listed, source.columns.values()))]


def message_keys(values: Mapping[str, Any], source: SourceConfig) -> set[str]:
    """Keys of a record's messages that aren't used and aren't content, which would drop the record."""
    return {key for value in _conversations(values, source) for key in other_keys(value)}


def _conversations(values: Mapping[str, Any], source: SourceConfig) -> Iterator[Any]:
    yield from (_reach(values, source.columns.get(name, name)) for name in _MESSAGES)
    if source.format == "graded":
        graded = _reach(values, source.columns.get("completions", "completions"))
        items = [item for item in graded if isinstance(item, Mapping)] if isinstance(graded, list) else []
        yield from (_reach(item, source.columns.get("completion", "completion")) for item in items)


def _reach(values: Mapping[str, Any], path: str | list[str]) -> Any:
    """As `Record.at`, of one column or several; None where there is nothing."""
    if isinstance(path, list):
        return [_reach(values, one) for one in path]
    value = values.get(path, _MISSING)
    if value is not _MISSING or "." not in path:
        return None if value is _MISSING else value
    value = values
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _listed(theirs: str | list[str]) -> list[str]:
    return [theirs] if isinstance(theirs, str) else theirs


def read_scalar(value: Any, column: str) -> str:
    """Text, a number or a truth value, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise not_finite(value, column)
    if value is not None and not isinstance(value, str | int | float | Decimal | date | time):
        message = f"column {column!r}: expected text or a number, got {kind(value)}; map another column"
        raise Misfit(message, f"{column} is neither text nor a number")
    return read_text(value if isinstance(value, str) else _digits(value, column), column)


def _digits(value: Any, column: str) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python refuses to write integers of thousands of digits
        message = f"column {column!r}: expected a number, got one of thousands of digits; correct it"
        raise Misfit(message, f"{column} is a number of thousands of digits") from error


def read_boolean(value: Any, column: str) -> bool:
    """True or false, also as 1 or 0, or as one of BOOLEANS (CSV has nothing else)."""
    if value is None:
        raise Dropped(f"{column} is null")
    if isinstance(value, int | float) and value in (0, 1):
        return bool(value)
    key = value.strip().lower() if isinstance(value, str) else None
    if key not in BOOLEANS:
        got = str(value) if isinstance(value, float) else kind(value)
        raise Misfit(f"column {column!r}: expected true or false, got {got}; convert it first", f"{column} is neither true nor false")
    return BOOLEANS[key]


def read_number(value: Any, column: str) -> float:
    """A finite number, also as text (CSV has nothing else).

    Raises:
        Dropped: it is null.
        Misfit: it is no such number.
    """
    if value is None:
        raise Dropped(f"{column} is null")
    try:
        number = float(read_scalar(value, column))
    except ValueError as error:
        if isinstance(error, Misfit):
            raise
        raise Misfit(f"column {column!r}: expected a number, got {kind(value)}; map another column", f"{column} is no number") from error
    if not math.isfinite(number):
        raise Misfit(f"column {column!r}: expected a finite number, got {kind(value)}; map another column", f"{column} is no number")
    return number
