"""Readings of a sample of records: the formats and column mappings that fit, with reasons and with what the data can't tell.

Names and kinds of columns propose a reading; it is kept only if `convert`, which prepare_data uses, accepts the records (look.look). If
several readings fit equally well, the user has to choose (look.settle).
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from rlhf_core.config import shown
from rlhf_core.config.data import FORMATS
from rlhf_core.look.columns import Column, same_keys

Columns = Mapping[str, Column]
Mapped = dict[str, str | list[str]]
TEXT, TALK = frozenset({"text"}), frozenset({"text", "messages"})
VALUE = frozenset({"text", "number", "boolean"})

PROMPT = ("prompt", "question", "instruction", "query", "problem", "user_prompt", "input.messages", "context", "input")
PAIRS = (
    ("chosen", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("preferred", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("accepted", "rejected"),
    ("better", "worse"),
    ("positive", "negative"),
)
COMPLETION = ("completion", "response", "output", "answer", "generation", "solution", "target")
GOOD = ("label", "good", "is_correct", "correct", "preferred", "liked", "thumbs_up", "passed", "feedback")
COMPLETIONS = ("completions", "responses", "answers", "generations", "candidates")
TALKS = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
INSTRUCTION = ("instruction", "question", "prompt", "query", "problem", "input")
CONTEXT = ("input", "context")
OUTPUT = ("output", "response", "answer", "completion", "solution", "target")
LABEL = ("label", "answer", "ground_truth", "final_answer", "expected", "target", "solution")
PLAIN = ("text", "content", "document", "story")
GSM8K = r"####\s*(\S+)"
SIDES = (
    ("first", "second"),
    ("response1", "response2"),
    ("response_1", "response_2"),
    ("response_a", "response_b"),
    ("answer_a", "answer_b"),
    ("completion_a", "completion_b"),
)
COMPARED = ("preference", "overall_preference", "preference_strength")  # numbers below and above 0, as HelpSteer2 and 3 have them

_TEXTS = {*PROMPT, *COMPLETION, *INSTRUCTION, *CONTEXT, *OUTPUT, *LABEL, *PLAIN} - {*GOOD}  # columns whose content is learned or checked
_CAN_DO_WITHOUT = ("system", "history", "input", "label")
_LIKELY = {
    **{
        "prompt": PROMPT,
        "completion": COMPLETION,
        "completions": COMPLETIONS,
        "messages": TALKS,
        "instruction": INSTRUCTION,
        "output": OUTPUT,
    },
    **{"label": GOOD, "good": GOOD, "text": PLAIN, "preference": COMPARED},
    **{side: names for sides in (PAIRS, SIDES) for side, names in zip(sides[0], zip(*sides, strict=True), strict=True)},
}

# Well-known data sets: name, columns, and the format with its further keys; "" if no format reads them.
KNOWN = (
    ("UltraFeedback (binarized)", {"prompt", "prompt_id", "chosen", "rejected", "messages", "score_chosen"}, "preference"),
    ("ORPO-DPO-mix", {"source", "prompt", "chosen", "rejected"}, "preference"),
    ("HelpSteer", {"prompt", "response", "helpfulness", "correctness", "coherence"}, ""),
    ("HelpSteer2-Preference", {"prompt", "response_1", "response_2", "preference_strength"}, "compared"),
    ("HelpSteer3-Preference", {"context", "response1", "response2", "overall_preference"}, "compared"),
    ("OpenAI's preference files", {"input", "preferred_output", "non_preferred_output"}, "preference"),
    ("TRL's unpaired preference (KTO)", {"prompt", "completion", "label"}, "unpaired"),
    ("TRL's preference", {"prompt", "chosen", "rejected"}, "preference"),
    ("Anthropic's HH-RLHF", {"chosen", "rejected"}, "hh"),
    ("TRL's preference with an implicit prompt", {"chosen", "rejected"}, "preference"),
    ("ShareGPT", {"conversations"}, "messages"),
    ("Alpaca", {"instruction", "input", "output"}, "instruction"),
    ("Dolly", {"instruction", "context", "response"}, "instruction"),
    ("OpenAI's chat files", {"messages"}, "messages"),
    ("GSM8K", {"question", "answer"}, "instruction label_pattern"),
)


@dataclass(frozen=True)
class Reading:
    """A format with its columns, as `data.sources` takes them.

    why: evidence in the data. unsure: what the data can't tell. unread: other columns, which this reading doesn't read.
    options: further keys of the source. uses: empty until it is tried.
    doubtful: only the values suggest it, not the names; it doesn't outrank other readings.
    """

    format: str
    columns: Mapped
    why: tuple[str, ...]
    unsure: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    uses: tuple[str, ...] = ()
    doubtful: bool = False

    def theirs(self) -> set[str]:
        """Paths of the user's columns that it reads."""
        return {path for value in self.columns.values() for path in (value if isinstance(value, list) else [value])}


