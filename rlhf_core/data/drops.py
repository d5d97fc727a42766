"""Drops."""

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
KEYS = 100  # different ones that are counted: a file may have a million
KEY = 60  # characters of one
_DEPTH = 6  # of an excerpt

START = 80  # characters of a text, in a message


class Dropped(Exception):
    """This record is left out; the message is the reason under which it is counted: a short constant text."""


class Misfit(ValueError):
    """This record doesn't have the source's format. Where no record has, the mapping is wrong; else it is dropped.

    Attributes:
        reason: under which it is counted: a short constant text.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason

    def __reduce__(self):
        return Misfit, (str(self), self.reason)


class Example(NamedTuple):
    """A record that was left out: `where` as in a row's origin, and its beginning."""

    where: str
    excerpt: str


class LeftOut(Counter[str]):
    """Reason -> how much of a source is left out for it.

    Attributes:
        read: records so far.
        records: of them, those that can't be used. Reasons that count something else are not in it: rows that repeat, and records
            that have nothing for the source's uses.
        of_records: the reasons of these.
        examples: reason -> its first records.
        unmapped: well-known columns that carry meaning and that the source doesn't map -> records that have them.
        message_keys: keys of messages that are not used -> records that have them.
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
        """Count a record of which no row, or not every row, comes, and nothing is wrong with it."""
        self[reason] += 1
        examples = self.examples.setdefault(reason, [])
        if len(examples) < EXAMPLES:
            examples.append(Example(where, excerpt(values)))

    def ignore(self, keys: Iterable[str]) -> None:
        """Count a record with messages that have these keys, at most KEYS different ones."""
        for key in sorted(shown(key, KEY) for key in keys):
            if key in self.message_keys or len(self.message_keys) < KEYS:
                self.message_keys[key] += 1

    def told(self) -> str:
        """The counts, and the first record, for a message."""
        first = next((example for examples in self.examples.values() for example in examples), None)
        return f"left out: {dict(self) or 'nothing'}{f'; the first: {first.where}: {first.excerpt}' if first else ''}"


def excerpt(values: Any) -> str:
    """The beginning of a record as JSON, on one line, without what a terminal takes as an order. Long texts and lists cost nothing."""
    pieces: list[str] = []
    length = 0
    for piece in _pieces(values, _DEPTH):
        pieces.append(piece)
        length += len(piece)
        if length > EXCERPT:
            break
    return shown("".join(pieces), EXCERPT)


def _pieces(value: Any, depth: int) -> Iterator[str]:
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
    else:
        yield _plain(value)


def _plain(value: Any) -> str:
    if value is None or isinstance(value, bool | float):
        return json.dumps(value)
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number of many digits"
    return str(value) if isinstance(value, int) else f"({type(value).__name__})"


@dataclass
class Tally:
    """Of one source, by use.

    Attributes:
        left_out: reason -> records, or rows where the reason says so.
        read, dropped: rows that the other records gave, and those of them that the source's `drop` took away on reading.
        mixed, dropped_later: the same of the rows that the weights left, for what only all rows or the tokenizer tell.
    """

    left_out: LeftOut = field(default_factory=LeftOut)
    read: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    mixed: Counter[str] = field(default_factory=Counter)
    dropped_later: Counter[str] = field(default_factory=Counter)

    def leave_out_row(self, reason: str, use: str, row: Mapping[str, Any], *, later: bool = False) -> None:
        (self.dropped_later if later else self.dropped)[use] += 1
        reason = f"{use} rows {reason}"
        self.left_out[reason] += 1
        if len(first := self.left_out.examples.setdefault(reason, [])) < EXAMPLES:
            first.append(Example(row.get(ORIGIN) or "", start_of(row)))

    def share(self, use: str) -> float:
        """Of what could have become rows of a use, how much was left out; weights, repeated prompts and the chat template don't count."""
        possible, mixed = self.left_out.records + self.read[use], self.mixed[use]
        on_reading = (self.left_out.records + self.dropped[use]) / possible if possible else 0.0
        later = self.dropped_later[use] / mixed if mixed else 0.0
        return 1.0 - (1.0 - on_reading) * (1.0 - later) if later else on_reading

    def check(self, name: str, uses: Sequence[str], *, limit: float) -> None:
        """At most so much of the source is left out for any use.

        Raises:
            ValueError: more is. The message has the reasons, their counts, and where the first of each stands.
        """
        worst = max(uses, key=self.share)
        if self.share(worst) <= limit:
            return
        found = self.left_out
        read = f"{found.records} of {found.read} records, " if found.read else ""
        rows = f"{self.dropped[worst] + self.dropped_later[worst]} of {self.read[worst]} rows"
        lines = []
        for reason, count in found.most_common():
            lines += [f"  {count} {reason}", *(f"    {named(e.where, shown(e.excerpt, START))}" for e in found.examples.get(reason, ()))]
        raise ValueError(
            f"source {name}: expected at most {limit:.2%} of the {worst} data to be dropped, got {self.share(worst):.2%} ({read}{rows}); "
            "correct the data or the source's format and columns, or raise validation.max_dropped_fraction\n" + "\n".join(lines)
        )


def start_of(row: Mapping[str, Any]) -> str:
    """How a row's conversation ends, or its plain text starts."""
    messages: Sequence[Message | None] = row.get("messages") or ()
    last = (messages[-1] if messages else None) or {}
    return repr(shown((row.get("text") or last.get("content") or last.get("extra") or "").strip(), START))


def named(origin: str | None, text: str) -> str:
    """A place and what stands there."""
    return f"{origin}: {text}" if origin else text
