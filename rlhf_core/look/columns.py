"""The columns of a sample of records, nested ones by dotted paths, and the kinds of their values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.preparation.values import BOOLEANS, SIGNS, YES_AND_NO

MAX_DEPTH = 4  # of dotted paths
MOSTLY = 0.6  # share of a column's values
NEARLY_ALL = 0.9  # share of a column's values
FEW_MARKS = 11  # different numbers, as of a scale from 0 to 10
LONGEST_MARK, LARGEST_MARK = 40, 1e6  # characters, a number
# Words that say in a column of a likely name that a response is good or bad. Others, such as positive, may be an expected answer.
_FLAGS = {word for words in YES_AND_NO for word in words if words[0] in ("true", "1", "1.0", "good", "up", "chosen", "desirable", "liked")}
_TRUE, _FALSE = ({word for word, means in BOOLEANS.items() if means is wanted} for wanted in (True, False))
_SIGNS = tuple({sign for sign, means in SIGNS.items() if means is wanted} for wanted in (True, False))
_NEUTRAL = ("0", "0.0")  # beside signs
_USERS = ("user", "human", "prompter")


@dataclass(frozen=True)
class Column:
    """One column of a sample.

    kinds: how many values are text, number, boolean, messages, objects (a list of them), object or list.
    values: the non-null, non-empty values, in order.
    """

    path: str
    kinds: Counter[str]
    values: Sequence[Any]

    def holds(self, kinds: Collection[str]) -> bool:
        """Return whether there are values and most have one of these kinds. Records with other values will be dropped."""
        return sum(self.kinds[kind] for kind in kinds) > MOSTLY * len(self.values)

    def of(self, *kinds: str) -> list[Any]:
        """Values that have one of these kinds."""
        return [value for value in self.values if kind_of(value) in kinds]

    @property
    def is_flag(self) -> bool:
        """Whether nearly every value is true or false, as a boolean, as 1 and 0 or -1, or as one of _FLAGS."""
        return self.share(lambda value: _mark_text(value) in _FLAGS) > NEARLY_ALL or self._says(*_SIGNS, _NEUTRAL)

    @property
    def is_mark(self) -> bool:
        """Whether the values are yes and no in words that the format unpaired reads."""
        return self._says(_TRUE, _FALSE) or self._says(*_SIGNS, _NEUTRAL)

    @property
    def may_mark(self) -> bool:
        """Whether the values may be marks: two words for yes and no, or a few repeated numbers."""
        if self.is_mark:
            return True
        numbers = [text for text in map(_mark_text, self.values) if _is_number(text)]
        return len(numbers) > NEARLY_ALL * len(self.values) and 2 <= len(set(numbers)) <= min(FEW_MARKS, len(numbers) - 1)

    @property
    def is_prose(self) -> bool:
        """Whether nearly every value is a text of several words, and the values differ."""
        several = self.share(lambda value: isinstance(value, str) and len(value.split()) > 1) > NEARLY_ALL
        return several and len(set(map(str, self.values))) > min(FEW_MARKS, len(self.values) / 2)

    def _says(self, yes: Collection[str], no: Collection[str], neither: Collection[str] = ()) -> bool:
        """Return whether nearly every value is one of these words, and both yes and no occur."""
        words = (("yes", yes), ("no", no), ("neither", neither))
        marks = Counter(next((says for says, of in words if text in of), "") for text in map(_mark_text, self.values))
        return marks["yes"] > 0 < marks["no"] and len(self.values) - marks[""] > NEARLY_ALL * len(self.values)

    @property
    def ends_with_user(self) -> bool:
        """Whether most conversations end with the user."""
        talks = self.of("messages")
        last = [str(talk[-1].get("role") or talk[-1].get("from")).lower() in _USERS for talk in talks]
        return sum(last) * 2 > len(last)

    def share(self, holds: Callable[[Any], bool]) -> float:
        """Share of the values for which `holds` is true."""
        return sum(map(bool, map(holds, self.values))) / max(1, len(self.values))


def _mark_text(value: Any) -> str:
    """Return the value as text in lower case, 1.0 as `1`; empty if it can't be a mark: a long text, a large number, an object, a list."""
    if isinstance(value, str):
        return value.strip().lower() if len(value) < LONGEST_MARK else ""
    if isinstance(value, bool):
        return str(value).lower()
    if not isinstance(value, int | float) or not abs(value) < LARGEST_MARK:
        return ""
    return str(int(value)) if value == int(value) else str(value)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def kind_of(value: Any) -> str:
    """Return the kind of a value: text, number, boolean, messages, objects, object or list."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int | float):
        return "number"
    if isinstance(value, str):
        return "text"
    if isinstance(value, Mapping):
        return "object"
    if isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        return "messages" if all(_is_message(item) for item in value) else "objects"
    return "list"


def columns_of(records: Sequence[Mapping[str, Any]]) -> dict[str, Column]:
    """Columns by path, in the order of first appearance. An object is a column, and so is each of its keys."""
    kinds: dict[str, Counter[str]] = {}
    values: dict[str, list[Any]] = {}
    for record in records:
        for path, value in _walk(record, ""):
            of_path, filled = kinds.setdefault(path, Counter()), values.setdefault(path, [])
            if value is None or value == [] or (isinstance(value, str) and not value.strip()):
                continue
            of_path[kind_of(value)] += 1
            filled.append(value)
    return {path: Column(path, kinds[path], values[path]) for path in kinds}


def same_keys(columns: Mapping[str, Column]) -> list[list[str]]:
    """Groups of two or more top-level columns whose objects have the same keys."""
    by_keys: dict[frozenset[str], list[str]] = {}
    for path, column in columns.items():
        if "." not in path and column.holds({"object"}):
            keys = {key for value in column.values if isinstance(value, Mapping) for key in value}
            by_keys.setdefault(frozenset(keys), []).append(path)
    return [paths for paths in by_keys.values() if len(paths) > 1]


def _is_message(item: Mapping[str, Any]) -> bool:
    return ("role" in item or "from" in item) and any(key in item for key in ("content", "value", "tool_calls"))


def _walk(record: Mapping[str, Any], prefix: str, depth: int = 1) -> Iterator[tuple[str, Any]]:
    for key, value in record.items():
        path = f"{prefix}{key}"
        yield path, value
        if isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from _walk(value, f"{path}.", depth + 1)