def known_as(columns: Columns, readings: Iterable[Reading]) -> str | None:
    """The well-known data set with such columns, if its format is the one of a reading or no format reads it."""
    formats = {form for r in readings for form in (r.format, " ".join([r.format, *r.options]))}
    return next((name for name, wanted, form in KNOWN if wanted <= set(columns) and form in ("", *formats)), None)


def propose(columns: Columns, named: Mapping[str, str]) -> list[Reading]:
    """Every reading whose columns exist, the more specific ones first; none is tried yet.

    Args:
        named: our name -> the user's column that is to be read under this name.
    """
    seen = {**columns, **{ours: columns[theirs] for ours, theirs in named.items()}}
    found = [_with_earlier(reading, seen) for make in _PROPOSALS for reading in make(seen)]
    # A column that the user has named is read under that name only: as `input`, say, and never as an instruction.
    own = [r for r in found if all(ours == path for ours, path in r.columns.items() if isinstance(path, str) and path in named)]
    used = [{ours: theirs for ours, theirs in named.items() if reading.columns.get(ours) == ours} for reading in own]
    return [replace(r, columns=_mapping(replace(r, columns={**r.columns, **of}))) for r, of in zip(own, used, strict=True)]


def _with_earlier(reading: Reading, columns: Columns) -> Reading:
    """With the columns for turns before the prompt, which are read only if the mapping names them."""
    ours = FORMATS[reading.format][1]
    earlier = [("system", path) for path in ("system", "system_prompt") if path in columns and columns[path].holds(TEXT)][:1]
    if "history" in columns and columns["history"].holds({"list"}):
        earlier.append(("history", "history"))
    mapped = {name: path for name, path in earlier if name in ours}
    why = tuple(f"{path} comes before the prompt" for path in mapped.values())
    return replace(reading, columns={**reading.columns, **mapped}, why=(*reading.why, *why)) if mapped else reading


def columns_line(format_: str, columns: Columns) -> str:
    """Command-line options that map a format's columns; `...` where no column has a likely name."""
    needed = [ours for ours in FORMATS[format_][1] if ours not in _CAN_DO_WITHOUT or (format_, ours) == ("unpaired", "label")]
    likely = {ours: next((name for name in _LIKELY.get(ours, (ours,)) if name in columns), "...") for ours in needed}
    return f"--format {format_} --columns " + " ".join(f"{ours}={shlex.quote(theirs)}" for ours, theirs in likely.items())


def _mapping(reading: Reading) -> Mapped:
    """Without columns that have our name anyway, except those that are read only if the mapping names them."""
    named = {"system", "history"}
    return {ours: theirs for ours, theirs in reading.columns.items() if ours != theirs or ours in named}


def pick(columns: Columns, names: Iterable[str], kinds: frozenset[str]) -> list[str]:
    """Paths with one of the names and kinds. Our own name wins, then top-level columns."""
    names = list(names)

    def fits(path: str) -> bool:
        return columns[path].holds(kinds)

    if names[0] in columns and fits(names[0]):
        return names[:1]
    top = [name for name in names if name in columns and fits(name)]
    return top or [path for path in columns if "." in path and path.rpartition(".")[2] in names and fits(path)]


