"""How a source writes its conversations, where a single record can't tell: found over its first records.

A text that looks so by chance in a few records stays as it is. Where the first records agree, the later ones that differ are dropped.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.config.data import FORMATS
from rlhf_core.preparation.transcripts import holds_turns, listed_turns, transcript
from rlhf_core.preparation.values import ROLES, RawRecord, find_value, plain_number

FIRST, FIRST_CHARACTERS = 100, 2**24  # records that tell, and the text in them, at most
NEARLY_ALL, FEW = 0.9, 0.1  # shares of the records
AS_MESSAGES = "text that writes down messages, and is read as messages"
LONGEST_LITERAL = 2**20  # characters of a Python literal, which takes more memory than JSON
_SIDES = {"preference": ("chosen", "rejected"), "compared": ("first", "second"), "unpaired": ("completion",)}
_MARKS = {"unpaired": "label", "graded": "good", "stepwise": "labels"}
_WHAT = {
    "whole_texts": "answers begin with the prompt",
    "transcripts": "prompts are transcripts such as of Human: and Assistant:",
    "turn_lists": "prompt and answers are JSON lists of turns",
    "one_whole_text": "some answers begin with the prompt and others to it don't,",
    "answers_with_turns": "answers are transcripts such as of Human: and Assistant:",
}
_HOW = {  # what is read otherwise than it stands
    "whole_texts": "it is removed from them (implicit_prompt)",
    "transcripts": "their turns are read as messages (transcripts)",
    "turn_lists": "the turns are read as messages",
}
_OBJECT = re.compile(r"""\[?\s*\{\s*['"]""")
_CONTENT = re.compile(r"""(['"])(?:content|value)\1\s*:""")
_ROLE = re.compile(rf"""(['"])(?:role|from)\1\s*:\s*(['"])(?:{"|".join(ROLES)})\2""", re.IGNORECASE)


@dataclass(frozen=True)
class Notation:
    """What the records of a source have in common.

    whole_texts: answers begin with the prompt, which isn't a part of them.
    transcripts: prompts are transcripts of several turns.
    turn_lists: prompt and both answers are JSON lists of texts, a text for each turn.
    signed: marks are 1 and -1, and 0 is neutral.
    read: sentences on what is read so. unsure: sentences on what only some records have.
    """

    whole_texts: bool = False
    transcripts: bool = False
    turn_lists: bool = False
    signed: bool = False
    read: tuple[str, ...] = ()
    unsure: tuple[str, ...] = ()


def notation_of(records: Sequence[Mapping[str, Any]], source: SourceConfig) -> Notation:
    """Return the notation of a source's first records; `implicit_prompt` and `transcripts` decide on whole texts and transcripts unless
    None.
    """
    records = records[:FIRST]
    texts = [(_prompt(record, source), _answers(record, source)) for record in records]
    shares = {
        "whole_texts": 0.0 if source.implicit_prompt is False else _share(_begin(prompt, answers) for prompt, answers in texts),
        "transcripts": 0.0 if source.transcripts is False else _share(_transcripts(prompt for prompt, _ in texts)),
        "one_whole_text": _share(_one_begins(prompt, answers) for prompt, answers in texts),
        "answers_with_turns": _share(holds_turns(text) for _, answers in texts for text in answers if isinstance(text, str)),
        "turn_lists": _share(_are_turn_lists(prompt, answers) for prompt, answers in texts) if source.format == "compared" else 0.0,
    }
    of = f"of the first {len(records)} records"
    return Notation(
        whole_texts=bool(source.implicit_prompt) or shares["whole_texts"] >= NEARLY_ALL,
        transcripts=bool(source.transcripts) or shares["transcripts"] >= NEARLY_ALL,
        turn_lists=shares["turn_lists"] >= NEARLY_ALL,
        signed=any(_is_minus_one(record, source) for record in records),
        read=tuple(f"{_WHAT[name]}; {how}" for name, how in _HOW.items() if shares[name] >= NEARLY_ALL),
        unsure=tuple(
            f"{_WHAT[name]} in {share:.0%} {of}, and are read as they are"
            for name, share in shares.items()
            if share > (FEW if name in _HOW else 0.5) and not (name in _HOW and share >= NEARLY_ALL)
        ),
    )


def check_signs(record: Mapping[str, Any], source: SourceConfig, notation: Notation) -> None:
    """Check that no mark is -1 if none of the first records has one, since 0 was then read as false and not as neutral. Raises
    ValueError.
    """
    if not notation.signed and _is_minus_one(record, source):
        name = _MARKS[source.format or ""]
        raise ValueError(
            f"column {shown(repr(source.columns.get(name, name)))}: expected marks as in the first {FIRST} records, got -1, which none "
            "of them has and beside which 0 means neither good nor bad; write the marks as true and false, or put a record with -1 first"
        )


def _prompt(record: Mapping[str, Any], source: SourceConfig) -> Any:
    """Return the prompt as it stands in the record; None of a format without one."""
    name = next((name for name in ("prompt", "instruction") if name in FORMATS[source.format or "text"][1]), None)
    return None if name is None else find_value(record, source.columns.get(name, name))


def _answers(record: Mapping[str, Any], source: SourceConfig) -> list[Any]:
    """Return the answers of a record, as they stand there; none of a format without a prompt of its own."""
    names = {ours: source.columns.get(ours, ours) for ours in ("completions", "completion", *_SIDES.get(source.format or "", ()))}
    if source.format in ("graded", "ranked"):
        of = find_value(record, names["completions"])
        return [find_value(item, names["completion"]) if isinstance(item, Mapping) else item for item in of] if isinstance(of, list) else []
    return [find_value(record, names[side]) for side in _SIDES.get(source.format or "", ())]


def _transcripts(prompts: Iterable[Any]) -> Iterator[bool]:
    """Return whether each of the prompts that are texts is a transcript."""
    return (transcript(prompt) is not None for prompt in prompts if isinstance(prompt, str) and prompt.strip())


def _are_turn_lists(prompt: Any, answers: list[Any]) -> bool:
    lists = [listed_turns(text) for text in (prompt, *answers)]
    return len({len(turns) for turns in lists if turns is not None}) == 1 and None not in lists


def _begin(prompt: Any, answers: list[Any]) -> bool | None:
    """Return whether all answers begin with the prompt and go on; None if they aren't texts."""
    begin = _each_begins(prompt, answers)
    return all(begin) if begin else None


def _one_begins(prompt: Any, answers: list[Any]) -> bool:
    """Return whether some answers begin with the prompt and some don't."""
    return len(set(_each_begins(prompt, answers))) > 1


def _each_begins(prompt: Any, answers: list[Any]) -> list[bool]:
    if not all(isinstance(text, str) for text in (prompt, *answers)) or not (start := _plain(prompt)):
        return []
    return [text.startswith(start) and len(text) > len(start) for text in map(_plain, answers)]


def _plain(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").strip()


def _is_minus_one(record: Mapping[str, Any], source: SourceConfig) -> bool:
    if (name := _MARKS.get(source.format or "")) is None:
        return False
    path = source.columns.get(name, name)
    of = find_value(record, source.columns.get("completions", "completions")) if source.format == "graded" else [record]
    marks = [find_value(item, path) for item in of if isinstance(item, Mapping)] if isinstance(of, list) else []
    marks = marks[0] if source.format == "stepwise" and isinstance(marks[0], list) else marks  # a list of one for each step
    return any((mark.strip() if isinstance(mark, str) else plain_number(mark)) in ("-1", "-1.0") for mark in marks if _is_scalar(mark))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, str | float) or (isinstance(value, int) and value == -1)


def _share(found: Iterable[bool | None]) -> float:
    """Return the share of true values among those that aren't None."""
    known = [item for item in found if item is not None]
    return sum(known) / len(known) if known else 0.0


def beginning(records: Iterable[RawRecord]) -> tuple[list[RawRecord], Iterator[RawRecord]]:
    """Yield the first records, and an iterator over all. What their reading raises is raised by the iterator, at its place."""
    iterator, first, characters = iter(records), [], 0
    failed: ValueError | OSError | None = None
    try:
        while len(first) < FIRST and characters < FIRST_CHARACTERS and (record := next(iterator, None)) is not None:
            first.append(record)
            characters += sum(len(value) for value in record.values.values() if isinstance(value, str))
    except (ValueError, OSError) as error:
        failed = error

    def everything() -> Iterator[RawRecord]:
        yield from first
        if failed is not None:
            raise failed
        yield from iterator

    return first, everything()


def with_messages(records: Iterable[RawRecord]) -> Iterator[RawRecord]:
    """Yield the records, with lists of messages instead of texts that write them down, as JSON or as Python prints them.

    A column is read so if most of its first texts look so. A text in it that is no such list becomes a list that holds the text, which
    no format accepts.
    """
    first, records = beginning(records)
    texts: dict[str, list[bool]] = {}
    for record in first:
        for column, value in record.values.items():
            if isinstance(value, str) and value.strip():
                texts.setdefault(column, []).append(_looks_like_messages(value))
    columns = [column for column, looks in texts.items() if 2 * sum(looks) > len(looks)]
    if not columns:
        yield from records
        return
    remark = f"{shown(', '.join(columns), 200)}: {AS_MESSAGES}"
    for where, values, note in records:
        read = {column: _messages(values[column]) for column in columns if column in values}
        yield RawRecord(where, {**values, **read}, f"{note}; {remark}" if note else remark)


def _looks_like_messages(text: str) -> bool:
    return _OBJECT.match(text.lstrip()) is not None and _ROLE.search(text) is not None and _CONTENT.search(text) is not None


def _messages(value: Any) -> Any:
    """Return the messages that a text writes down. Other values stay, but a text that writes none becomes a list."""
    if not isinstance(value, str) or not value.strip():
        return value
    for parse in _PARSERS:
        try:
            found = parse(value)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(found, list | dict):
            return found
    return [value]


def _literal(text: str) -> Any:
    if len(text) > LONGEST_LITERAL:
        raise ValueError("too long for a literal")
    with warnings.catch_warnings(action="ignore"):  # of escapes that Python doesn't know
        return ast.literal_eval(text.strip().replace("}\n {", "}, {"))  # NumPy prints no commas between objects


_PARSERS: tuple[Callable[[str], Any], ...] = (json.loads, _literal)
