"""What a source's records came to: how many were read, how many left out and why, and where the first of each stood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_core.config import shown
from rlhf_core.data.dropped import EXAMPLES, Example, LeftOut
from rlhf_core.data.schema import ORIGIN, Message

START = 80  # characters of a text, in a message


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