def _pairs(columns: Columns) -> Iterator[Reading]:
    sides = [side for pair in PAIRS for end in ("", ".messages", ".content", ".value") if (side := side_columns(columns, pair, end))]
    for chosen, rejected in sides[:1] or _nested_sides(columns):
        texts = columns[chosen].holds(TEXT)
        if texts and columns[chosen].share(_is_transcript) > 0.5:
            yield Reading("hh", {"chosen": chosen, "rejected": rejected}, ("both texts are transcripts of Human: and Assistant: turns",))
            return
        prompts = _unlike(pick(columns, PROMPT, TALK), chosen, rejected) or [
            path for path in pick(columns, TALKS, frozenset({"messages"})) if columns[path].ends_with_user
        ]
        kind = "texts" if texts else "conversations"
        why = (f"{chosen} and {rejected} are {kind}",)
        for prompt in prompts:
            yield Reading("preference", {"prompt": prompt, "chosen": chosen, "rejected": rejected}, (*why, f"{prompt} is the prompt"))
        if not prompts:
            reading = Reading("preference", {"chosen": chosen, "rejected": rejected}, why)
            shared = "beginning of both texts is" if texts else "turns of both conversations are"
            unsure = f"no prompt column: the shared {shared} taken as the prompt; look whether that is right"
            yield replace(reading, unsure=(unsure,), options={"implicit_prompt": True} if texts else {})


def side_columns(columns: Columns, pair: tuple[str, str], end: str) -> tuple[str, str] | None:
    names = tuple(f"{side}{end}" for side in pair)
    fits = all(name in columns and columns[name].holds(TALK) for name in names)
    return (names[0], names[1]) if fits else None


def _nested_sides(columns: Columns) -> list[tuple[str, str]]:
    """Pairs of sides that are keys of one object."""
    heads = sorted({path.rpartition(".")[0] for path in columns if "." in path})
    pairs = ((f"{head}.{chosen}", f"{head}.{rejected}") for head in heads for chosen, rejected in PAIRS)
    return [side for pair in pairs if (side := side_columns(columns, pair, ""))]


def _graded(columns: Columns) -> Iterator[Reading]:
    for group in same_keys(columns):
        inner = [_inner(columns[path].of("object")) for path in group]
        if inner[0] is not None and all(found == inner[0] for found in inner):
            text, good = inner[0]
            yield from _graded_readings(columns, group, text, good, f"{', '.join(group)} have a text and a mark each")
    for path in pick(columns, COMPLETIONS, frozenset({"objects", "messages"})):
        inner = _inner([item for value in columns[path].of("objects", "messages") for item in value])
        if inner is not None:
            yield from _graded_readings(columns, path, *inner, f"{path} holds completions with a text and a mark each")


def _graded_readings(columns: Columns, completions: str | list[str], text: str, good: str, why: str) -> Iterator[Reading]:
    for prompt in pick(columns, PROMPT, TALK):
        yield Reading("graded", {"prompt": prompt, "completions": completions, "completion": text, "good": good}, (why,))


