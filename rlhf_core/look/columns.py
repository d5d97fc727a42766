"""What columns a sample of records has, nested ones by dotted paths, and what stands in them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MAX_DEPTH = 4  # of dotted paths
MOSTLY = 0.6  # share of a column's values
_FLAGS = ("true", "false", "0", "1")
_USERS = ("user", "human", "prompter")


@dataclass(frozen=True)
class Column:
    """One column of a sample.

    kinds: how many values are text, number, boolean, messages, objects (a list of them), object or list.
    values: those that are neither null nor empty, in order.
    """

    path: str
    kinds: Counter[str]
    values: Sequence[Any]

    def holds(self, kinds: Collection[str]) -> bool:
        """Whether it has values and most are of these kinds: a few odd ones are records to drop."""
        return sum(self.kinds[kind] for kind in kinds) > MOSTLY * len(self.values)

    def of(self, *kinds: str) -> list[Any]:
        """The values of these kinds."""
        return [value for value in self.values if kind_of(value) in kinds]

    @property
    def is_flag(self) -> bool:
        """Whether nearly every value is true or false, also as 1 or 0 or as text."""
        return self.share(lambda v: v in (0, 1) if isinstance(v, bool | int | float) else str(v).strip().lower() in _FLAGS) > 0.9

    @property
    def ends_with_user(self) -> bool:
        """Of conversations: whether most wait for an answer."""
        talks = self.of("messages")
        last = [str(talk[-1].get("role") or talk[-1].get("from")).lower() in _USERS for talk in talks]
        return sum(last) * 2 > len(last)

    def share(self, holds: Callable[[Any], bool]) -> float:
        """Share of the values of which `holds` is true."""
        return sum(map(bool, map(holds, self.values))) / max(1, len(self.values))


def kind_of(value: Any) -> str:
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
    """Columns by path, in the order of their first appearance; an object is a column, and so are its keys."""
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
    """Groups of two and more objects at the top that have the same keys."""
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
