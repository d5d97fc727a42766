"""Records of users' data sets, in fourteen formats, as rows of the canonical schema.

A converter takes one record and returns rows by use, with all of the record's texts and no others. It raises `Dropped`, with the reason
under which the record is counted, or `Misfit` if the record doesn't have the format at all.

White space at the edges of texts stays: a continuation begins with it, and chat templates treat it in their ways. CRLF and CR become LF.
A prompt that a well-known chat template has written becomes its messages. Content in several parts, and further keys of messages that chat
templates read, go to the field `extra` (data.schema).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from rlhf_core.config import SourceConfig, shown
from rlhf_core.config.data import VERDICTS
from rlhf_core.data.control import PICTURES, is_blank, is_filled, placeholder
from rlhf_core.data.schema import TEXTS, Message, extras, with_tools
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.notation import Notation
from rlhf_core.preparation.pictures import SourcePictures, place
from rlhf_core.preparation.record import PLAIN, Record, as_message, written_conversation
from rlhf_core.preparation.steps import Solution, rated_solutions, read_steps, step_row, tagged_steps
from rlhf_core.preparation.transcripts import hh_turns, interleaved, joined, listed_turns
from rlhf_core.preparation.values import (
    in_order,
    kind,
    not_finite,
    pictures,
    read_boolean,
    read_messages,
    read_number,
    read_scalar,
    read_text,
    read_tools,
)
from rlhf_core.preparation.verdicts import best_and_worse, best_replies, branchings, sign_of_winner

Rows = dict[str, list[dict]]  # use -> rows without id, source and split
STEP_SEPARATOR = "\n\n"  # where no reward model is named
MAX_PAIRS = 4096  # of one record, whose good and bad completions are all paired


def convert(
    values: Mapping[str, Any],
    source: SourceConfig,
    notation: Notation = PLAIN,
    *,
    separator: str = STEP_SEPARATOR,
    pictures: SourcePictures | None = None,
) -> Rows:
    """Return the rows of one record. If the source names slices, rows of the uses preference, stepwise and prompt also have a key `slices`.

    Args:
        notation: of the source's first records.
        separator: between the steps of rows of the use stepwise.
        pictures: for a model that sees.
    Raises:
        Dropped: the record is left out.
        Misfit: the record doesn't have the source's format.
    """
    values, own = (values, []) if pictures is None else pictures.read(values)
    _check_pictures(values, source)
    record = Record(values, source, notation, separator=separator)
    rows = _CONVERTERS[source.format](record)
    if pictures is not None:
        rows = {use: [{**row, "messages": place(row["messages"], own)} if "messages" in row else row for row in rows[use]] for use in rows}
    _check_placeholders(rows)
    if source.slices and (sliced := rows.keys() & {"preference", "stepwise", *({"prompt"} & {*source.uses})}):
        slices = {name: read_scalar(record.at(column, wanted_for=name), column) for name, column in source.slices.items()}
        rows |= {use: [{**row, "slices": slices} for row in rows[use]] for use in sliced}
    return rows


def _check_pictures(values: Mapping[str, Any], source: SourceConfig) -> None:
    """Check that no column that the source doesn't name has pictures, video or sound. Raises Misfit if one has."""
    filled = [column for column in PICTURES if is_filled(values.get(column))]
    named = [*source.columns.values(), *source.slices.values()] if filled else []
    paths = {path.split(".")[0] for theirs in named for path in ([theirs] if isinstance(theirs, str) else theirs)}
    if found := next((column for column in filled if column not in paths), None):
        raise pictures(f"column {found!r}", f"column {found} has pictures, video or sound")


