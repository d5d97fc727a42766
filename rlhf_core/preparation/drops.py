"""What is left out of a source: reasons, counts, and the first records of each reason, safe to print."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

from rlhf_core.config import shown
from rlhf_core.data.schema import ORIGIN, Message

EXAMPLES = 3  # of each reason
EXCERPT = 200  # characters of a record
START = 80  # characters of a text, in a message
KEYS = 100  # different keys that are counted: a file may have a million
KEY = 60  # characters of a key
_DEPTH = 6  # nesting levels in an excerpt


class Dropped(Exception):
    """The record is left out. The message is the reason, a short constant text under which the record is counted."""


class Misfit(ValueError):
    """The record doesn't have the source's format. If no record has, the mapping is wrong; else the record is dropped.

    Attributes:
        reason: a short constant text under which the record is counted.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return Misfit, (str(self), self.reason)


class Example(NamedTuple):
    """A record that was left out. where: as in a row's origin; excerpt: its beginning."""

    where: str
    excerpt: str


class DropCounts(Counter[str]):
    """Reason -> number of records left out of a source, or of rows for the reasons that are about rows.

    Attributes:
        read: records read.
        records: records that can't be used. Repeated rows, and records that merely have nothing for the source's uses, aren't counted here.
        of_records: the reasons of these records.
        examples: reason -> its first records.
        unmapped: well-known columns that the source doesn't map -> number of records that fill them.
        message_keys: keys of messages that no format reads -> number of records that have them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.read = 0
        self.records = 0
        self.of_records: set[str] = set()
        self.examples: dict[str, list[Example]] = {}
        self.unmapped: Counter[str] = Counter()
        self.message_keys: Counter[str] = Counter()

    def add(self, reason: str, where: str, values: Mapping[str, Any]) -> None:
        """Count a record that can't be used."""
        self.records += 1
        self.of_records.add(reason)
        self.mention(reason, where, values)

    def mention(self, reason: str, where: str, values: Mapping[str, Any]) -> None:
        """Count a valid record that gives fewer rows than it could, or none."""
        self[reason] += 1
        self.add_example(reason, where, excerpt(values))

    def add_example(self, reason: str, where: str, text: str) -> None:
        """Keep it if it is among the first of its reason."""
        if len(examples := self.examples.setdefault(reason, [])) < EXAMPLES:
            examples.append(Example(where, text))

    def count_message_keys(self, keys: Iterable[str]) -> None:
        """Count a record whose messages have these keys; at most KEYS different keys are counted."""
        for key in sorted(shown(key, KEY) for key in keys):
            if key in self.message_keys or len(self.message_keys) < KEYS:
                self.message_keys[key] += 1

    def summary(self) -> str:
        """Return the counts and the first record, for a message."""
        first = next((example for examples in self.examples.values() for example in examples), None)
        return f"left out: {dict(self) or 'nothing'}{f'; the first: {first.where}: {first.excerpt}' if first else ''}"


@dataclass
class Tally:
    """What became of one source's records, by use.

    Attributes:
        left_out: reason -> records, or rows for the reasons that are about rows.
        read, dropped: rows that the usable records gave; of these, the rows that the source's `drop` removed while reading.
        mixed, dropped_later: the same after weighting, for what is known only of all rows together or with the tokenizer.
    """

    left_out: DropCounts = field(default_factory=DropCounts)
    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    dropped_later: Counter[str] = field(default_factory=Counter)

    def drop_row(self, reason: str, use: str, row: Mapping[str, Any], *, later: bool = False) -> None:
        (self.dropped_later if later else self.dropped)[use] += 1
        reason = f"{use} rows {reason}"
        self.left_out[reason] += 1
        self.left_out.add_example(reason, row.get(ORIGIN) or "", start_of(row))

    def share(self, use: str) -> float:
        """Return dropped share of what could have become rows of a use; weights, repeated prompts and the chat template don't count."""
        possible, mixed = self.left_out.records + self.read[use], self.mixed[use]
        on_reading = (self.left_out.records + self.dropped[use]) / possible if possible else 0.0
        later = self.dropped_later[use] / mixed if mixed else 0.0
        return 1.0 - (1.0 - on_reading) * (1.0 - later) if later else on_reading

    def check(self, name: str, uses: Sequence[str], *, limit: float) -> None:
        """Check that at most the share `limit` of each use is dropped.

        Raises:
            ValueError: more is dropped. The message lists the reasons, their counts and where their first records are.
        """
        worst = max(uses, key=self.share)
        if self.share(worst) <= limit:
            return
        counts = self.left_out
        read = f"{counts.records} of {counts.read} records, " if counts.read else ""
        rows = f"{self.dropped[worst] + self.dropped_later[worst]} of {self.read[worst]} rows"
        lines = []
        for reason, count in counts.most_common():
            lines += [f"  {count} {reason}", *(f"    {located(e.where, shown(e.excerpt, START))}" for e in counts.examples.get(reason, ()))]
        raise ValueError(
            f"source {name}: expected at most {limit:.2%} of the {worst} data to be dropped, got {self.share(worst):.2%} ({read}{rows}); "
            "correct the data or the source's format and columns, or raise validation.max_dropped_fraction\n" + "\n".join(lines)
        )


def start_of(row: Mapping[str, Any]) -> str:
    """Return the start of a row's plain text, or of its conversation's last message."""
    messages: Sequence[Message | None] = row.get("messages") or ()
    last = (messages[-1] if messages else None) or {}
    return repr(shown((row.get("text") or last.get("content") or last.get("extra") or "").strip(), START))


def located(origin: str | None, text: str) -> str:
    """Return a text with the place where it is found, if that is known."""
    return f"{origin}: {text}" if origin else text


def excerpt(values: Any) -> str:
    """Return the beginning of a record as one line of JSON without terminal control characters. Long texts and lists are not read whole."""
    pieces: list[str] = []
    length = 0
    for piece in _pieces(values, _DEPTH):
        pieces.append(piece)
        length += len(piece)
        if length > EXCERPT:
            break
    return shown("".join(pieces), EXCERPT)


def _pieces(value: Any, depth: int) -> Iterator[str]:
    """Yield the JSON of a value piece by piece."""
    if isinstance(value, str):
        yield json.dumps(value[: EXCERPT + 1], ensure_ascii=False)
    elif isinstance(value, Mapping | list) and not depth:
        yield "..."
    elif isinstance(value, Mapping):
        yield "{"
        for number, (key, inner) in enumerate(islice(value.items(), EXCERPT)):
            yield f"{', ' if number else ''}{json.dumps(str(key)[:EXCERPT], ensure_ascii=False)}: "
            yield from _pieces(inner, depth - 1)
        yield "}"
    elif isinstance(value, list):
        yield "["
        for number, inner in enumerate(value[:EXCERPT]):
            yield ", " if number else ""
            yield from _pieces(inner, depth - 1)
        yield "]"
    elif value is None or isinstance(value, bool | float):
        yield json.dumps(value)
    elif isinstance(value, int):
        yield "a number of many digits" if value.bit_length() > 256 else str(value)
    else:
        yield f"({type(value).__name__})"