def _inner(objects: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """The keys of a completion's text and mark."""
    keys = list(dict.fromkeys(key for item in objects for key in item))
    values = {key: [item[key] for item in objects if item.get(key) is not None] for key in keys}
    text_keys = [key for key in (*COMPLETION, "text", "content") if values.get(key)]
    texts = [key for key in text_keys if all(isinstance(v, str) for v in values[key])]
    flags = [key for key in GOOD if values.get(key) and Column(key, Counter(), values[key]).is_flag]
    return (texts[0], flags[0]) if texts and flags else None


def _compared(columns: Columns) -> Iterator[Reading]:
    sides = [side for side in SIDES if side_columns(columns, side, "")]
    numbers = pick(columns, COMPARED, frozenset({"number"}))
    for (first, second), number in product(sides[:1], numbers[:1]):
        why = f"{first} and {second} are two responses, and {number} a number"
        sure = number in COMPARED[1:]
        unsure = () if sure else (f"{number} below 0 is read as {first} being better, above 0 as {second}; look whether that is right",)
        for prompt in pick(columns, PROMPT, TALK):
            mapped: Mapped = {"prompt": prompt, "first": first, "second": second, "preference": number}
            yield Reading("compared", mapped, (why,), unsure)


def _unpaired(columns: Columns) -> Iterator[Reading]:
    flags = [path for path in pick(columns, GOOD, VALUE) if columns[path].is_flag]
    others = [path for path, column in columns.items() if "." not in path and path not in (*flags, *_TEXTS) and column.is_mark]
    for prompt, completion, good in product(pick(columns, PROMPT, TALK), pick(columns, COMPLETION, TALK), flags):
        if len({prompt, completion, good}) == 3:
            why = f"{good} is true or false and says whether {completion} is good"
            yield Reading("unpaired", {"prompt": prompt, "completion": completion, "label": good}, (why,))
    for prompt, completion, mark in product(pick(columns, PROMPT, TALK), pick(columns, COMPLETION, TALK), others):
        if len({prompt, completion, mark}) == 3:
            why = f"{shown(mark, 60)} has two values, and may say whether {completion} is good"
            yield Reading("unpaired", {"prompt": prompt, "completion": completion, "label": mark}, (why,), doubtful=True)


def _conversations(columns: Columns) -> Iterator[Reading]:
    for path in pick(columns, TALKS, frozenset({"messages"})):
        if not columns[path].ends_with_user:
            roles = sorted({str(m.get("role", m.get("from"))) for value in columns[path].of("messages")[:200] for m in value})
            yield Reading("messages", {"messages": path}, (f"{path} is a conversation of {', '.join(shown(r, 20) for r in roles[:6])}",))


def _instructions(columns: Columns) -> Iterator[Reading]:
    outputs = pick(columns, OUTPUT, TEXT)
    if {"solution", "answer"} <= {*outputs}:  # in MATH the answer is the result of the solution
        outputs = ["solution"]
    for instruction, output in product(pick(columns, INSTRUCTION, TEXT), outputs):
        if instruction == output:
            continue
        mapped: Mapped = {"instruction": instruction, "output": output}
        if context := _unlike(pick(columns, CONTEXT, TEXT), instruction, output):
            mapped["input"] = context[0]
        reading = Reading("instruction", mapped, (f"{instruction} is a text and {output} its answer",))
        if columns[output].share(lambda text: "####" in str(text)) > 0.9:
            why = (*reading.why, f"{output} ends with #### and the result, which becomes the label")
            yield replace(reading, columns={**mapped, "label": output}, options={"label_pattern": GSM8K}, why=why)
        elif label := _unlike(pick(columns, LABEL, VALUE), instruction, output, *context[:1]):
            yield replace(reading, columns={**mapped, "label": label[0]}, why=(*reading.why, f"{label[0]} is the label"))
        else:
            yield reading


def _prompts(columns: Columns) -> Iterator[Reading]:
    prompts = pick(columns, PROMPT, TALK) or [p for p in pick(columns, TALKS, frozenset({"messages"})) if columns[p].ends_with_user]
    for prompt in prompts:
        labels = _unlike(pick(columns, LABEL, VALUE), prompt)
        mapped: Mapped = {"prompt": prompt} | ({"label": labels[0]} if labels else {})
        why = f"{prompt} is a prompt" + (f" and {labels[0]} the expected answer" if labels else "")
        pattern = bool(labels) and columns[labels[0]].share(lambda text: "####" in str(text)) > 0.9
        yield Reading("prompt", mapped, (why,), options={"label_pattern": GSM8K} if pattern else {})


def _plain(columns: Columns) -> Iterator[Reading]:
    for path in pick(columns, PLAIN, TEXT):
        yield Reading("text", {"text": path}, (f"{path} is plain text",))


_PROPOSALS: tuple[Callable[[Columns], Iterator[Reading]], ...] = (
    _pairs,
    _graded,
    _compared,
    _unpaired,
    _conversations,
    _instructions,
    _prompts,
    _plain,
)


def _unlike(paths: list[str], *others: str) -> list[str]:
    return [path for path in paths if path not in others]


def _is_transcript(text: Any) -> bool:
    return isinstance(text, str) and text.lstrip().startswith(("Human:", "Assistant:")) and "Assistant:" in text