def _check_placeholders(rows: Rows) -> None:
    """Check that no text holds a place for a picture, video or sound. Raises Misfit if one does."""
    for row in (row for use, of_use in rows.items() if use != "pretrain" for row in of_use):
        texts = [*(m["content"] for m in row["messages"]), *(row[name] for name in TEXTS if row.get(name))]
        if found := next(filter(None, map(placeholder, texts)), None):
            raise pictures(f"{found} in a text", f"a text has the placeholder {found}")


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
        return _pair(record, record.prompt(), record.messages("chosen"), record.messages("rejected"))
    talks = in_messages if all(in_messages) else [isinstance(side, str) and written_conversation(side) for side in (chosen, rejected)]
    if all(talks):
        return _pair(record, [], record.messages("chosen"), record.messages("rejected"))
    if not record.source.implicit_prompt:
        got = shown(", ".join(map(str, record.values)))
        raise Misfit(
            f"expected a column 'prompt' beside chosen and rejected as text, got {got}; map prompt in the source's columns, or set its "
            "implicit_prompt: true if both texts begin with the prompt, or format: hh for 'Human:' and 'Assistant:' transcripts",
            "no column prompt",
        )
    return _pair_with_shared_prefix(record, read_text(chosen, "chosen"), read_text(rejected, "rejected"))


def _pair_with_shared_prefix(record: Record, chosen: str, rejected: str) -> Rows:
    """Convert two texts whose common beginning, up to the last whole word, is the prompt."""
    length = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
    shared = chosen[:length]
    inside_a_word = any(text[len(shared) : len(shared) + 1].strip() for text in (chosen, rejected))
    if inside_a_word and not shared[-1:].isspace():
        shared = shared[: max((i + 1 for i, c in enumerate(shared) if c.isspace()), default=0)]
    if not shared.strip():
        raise Dropped("chosen and rejected share no beginning")
    shared = shared.rstrip()  # the space before an answer's first word is the answer's, as in its tokens
    messages = _answerable(record, record.question(shared, "prompt"))
    return _pair_rows(messages, *(record.answer(text[len(shared) :]) for text in (chosen, rejected)))


def _hh(record: Record) -> Rows:
    """Convert Anthropic-HH transcripts. Consecutive turns of one speaker are joined, after the turns before the last are compared one by
    one.
    """
    chosen, rejected = hh_turns(record.text("chosen")), hh_turns(record.text("rejected"))
    if chosen[:-1] != rejected[:-1]:
        raise Dropped("the prompts of chosen and rejected differ")
    return _pair(record, [], joined(chosen), joined(rejected))


def _compared(record: Record) -> Rows:
    """Convert two responses of which one is better by a number below or above 0, a winner's name, or a score of each."""
    sign = _sign(record)
    if sign == 0:
        raise Dropped("neither response is preferred")
    if record.notation.turn_lists:
        turns = [listed_turns(record.get(name)) for name in ("prompt", "first", "second")]
        prompt, (first, second) = [], (interleaved(turns[0], side) for side in turns[1:])
    else:
        first, second = record.messages("first"), record.messages("second")
        whole = len(first) > 1 and len(second) > 1 and not record.has("prompt")
        prompt = [] if whole else record.prompt()
    chosen, rejected = (first, second) if sign < 0 else (second, first)
    return _pair(record, prompt, chosen, rejected)


def _verdict(record: Record) -> tuple[str, ...]:
    """Return the columns that say which answer is better: those that the source maps, or else those that the record has."""
    choices = VERDICTS[record.source.format or ""]
    mapped = [names for names in choices if names[0] in record.source.columns]
    return (mapped or [names for names in choices if all(map(record.has, names))] or list(choices))[0]


def _sign(record: Record) -> float:
    """Return which response is better: below 0 the first, above 0 the second; 0: neither."""
    names = _verdict(record)
    if names == ("winner",):
        first, second = (str(record.source.columns.get(side, side)) for side in ("first", "second"))
        return sign_of_winner(record.get("winner"), first, second)
    numbers = [read_number(record.get(name), name) for name in names]
    return numbers[0] if len(numbers) == 1 else numbers[1] - numbers[0]


