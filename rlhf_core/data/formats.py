"""Formats."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.drops import Dropped, Misfit
from rlhf_core.data.schema import Message, extras
from rlhf_core.data.values import (
    ROLES,
    in_order,
    kind,
    not_finite,
    other_keys,
    read_boolean,
    read_messages,
    read_number,
    read_scalar,
    read_text,
)

# Columns that carry meaning in many data sets. They count only where the source maps them; where it doesn't, that is said.
WELL_KNOWN = ("system", "system_prompt", "history", "context", "tools", "functions")
_MESSAGES = ("prompt", "messages", "chosen", "rejected", "first", "second", "completion")  # our columns that can hold them
_MISSING = object()
MAX_PAIRS = 4096  # of one record: completions make as many as the good ones times the bad ones
_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


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


Rows = dict[str, list[dict]]  # use -> rows without id, source and split


def convert(values: Mapping[str, Any], source: SourceConfig) -> Rows:
    """The rows of one record; those of the use preference have `slices` beside their columns where the source names some.

    Raises:
        Dropped: the record is left out.
        Misfit: the record doesn't have the source's format.
    """
    record = Record(values, source)
    rows = _CONVERTERS[source.format](record)
    if source.slices and "preference" in rows:
        slices = {name: read_scalar(record.at(column, wanted_for=name), column) for name, column in source.slices.items()}
        rows["preference"] = [{**row, "slices": slices} for row in rows["preference"]]
    return rows


def _preference(record: Record) -> Rows:
    chosen, rejected = record.get("chosen"), record.get("rejected")
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if value is None:
            raise Dropped(f"{name} is null")
        if isinstance(value, float) and not math.isfinite(value):
            raise not_finite(value, name)
    in_messages = [isinstance(side, list | Mapping) for side in (chosen, rejected)]
    if len(set(in_messages)) > 1:
        kinds = f"{type(chosen).__name__} and {type(rejected).__name__}; use text for both, or lists of messages"
        raise Misfit(f"expected chosen and rejected of one kind, got {kinds}", "chosen and rejected are of two kinds")
    if record.has("prompt"):
        return _with_answers(record, record.prompt(), _side(chosen, "chosen"), _side(rejected, "rejected"))
    if all(in_messages):
        return _with_answers(record, [], _side(chosen, "chosen"), _side(rejected, "rejected"))
    if not record.source.implicit_prompt:
        got = shown(", ".join(map(str, record.values)))
        raise Misfit(
            f"expected a column 'prompt' beside chosen and rejected as text, got {got}; map prompt in the source's columns, or set its "
            "implicit_prompt: true if both texts begin with the prompt, or format: hh for 'Human:' and 'Assistant:' transcripts",
            "no column prompt",
        )
    return _pair_with_shared_prefix(record, read_text(chosen, "chosen"), read_text(rejected, "rejected"))


def _hh(record: Record) -> Rows:
    """Two turns in a row by one speaker are joined, after the turns before the last have been compared one by one."""
    chosen, rejected = _turns(record.text("chosen")), _turns(record.text("rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise Dropped("the prompts of chosen and rejected differ")
    return _with_answers(record, [], _joined(chosen), _joined(rejected))


def _instruction(record: Record) -> Rows:
    """An instruction, with the text of `input` behind it, after the turns of `history`."""
    if not (question := record.text("instruction")):
        raise Dropped("instruction is empty")
    context = record.optional("input")
    if context is not None and (more := read_text(context, "input")):
        question = f"{question}\n\n{more}"
    messages = _prompt(record, [*_history(record), _user(question)])
    return _with_prompt(messages, record.label(), sft=[{"messages": messages, "response": record.text("output")}])


def _history(record: Record) -> list[Message]:
    """Earlier turns: a list of [question, answer]."""
    turns = record.mapped("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        message = f"column 'history': expected a list of [question, answer], got {kind(turns)} of something else; map another column"
        raise Misfit(message, "history is no list of [question, answer]")
    said = [read_text(text, "history") for turn in turns for text in turn]
    return [{"role": ("user", "assistant")[number % 2], "content": text} for number, text in enumerate(said)]


def _one_conversation(record: Record) -> Rows:
    *messages, last = read_messages(record.get("messages"), "messages")
    response, messages = _final_text(last), _prompt(record, messages)
    return _with_prompt(messages, record.label(), sft=[{"messages": messages, "response": response}])


def _unpaired(record: Record) -> Rows:
    good = read_boolean(record.get("label"), "label")
    messages, [completion] = _placed(record, record.prompt(), [_side(record.get("completion"), "completion")])
    pair = {"messages": messages, "chosen": completion if good else None, "rejected": None if good else completion}
    return _with_prompt(messages, None, preference=[pair], sft=[{"messages": messages, "response": completion}] if good else [])


def _graded(record: Record) -> Rows:
    """Every good completion against every bad one; completions are several columns, or one that holds a list."""
    columns = record.source.columns.get("completions", "completions")
    graded = [record.at(c, wanted_for="completions") for c in columns] if isinstance(columns, list) else record.get("completions")
    if not isinstance(graded, list) or not all(isinstance(item, Mapping) for item in graded):
        got = f"{kind(graded)}; see the recipe for GSM8K"
        message = f"column {columns!r}: expected completions with a text and a mark each, got {got}"
        raise Misfit(message, "completions have no text and mark each")
    inner = [Record(item, record.source) for item in graded]
    marks = [read_boolean(item.get("good"), "good") for item in inner]
    messages, texts = _placed(record, record.prompt(), [_side(item.get("completion"), "completion") for item in inner])
    good, bad = ([text for text, mark in zip(texts, marks, strict=True) if mark is wanted] for wanted in (True, False))
    too_many = len(good) * len(bad) > MAX_PAIRS
    if too_many and "preference" in record.source.uses:
        raise Dropped(f"more than {MAX_PAIRS} pairs of good and bad completions")
    return _with_prompt(
        messages,
        None,
        sft=[{"messages": messages, "response": g} for g in good],
        preference=[{"messages": messages, "chosen": g, "rejected": b} for g in good for b in bad] if not too_many else [],
    )


def _compared(record: Record) -> Rows:
    """Two responses and a number: below 0 the first one is better, above 0 the second one."""
    preference = read_number(record.get("preference"), "preference")
    if preference == 0:
        raise Dropped("neither response is preferred")
    first, second = (_side(record.get(name), name) for name in ("first", "second"))
    chosen, rejected = (first, second) if preference < 0 else (second, first)
    return _with_answers(record, record.prompt(), chosen, rejected)


def _prompt_only(record: Record) -> Rows:
    return _with_prompt(_prompt(record, record.prompt()), record.label())


def _plain_text(record: Record) -> Rows:
    return {"pretrain": [{"text": record.text("text")}]}


_CONVERTERS: dict[str, Callable[[Record], Rows]] = {
    "preference": _preference,
    "hh": _hh,
    "instruction": _instruction,
    "messages": _one_conversation,
    "unpaired": _unpaired,
    "graded": _graded,
    "compared": _compared,
    "prompt": _prompt_only,
    "text": _plain_text,
}


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _with_prompt(messages: list[Message], label: str | None, **rows: list[dict]) -> Rows:
    return {**rows, "prompt": [{"messages": messages, "label": label}]}


def _pair(messages: list[Message], chosen: str, rejected: str) -> Rows:
    return _with_prompt(
        messages,
        None,
        sft=[{"messages": messages, "response": chosen}],
        preference=[{"messages": messages, "chosen": chosen, "rejected": rejected}],
    )


def _with_answers(record: Record, prompt: list[Message], chosen: list[Message], rejected: list[Message]) -> Rows:
    messages, [better, worse] = _placed(record, prompt, [chosen, rejected])
    return _pair(messages, better, worse)


def _placed(record: Record, prompt: list[Message], sides: list[list[Message]]) -> tuple[list[Message], list[str]]:
    """The conversation before the answers, and the answers' texts.

    Args:
        prompt: what the record has as its prompt; empty: the sides' own turns are.
        sides: an answer each, with or without turns before it.
    Raises:
        Dropped: the turns before the answers differ, or don't go with the prompt.
    """
    answers = [_final_text(side[-1]) for side in sides]
    earlier = [side[:-1] for side in sides]
    if any(turns != earlier[0] for turns in earlier):
        raise Dropped("the prompts of chosen and rejected differ")
    turns = earlier[0] if sides else []
    if not turns or not prompt:
        return _prompt(record, prompt or turns), answers
    if _holds(turns, prompt):
        return _prompt(record, turns), answers
    if len(prompt) >= len(turns) and _begins(prompt[-len(turns) :], turns):
        return _prompt(record, prompt), answers
    if turns[0]["role"] == "assistant":  # the turns go on where the prompt ends
        return _prompt(record, [*prompt, *turns]), answers
    raise Dropped("the turns before the answer don't hold the prompt")


def _holds(turns: list[Message], prompt: list[Message]) -> bool:
    """Whether a conversation has the prompt: as its beginning, or as what the user says first or last."""
    own = turns[1:] if turns[0]["role"] == "system" and prompt[0]["role"] != "system" else turns
    if _begins(own, prompt):
        return True
    said = [turn for turn in turns if turn["role"] == "user"]
    return len(prompt) == 1 and any(_begins([turn], prompt) for turn in (*said[:1], *said[-1:]))


def _begins(turns: list[Message], prompt: list[Message]) -> bool:
    """Whether all that the prompt has is in the first of the turns."""
    return len(turns) >= len(prompt) and all(
        (own["role"], own["content"]) == (wanted["role"], wanted["content"]) and wanted.get("extra") in (None, own.get("extra"))
        for own, wanted in zip(turns, prompt, strict=False)
    )


def _pair_with_shared_prefix(record: Record, chosen: str, rejected: str) -> Rows:
    """Two texts whose shared beginning, up to the last whole word, is the prompt."""
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    shared = chosen[:length]
    inside_a_word = any(text[len(shared) : len(shared) + 1].strip() for text in (chosen, rejected))
    if inside_a_word and not shared[-1:].isspace():
        shared = shared[: max((i + 1 for i, c in enumerate(shared) if c.isspace()), default=0)]
    if not shared.strip():
        raise Dropped("chosen and rejected share no beginning")
    return _pair(_prompt(record, [_user(shared.strip())]), chosen[len(shared) :].strip(), rejected[len(shared) :].strip())


def _turns(text: str) -> list[Message]:
    """The turns of an Anthropic-HH transcript as they stand.

    Raises:
        Misfit: the text has no turns.
    """
    before, *parts = _HH_TURN.split(text)
    if not parts or before.strip():
        got = f"{shown(repr(text[:60]))}; use another format"
        raise Misfit(
            f"expected a transcript of 'Human:' and 'Assistant:' turns, got {got}", "no transcript of 'Human:' and 'Assistant:' turns"
        )
    return [{"role": ROLES[who.lower()], "content": said.strip()} for who, said in zip(parts[::2], parts[1::2], strict=True)]


def _joined(turns: list[Message]) -> list[Message]:
    joined: list[Message] = []
    for turn in turns:
        if joined and joined[-1]["role"] == turn["role"]:
            joined[-1] = {"role": turn["role"], "content": f"{joined[-1]['content']}\n\n{turn['content']}"}
        else:
            joined.append(turn)
    return joined


def _prompt(record: Record, messages: list[Message]) -> list[Message]:
    """A conversation that can be answered, with the text of the column `system` before it."""
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise Dropped("the prompt doesn't end with a message of the user or of a tool")
    system = record.mapped("system")
    if system is not None and (text := read_text(system, "system")) and messages[0] != (first := {"role": "system", "content": text}):
        if messages[0]["role"] == "system":
            raise Dropped("the column system and the conversation have different system messages")
        messages = [first, *messages]
    if not in_order(messages):
        raise Dropped("the turns are out of order")
    return messages


def _side(value: Any, column: str) -> list[Message]:
    """A completion, given as text or as a list of messages whose last one is the assistant's."""
    if isinstance(value, list | Mapping):
        return read_messages(value, column)
    return [{"role": "assistant", "content": read_text(value, column)}]


def _final_text(last: Message) -> str:
    """Of the message that is learned or judged: a text."""
    if last["role"] != "assistant":
        raise Dropped("the last message is not the assistant's")
    more = extras(last) if "extra" in last else {}
    if "tool_calls" in more:
        raise Dropped("the last message calls a tool: it is no text")
    if "reasoning_content" in more:
        raise Dropped("the last message has reasoning_content beside its text")
    return last["content"]
