"""Records of other people's data sets, in eight formats, as rows of the canonical schema.

A converter takes one record and returns its rows per use, or raises `Dropped` with the reason why the record can't be
used, which is counted. A record that doesn't have the format at all raises ValueError: the mapping is wrong, not the record.

Texts are stripped: chat templates bring their own white space, and many strip what they are given. Content in several parts and what else
a chat template may know of a message goes to its field `extra` (rlhf_core.data.schema).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.messages import ROLES, Dropped, read_messages, read_text
from rlhf_core.data.schema import Message, extras

Rows = dict[str, list[dict]]  # use -> rows without id, source and split
_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")
_MISSING = object()


class Record:
    """One record, seen through the source's column mapping."""

    def __init__(self, values: Mapping[str, Any], source: SourceConfig):
        self.values = values
        self.source = source

    def get(self, name: str) -> Any:
        """The value of one of our columns.

        Raises:
            ValueError: the record doesn't have that column.
        """
        return self.at(self.source.columns.get(name, name), wanted_for=name)

    def optional(self, name: str) -> Any:
        """The value of a column that the format can do without, unless the mapping names it: then it must be there."""
        return self.get(name) if name in self.source.columns else self.values.get(name)

    def text(self, name: str) -> str:
        return read_text(self.get(name), self.source.columns.get(name, name))

    def label(self) -> str | None:
        """The expected answer, found by `label_pattern` where there is one; stripped.

        Raises:
            Dropped: the pattern finds nothing.
        """
        value = self.optional("label")
        if value is None:
            return None
        text = _scalar(value, "label")
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
                    there = ", ".join(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
                    raise ValueError(
                        f"expected a column {path!r} for {wanted_for!r}, got {shown(there)}; map {wanted_for} in the source's columns"
                    )
                value = value[part]
        return value


def convert(values: Mapping[str, Any], source: SourceConfig) -> Rows:
    """The rows of one record; those of the use preference have `slices` beside their columns where the source names some.

    Raises:
        Dropped: the record is left out.
        ValueError: the record doesn't have the source's format.
    """
    record = Record(values, source)
    rows = _CONVERTERS[source.format](record)
    if source.slices and "preference" in rows:
        slices = {name: _scalar(record.at(column, wanted_for=name), column) for name, column in source.slices.items()}
        rows["preference"] = [{**row, "slices": slices} for row in rows["preference"]]
    return rows


def _preference(record: Record) -> Rows:
    prompt, chosen, rejected = record.optional("prompt"), record.get("chosen"), record.get("rejected")
    if isinstance(chosen, list) != isinstance(rejected, list):
        kinds = f"{type(chosen).__name__} and {type(rejected).__name__}"
        raise ValueError(f"expected chosen and rejected of one kind, got {kinds}; use text for both, or lists of messages")
    if prompt is not None:
        return _pair(_conversation(prompt, "prompt"), _answer(chosen, "chosen"), _answer(rejected, "rejected"))
    if isinstance(chosen, list):
        return _pair_of_conversations(read_messages(chosen, "chosen"), read_messages(rejected, "rejected"))
    return _pair_with_shared_prefix(read_text(chosen, "chosen"), read_text(rejected, "rejected"))


def _hh(record: Record) -> Rows:
    """Two turns in a row by one speaker are joined, after the turns before the last have been compared one by one."""
    chosen, rejected = _turns(record.text("chosen")), _turns(record.text("rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise Dropped("the prompts of chosen and rejected differ")
    return _pair_of_conversations(_joined(chosen), _joined(rejected))


def _instruction(record: Record) -> Rows:
    instruction, context = record.text("instruction"), record.optional("input")
    content = instruction if context is None or not str(context).strip() else f"{instruction}\n\n{read_text(context, 'input')}"
    messages = _conversation(content, "instruction")
    return _with_prompt(messages, record.label(), sft=[{"messages": messages, "response": record.text("output")}])


def _one_conversation(record: Record) -> Rows:
    *messages, last = read_messages(record.get("messages"), "messages")
    response = _final_text(last)
    return _with_prompt(_prompt(messages), record.label(), sft=[{"messages": messages, "response": response}])


def _unpaired(record: Record) -> Rows:
    messages = _conversation(record.get("prompt"), "prompt")
    completion, good = _answer(record.get("completion"), "completion"), _boolean(record.get("label"), "label")
    pair = {"messages": messages, "chosen": completion if good else None, "rejected": None if good else completion}
    return _with_prompt(messages, None, preference=[pair], sft=[{"messages": messages, "response": completion}] if good else [])


def _graded(record: Record) -> Rows:
    """Every good completion against every bad one; completions are several columns, or one that holds a list."""
    messages = _conversation(record.get("prompt"), "prompt")
    columns = record.source.columns.get("completions", "completions")
    graded = [record.at(c, wanted_for="completions") for c in columns] if isinstance(columns, list) else record.get("completions")
    if not isinstance(graded, list) or not all(isinstance(item, Mapping) for item in graded):
        raise ValueError(
            f"column {columns!r}: expected completions with a text and a mark each, got {type(graded).__name__}; see the recipe for GSM8K"
        )
    good: list[str] = []
    bad: list[str] = []
    for item in graded:
        inner = Record(item, record.source)
        (good if _boolean(inner.get("good"), "good") else bad).append(inner.text("completion"))
    return _with_prompt(
        messages,
        None,
        sft=[{"messages": messages, "response": g} for g in good],
        preference=[{"messages": messages, "chosen": g, "rejected": b} for g in good for b in bad],
    )


def _prompt_only(record: Record) -> Rows:
    return _with_prompt(_conversation(record.get("prompt"), "prompt"), record.label())


def _plain_text(record: Record) -> Rows:
    return {"pretrain": [{"text": record.text("text")}]}


_CONVERTERS: dict[str, Callable[[Record], Rows]] = {
    "preference": _preference,
    "hh": _hh,
    "instruction": _instruction,
    "messages": _one_conversation,
    "unpaired": _unpaired,
    "graded": _graded,
    "prompt": _prompt_only,
    "text": _plain_text,
}


def _with_prompt(messages: list[Message], label: str | None, **rows: list[dict]) -> Rows:
    return {**rows, "prompt": [{"messages": messages, "label": label}]}


def _pair(messages: list[Message], chosen: str, rejected: str) -> Rows:
    return _with_prompt(
        messages,
        None,
        sft=[{"messages": messages, "response": chosen}],
        preference=[{"messages": messages, "chosen": chosen, "rejected": rejected}],
    )


def _pair_of_conversations(chosen: list[Message], rejected: list[Message]) -> Rows:
    """Two conversations that differ in their last message only, which is the assistant's."""
    texts = [_final_text(side[-1]) for side in (chosen, rejected)]
    if chosen[:-1] != rejected[:-1]:
        raise Dropped("the prompts of chosen and rejected differ")
    return _pair(_prompt(chosen[:-1]), *texts)


def _pair_with_shared_prefix(chosen: str, rejected: str) -> Rows:
    """Two texts whose shared beginning, up to the last whole word, is the prompt."""
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    shared = chosen[:length]
    inside_a_word = any(text[len(shared) : len(shared) + 1].strip() for text in (chosen, rejected))
    if inside_a_word and not shared[-1:].isspace():
        shared = shared[: max((i + 1 for i, c in enumerate(shared) if c.isspace()), default=0)]
    if not shared.strip():
        raise Dropped("chosen and rejected share no beginning")
    return _pair(_conversation(shared, "prompt"), chosen[len(shared) :].strip(), rejected[len(shared) :].strip())


def _turns(text: str) -> list[Message]:
    """The turns of an Anthropic-HH transcript as they stand.

    Raises:
        ValueError: the text has no turns.
    """
    before, *parts = _HH_TURN.split(text)
    if not parts or before.strip():
        raise ValueError(f"expected a transcript of 'Human:' and 'Assistant:' turns, got {text[:60]!r}; use another format")
    return [{"role": ROLES[who.lower()], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def _joined(turns: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"]:
            joined[-1] = {"role": turn["role"], "content": f"{joined[-1]['content']}\n\n{turn['content']}"}
        else:
            joined.append(turn)
    return joined


def _conversation(value: Any, column: str) -> list[Message]:
    """A prompt, given as text or as messages."""
    return _prompt(read_messages(value, column) if isinstance(value, list) else [{"role": "user", "content": read_text(value, column)}])


def _prompt(messages: list[Message]) -> list[Message]:
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise Dropped("the prompt doesn't end with a message of the user or of a tool")
    return messages


def _answer(value: Any, column: str) -> str:
    """A completion, given as text or as a list whose last message is the assistant's."""
    if not isinstance(value, list):
        return read_text(value, column)
    return _final_text(read_messages(value, column)[-1])


def _final_text(last: Message) -> str:
    """Of the message that is learned or judged: a text."""
    if last["role"] != "assistant":
        raise Dropped("the last message is not the assistant's")
    if "tool_calls" in extras(last):
        raise Dropped("the last message calls a tool: it is no text")
    return last["content"]


def _scalar(value: Any, column: str) -> str:
    """Text, a number or a truth value, as text."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"column {column!r}: expected a finite number or text, got {value}; correct it, or leave it out as null")
    if value is not None and not isinstance(value, str | int | float | Decimal | date | time):
        raise ValueError(f"column {column!r}: expected text or a number, got {type(value).__name__}; map another column")
    return read_text(value if isinstance(value, str) else _digits(value, column), column)


def _digits(value: Any, column: str) -> str:
    try:
        return str(value)
    except ValueError as error:  # Python refuses to write integers of thousands of digits
        raise ValueError(f"column {column!r}: expected a number, got one of thousands of digits; correct it") from error


def _boolean(value: Any, column: str) -> bool:
    """True or false, also as 1 or 0, or as their names (CSV has nothing else)."""
    named = {"true": True, "1": True, "false": False, "0": False}
    if isinstance(value, int) and value in (0, 1):
        return bool(value)
    key = value.strip().lower() if isinstance(value, str) else None
    if key not in named:
        got = shown(repr(value[:200])) if isinstance(value, str) else str(value) if isinstance(value, float) else type(value).__name__
        raise ValueError(f"column {column!r}: expected true or false, got {got}; convert it first")
    return named[key]