def _ranked(record: Record) -> Rows:
    """Pair the best completion, that of the lowest rank or the highest score, with every worse one."""
    items = record.get("completions")
    if not isinstance(items, list) or not items:
        message = f"column 'completions': expected a list of completions, got {kind(items)}; map another column"
        raise Misfit(message, "completions are no list")
    inner = [record.inside(item) for item in items if isinstance(item, Mapping)]
    if len(inner) == len(items):
        (name,) = _verdict(inner[0])
        marks, answers = [item.get(name) for item in inner], [item.messages("completion") for item in inner]
    else:
        (name,) = _verdict(record)
        marks, answers = record.get(name), [record.completion(item, "completions") for item in items]
        if not isinstance(marks, list) or len(marks) != len(items):
            message = f"column {name!r}: expected a list with a number for each of {len(items)} completions, got {kind(marks)}; map another"
            raise Misfit(message, f"{name} has no number for each completion")
    numbers = [read_number(mark, name) for mark in marks]
    messages, texts = _split_answers(record, record.prompt(), answers)
    best, worse = best_and_worse([-number for number in numbers] if name == "rank" else numbers)
    return _graded_rows(record, messages, [texts[i] for i in best], [texts[i] for i in worse])


def _graded(record: Record) -> Rows:
    """Pair every good completion with every bad one; completions are several columns, or one that holds a list."""
    columns = record.source.columns.get("completions", "completions")
    graded = [record.at(c, wanted_for="completions") for c in columns] if isinstance(columns, list) else record.get("completions")
    if not isinstance(graded, list) or not all(isinstance(item, Mapping) for item in graded):
        got = f"{kind(graded)}; see the recipe for GSM8K"
        message = f"column {columns!r}: expected completions with a text and a mark each, got {got}"
        raise Misfit(message, "completions have no text and mark each")
    inner = [record.inside(item) for item in graded]
    marks = [read_boolean(item.get("good"), "good", signed=record.notation.signed) for item in inner]
    messages, texts = _split_answers(record, record.prompt(), [item.messages("completion") for item in inner])
    good, bad = ([text for text, mark in zip(texts, marks, strict=True) if mark is wanted] for wanted in (True, False))
    return _graded_rows(record, messages, good, bad)


def _graded_rows(record: Record, messages: list[Message], good: list[str], bad: list[str]) -> Rows:
    """Return the rows of every good completion paired with every bad one."""
    too_many = len(good) * len(bad) > MAX_PAIRS
    if too_many and "preference" in record.source.uses:
        raise Dropped(f"more than {MAX_PAIRS} pairs of good and bad completions")
    return {
        "sft": [{"messages": messages, "response": g} for g in good],
        "preference": [{"messages": messages, "chosen": g, "rejected": b} for g in good for b in bad] if not too_many else [],
        **_prompt_row(messages),
    }


def _unpaired(record: Record) -> Rows:
    good = read_boolean(record.get("label"), "label", signed=record.notation.signed)
    messages, [completion] = _split_answers(record, record.prompt(), [record.messages("completion")])
    pair = {"messages": messages, "chosen": completion if good else None, "rejected": None if good else completion}
    return {"preference": [pair], "sft": [{"messages": messages, "response": completion}] if good else [], **_prompt_row(messages)}


def _instruction(record: Record) -> Rows:
    """Convert an instruction, followed by the text of `input`, after the turns of `history`: a list of [question, answer]."""
    question = record.text("instruction")
    context = record.optional("input")
    if context is not None and not is_blank(more := read_text(context, "input")) and not is_blank(question):
        question = f"{question}\n\n{more}"
    turns = record.mapped("history") or []
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        message = f"column 'history': expected a list of [question, answer], got {kind(turns)} of something else; map another column"
        raise Misfit(message, "history is no list of [question, answer]")
    texts = [read_text(text, "history") for turn in turns for text in turn]
    history = [as_message(("user", "assistant")[number % 2], text) for number, text in enumerate(texts)]
    messages = _answerable(record, [*history, *record.question(question, "instruction")])
    return {**_prompt_row(messages, record.label()), "sft": [{"messages": messages, "response": record.answer(record.text("output"))}]}


