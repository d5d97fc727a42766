"""Records of other people's data sets, in nine formats, as rows of the canonical schema.

A converter takes one record and returns its rows per use: all of its texts, none made up. Else it raises `Dropped`, with the reason under
which the record is counted, or `Misfit` where it doesn't have the format at all.

Texts are stripped, since chat templates bring their own white space and many strip what they are given; CRLF and CR become LF. Content in
several parts and what else a chat template may know of a message goes to its field `extra` (rlhf_core.data.schema).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.data.dropped import Dropped, Misfit
from rlhf_core.data.messages import ROLES, in_order, kind, not_finite, read_messages, read_text
from rlhf_core.data.record import Record, read_boolean, read_number, read_scalar
from rlhf_core.data.schema import Message, extras

Rows = dict[str, list[dict]]  # use -> rows without id, source and split
MAX_PAIRS = 4096  # of one record: completions make as many as the good ones times the bad ones
_HH_TURN = re.compile(r"(?:\A|\n\n)(Human|Assistant):")


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