def _one_conversation(record: Record) -> Rows:
    *messages, last = read_messages(record.get("messages"), "messages")
    response, messages = record.answer(_answer_text(last)), _answerable(record, messages)
    return {**_prompt_row(messages, record.label()), "sft": [{"messages": messages, "response": response}]}


def _tree(record: Record) -> Rows:
    """Pair the best reply with every other reply of the assistant that has a rank; the best one, or the only one, is a demonstration."""
    names = {name: str(record.source.columns.get(name, name)) for name in ("text", "replies", "rank")}
    rows: Rows = {"sft": [], "preference": [], "prompt": []}
    for messages, replies, ranks, learned in branchings(record.get("tree"), **names):
        messages, best = _answerable(record, messages), best_replies(ranks)
        rows["prompt"] += _prompt_row(messages)["prompt"]
        rows["sft"] += [{"messages": messages, "response": record.answer(replies[i])} for i in best if learned]
        worse = [i for i, rank in enumerate(ranks) if rank is not None and i not in best]
        rows["preference"] += [
            {"messages": messages, "chosen": record.answer(replies[g]), "rejected": record.answer(replies[w])} for g in best for w in worse
        ]
    if not rows["prompt"]:
        raise Dropped("a tree without a message of the user")
    return rows


def _stepwise(record: Record) -> Rows:
    solution = read_steps(record.get("completions"), record.get("labels"), signed=record.notation.signed)
    return _solution_rows(record, record.prompt(), [solution])


def _prm800k(record: Record) -> Rows:
    """Convert a problem and the rated completions of each step of its solution."""
    question, label = record.get("question"), record.get("label")
    if not isinstance(question, Mapping) or not isinstance(label, Mapping):
        message = f"expected PRM800K's question and label, got {kind(question)} and {kind(label)}; use another format"
        raise Misfit(message, "question and label are no objects")
    messages = record.question(read_text(question.get("problem"), "problem"), "problem")
    solutions = list(rated_solutions(label.get("steps")))
    if not solutions:
        raise Dropped("a solution without rated steps")
    return _solution_rows(record, messages, solutions)


def _math_shepherd(record: Record) -> Rows:
    question, solution = tagged_steps(record.text("input"), record.text("label"))
    return _solution_rows(record, record.question(question, "input"), [solution])


def _solution_rows(record: Record, messages: list[Message], solutions: list[Solution]) -> Rows:
    messages = _answerable(record, messages)
    return {"stepwise": [step_row(messages, *solution, record.separator) for solution in solutions], **_prompt_row(messages)}


def _prompt_only(record: Record) -> Rows:
    return _prompt_row(_answerable(record, record.prompt()), record.label())


def _plain_text(record: Record) -> Rows:
    return {"pretrain": [{"text": record.text("text")}]}


_CONVERTERS: dict[str, Callable[[Record], Rows]] = {
    "preference": _preference,
    "hh": _hh,
    "compared": _compared,
    "graded": _graded,
    "ranked": _ranked,
    "stepwise": _stepwise,
    "prm800k": _prm800k,
    "math_shepherd": _math_shepherd,
    "tree": _tree,
    "unpaired": _unpaired,
    "instruction": _instruction,
    "messages": _one_conversation,
    "prompt": _prompt_only,
    "text": _plain_text,
}


def _prompt_row(messages: list[Message], label: str | None = None) -> Rows:
    return {"prompt": [{"messages": messages, "label": label}]}


def _pair(record: Record, prompt: list[Message], chosen: list[Message], rejected: list[Message]) -> Rows:
    messages, [better, worse] = _split_answers(record, prompt, [chosen, rejected])
    return _pair_rows(messages, better, worse)


def _pair_rows(messages: list[Message], chosen: str, rejected: str) -> Rows:
    return {
        "sft": [{"messages": messages, "response": chosen}],
        "preference": [{"messages": messages, "chosen": chosen, "rejected": rejected}],
        **_prompt_row(messages),
    }


def _split_answers(record: Record, prompt: list[Message], sides: list[list[Message]]) -> tuple[list[Message], list[str]]:
    """Return the conversation before the answers, and the answers' texts.

    Args:
        prompt: the record's prompt; if empty, the turns of the sides before their answers are the prompt.
        sides: messages that end with an answer each; turns before the answer may repeat the prompt or continue it.
    Raises:
        Dropped: the turns before the answers differ, or don't go with the prompt.
    """
    answers = [record.answer(_answer_text(side[-1])) for side in sides]
    earlier = [side[:-1] for side in sides]
    if any(not _are_same(turns, earlier[0]) for turns in earlier):
        raise Dropped("the prompts of chosen and rejected differ")
    turns = earlier[0] if sides else []
    if not turns or not prompt:
        return _answerable(record, prompt or turns), answers
    if _contains(turns, prompt):
        return _answerable(record, turns), answers
    if len(prompt) >= len(turns) and _starts_with(prompt[-len(turns) :], turns):
        return _answerable(record, prompt), answers
    if turns[0]["role"] == "assistant":  # the turns continue the prompt
        return _answerable(record, [*prompt, *turns]), answers
    raise Dropped("the turns before the answer don't hold the prompt")


def _contains(turns: list[Message], prompt: list[Message]) -> bool:
    """Return whether the prompt is the beginning of a conversation, or its first or last message of the user."""
    own = turns[1:] if turns[0]["role"] == "system" and prompt[0]["role"] != "system" else turns
    if _starts_with(own, prompt):
        return True
    of_user = [turn for turn in turns if turn["role"] == "user"]
    return len(prompt) == 1 and any(_starts_with([turn], prompt) for turn in (*of_user[:1], *of_user[-1:]))


def _starts_with(turns: list[Message], prompt: list[Message]) -> bool:
    """Return whether the first turns have everything that the prompt's messages have."""
    return len(turns) >= len(prompt) and all(
        (own["role"], own["content"].strip()) == (wanted["role"], wanted["content"].strip())
        and wanted.get("extra") in (None, own.get("extra"))
        for own, wanted in zip(turns, prompt, strict=False)
    )


def _are_same(turns: list[Message], others: list[Message]) -> bool:
    """Return whether two conversations differ at most by white space at the edges of their texts."""
    edgeless = ([{**turn, "content": turn["content"].strip()} for turn in of] for of in (turns, others))
    return turns == others or next(edgeless) == next(edgeless)


def _answerable(record: Record, messages: list[Message]) -> list[Message]:
    """Return a conversation that waits for an answer, after the text of the column `system` and with the tools of the column `tools`."""
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise Dropped("the prompt doesn't end with a message of the user or of a tool")
    system = record.mapped("system")
    text = "" if system is None else read_text(system, "system")
    if not is_blank(text) and not _are_same(messages[:1], [first := as_message("system", text)]):
        if messages[0]["role"] == "system":
            raise Dropped("the column system and the conversation have different system messages")
        messages = [first, *messages]
    if not in_order(messages):
        raise Dropped("the turns are out of order")
    return with_tools(messages, read_tools(record.mapped("tools"), "tools"))


def _answer_text(last: Message) -> str:
    """Return the text of the message that is learned or judged."""
    if last["role"] != "assistant":
        raise Dropped("the last message is not the assistant's")
    more = extras(last) if "extra" in last else {}
    if "tool_calls" in more:
        raise Dropped("the last message calls a tool: it is no text")
    if "reasoning_content" in more:
        raise Dropped("the last message has reasoning_content beside its text")
    return last["content"]
