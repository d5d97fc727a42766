"""Readings of a sample of records: the formats and column mappings that fit, with reasons and with what the data can't tell.

Names and kinds of columns propose a reading; it is kept only if `convert`, which prepare_data uses, accepts the records (look.look). If
several readings fit equally well, the user has to choose (look.resolve).
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from rlhf_core.config import shown
from rlhf_core.config.data import FORMATS
from rlhf_core.look.columns import Column, kind_of, same_keys
from rlhf_core.preparation.steps import TAG
from rlhf_core.preparation.values import read_tools
from rlhf_core.preparation.verdicts import is_verdict

Columns = Mapping[str, Column]
Mapped = dict[str, str | list[str]]
TEXT, TALK = frozenset({"text"}), frozenset({"text", "messages"})
VALUE = frozenset({"text", "number", "boolean"})

PROMPT = ("prompt", "question", "instruction", "query", "problem", "user_prompt", "input.messages", "context", "input")
PAIRS = (
    ("chosen", "rejected"),
    ("good_answer", "bad_answer"),
    ("good_response", "bad_response"),
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
# Words in the name of a column whose yes means that a response is bad: read as it is, it would turn all marks round.
BAD = {
    *("bad", "toxic", "harmful", "unsafe", "wrong", "incorrect", "rejected", "disliked", "dislike", "down", "negative"),
    "flagged",
    "spam",
}
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
    ("response_0", "response_1"),
    ("answer_0", "answer_1"),
    ("answer_1", "answer_2"),
    ("conversation_a", "conversation_b"),
    ("human_ref_A", "human_ref_B"),
)
COMPARED = ("preference", "overall_preference", "preference_strength")  # numbers below and above 0, as HelpSteer2 and 3 have them
WINNER = (
    *(
        "winner",
        "better_response_id",
        "safer_response_id",
        "preferred",
        "better",
        "choice",
        "verdict",
        "preference",
        "label",
        "chosen",
        "best",
    ),
    *("human_preference", "vote"),
)
SCORE_PAIRS = (
    *(("first_score", "second_score"), ("score_A", "score_B"), ("score_a", "score_b"), ("score_0", "score_1"), ("score_1", "score_2")),
    *(("score1", "score2"), ("rating_a", "rating_b"), ("rating_1", "rating_2"), ("winner_model_a", "winner_model_b")),
)
COMPARED_PROMPT = ("history", "full_text", "post")  # a prompt's column in comparisons only
RANK = ("rank",)
SCORE = ("score", "overall_score", "pm_score", "rating", "reward")
SCORES = (*SCORE, "scores", "ratings", "rewards", "ranks")  # lists beside a list of completions
STEPS = ("completions", "steps", "solution_steps")
STEP_LABELS = ("labels", "ratings", "step_labels")
MOSTLY_VERDICTS = 0.9  # share of a column's values

_TEXTS = {*PROMPT, *COMPLETION, *INSTRUCTION, *CONTEXT, *OUTPUT, *LABEL, *PLAIN} - {*GOOD}  # columns whose content is learned or checked
_CAN_DO_WITHOUT = ("system", "tools", "history", "input", "label", "winner", "first_score", "second_score", "rank")
_LIKELY = {
    **{
        "prompt": PROMPT,
        "completion": COMPLETION,
        "completions": COMPLETIONS,
        "messages": TALKS,
        "instruction": INSTRUCTION,
        "output": OUTPUT,
    },
    **{"label": GOOD, "good": GOOD, "text": PLAIN, "preference": COMPARED, "rank": RANK, "score": SCORES, "tree": ("tree", "prompt")},
    **{side: names for sides in (PAIRS, SIDES) for side, names in zip(sides[0], zip(*sides, strict=True), strict=True)},
}


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
        """Paths of the user's columns that this reading uses."""
        return {path for value in self.columns.values() for path in (value if isinstance(value, list) else [value])}


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
    """Return the mapping with columns for turns before the prompt, which are read only if the mapping names them."""
    ours = FORMATS[reading.format][1]
    earlier = [("system", path) for path in ("system", "system_prompt") if path in columns and columns[path].holds(TEXT)][:1]
    if "history" in columns and columns["history"].holds({"list"}):
        earlier.append(("history", "history"))
    if "tools" in columns and _are_tools(columns["tools"].values):
        earlier.append(("tools", "tools"))
    mapped = {name: path for name, path in earlier if name in ours}
    why = tuple(f"{path} comes before the prompt" for path in mapped.values())
    return replace(reading, columns={**reading.columns, **mapped}, why=(*reading.why, *why)) if mapped else reading


def _are_tools(values: Sequence[Any]) -> bool:
    try:
        return any([read_tools(value, "tools") for value in values])
    except ValueError:
        return False


def columns_line(format_: str, columns: Columns) -> str:
    """Command-line options that map a format's columns, with `...` where no column has a likely name."""
    needed = [ours for ours in FORMATS[format_][1] if ours not in _CAN_DO_WITHOUT or (format_, ours) == ("unpaired", "label")]
    likely = {ours: next((name for name in _LIKELY.get(ours, (ours,)) if name in columns), "...") for ours in needed}
    return f"--format {format_} --columns " + " ".join(f"{ours}={shlex.quote(theirs)}" for ours, theirs in likely.items())


def _mapping(reading: Reading) -> Mapped:
    """Return the mapping without columns that have our name anyway, except those that are read only if the mapping names them."""
    named = {"system", "tools", "history"}
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


def _inner(objects: Sequence[Mapping[str, Any]], marks: Sequence[str] = GOOD) -> tuple[str, str] | None:
    """Return the keys of a completion's text and of its mark: true or false, or a number if the marks are ranks or scores."""
    keys = list(dict.fromkeys(key for item in objects for key in item))
    values = {key: [item[key] for item in objects if item.get(key) is not None] for key in keys}
    text_keys = [key for key in (*COMPLETION, "text", "content") if values.get(key)]
    texts = [key for key in text_keys if all(isinstance(v, str) for v in values[key])]
    columns = {key: Column(key, Counter(map(kind_of, values[key])), values[key]) for key in marks if values.get(key)}
    found = [key for key, column in columns.items() if (column.is_flag if marks is GOOD else column.holds({"number"}))]
    return (texts[0], found[0]) if texts and found else None


def _ranked(columns: Columns) -> Iterator[Reading]:
    prompts = pick(columns, PROMPT, TALK)
    for path in pick(columns, COMPLETIONS, frozenset({"objects", "messages"})):
        objects = [item for value in columns[path].of("objects", "messages") for item in value]
        for name, marks in (("rank", RANK), ("score", SCORE)):
            if inner := _inner(objects, marks):
                text, mark = inner
                why = f"{path} holds completions with a text and a {mark} each"
                yield from (_of_ranks(prompt, name, mark, why, completions=path, completion=text) for prompt in prompts)
                break
    for path in pick(columns, (*COMPLETIONS, "completion"), frozenset({"list"})):
        for mark in pick(columns, SCORES, frozenset({"list"})):
            if _are_parallel(columns[path], columns[mark]):
                name = "rank" if mark == "ranks" else "score"
                why = f"{path} and {mark} are lists of completions and of a number for each"
                yield from (_of_ranks(prompt, name, mark, why, completions=path) for prompt in prompts)


def _of_ranks(prompt: str, name: str, mark: str, why: str, **completions: str) -> Reading:
    order = "a lower" if name == "rank" else "a higher"
    return Reading("ranked", {"prompt": prompt, name: mark, **completions}, (why, f"{order} {mark} is read as the better one"))


def is_number(value: Any) -> bool:
    return kind_of(value) == "number"


def _are_parallel(completions: Column, marks: Column, is_mark: Callable[[Any], bool] = is_number) -> bool:
    """Return whether nearly every list of texts goes with a list of as many marks."""
    pairs = list(zip(completions.values, marks.values, strict=False))
    lists = [isinstance(texts, list) and isinstance(of, list) and len(texts) == len(of) for texts, of in pairs]
    fit = [
        ok and all(isinstance(text, str) for text in texts) and all(map(is_mark, of)) for ok, (texts, of) in zip(lists, pairs, strict=True)
    ]
    return sum(fit) > MOSTLY_VERDICTS * len(fit)


def _compared(columns: Columns) -> Iterator[Reading]:
    sides = next((side for side in SIDES if side_columns(columns, side, "")), None)
    if sides is None:
        return
    first, second = sides
    prompts = pick(columns, PROMPT, TALK) or pick(columns, COMPARED_PROMPT, TALK)
    whole = columns[first].holds({"messages"}) and columns[second].holds({"messages"})
    numbers = [(path,) for path in pick(columns, COMPARED, frozenset({"number"}))[:1]]
    winners = [
        (path,) for path in pick(columns, WINNER, VALUE) if path not in (*sides, *numbers[:1]) and _names_winners(columns[path], *sides)
    ]
    scores = [pair for pair in SCORE_PAIRS if all(path in columns and columns[path].holds({"number"}) for path in pair)][:1]
    for names, paths in (
        *((("preference",), path) for path in numbers),
        *((("winner",), p) for p in winners),
        *((_SCORES, p) for p in scores),
    ):
        why, unsure = _comparison(columns, names, paths, sides)
        for prompt in prompts or ([None] if whole else []):
            mapped: Mapped = dict(zip(names, paths, strict=True)) | {"first": first, "second": second}
            yield Reading("compared", mapped if prompt is None else {"prompt": prompt, **mapped}, (why,), unsure)


_SCORES = ("first_score", "second_score")


def _names_winners(column: Column, first: str, second: str) -> bool:
    return column.share(lambda value: is_verdict(value, first, second)) > MOSTLY_VERDICTS


def _comparison(columns: Columns, names: Sequence[str], paths: Sequence[str], sides: tuple[str, str]) -> tuple[str, tuple[str, ...]]:
    """Why the columns tell which of two responses is better, and what they leave open."""
    first, second = sides
    two = f"{first} and {second} are two responses"
    if names == ("winner",):
        unsure = f"{paths[0]} is read as the name of the better one; look whether that is right"
        return f"{two}, and {paths[0]} names the better one", () if paths[0] in WINNER[:3] else (unsure,)
    if names == ("preference",):
        unsure = f"{paths[0]} below 0 is read as {first} being better, above 0 as {second}; look whether that is right"
        return f"{two}, and {paths[0]} a number", () if paths[0] in COMPARED[1:] else (unsure,)
    marks = next((columns[path].values for path in ("labels", "label") if path in columns and columns[path].is_flag), [])
    scores = zip(columns[paths[0]].values, columns[paths[1]].values, strict=False)
    agree = [bool(mark) == (a > b) for mark, (a, b) in zip(marks, scores, strict=False) if kind_of(a) == kind_of(b) == "number" and a != b]
    differ = min(sum(agree), len(agree) - sum(agree))
    unsure = f"labels say otherwise than {paths[0]} and {paths[1]} in {differ} of {len(agree)} records, whichever label means {first}"
    return f"{two}, and the one of the higher {paths[0]} or {paths[1]} is the better one", (unsure,) if differ > 0.1 * len(agree) else ()


def _trees(columns: Columns) -> Iterator[Reading]:
    for path, column in columns.items():
        if "." not in path and column.share(_is_root) > MOSTLY_VERDICTS:
            yield Reading("tree", {"tree": path}, (f"{path} is a message with replies, which have replies in turn",))


def _is_root(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("replies"), list) and isinstance(value.get("text"), str) and "role" in value


def _unpaired(columns: Columns) -> Iterator[Reading]:
    flags = [path for path in pick(columns, GOOD, VALUE) if columns[path].is_flag]
    top = [path for path in columns if "." not in path and path not in (*flags, *_TEXTS)]
    others = [path for path in top if columns[path].is_mark and not BAD & {*re.split("[^a-z]+", path.lower())}]
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
        elif label := [
            path for path in _unlike(pick(columns, LABEL, VALUE), instruction, output, *context[:1]) if not _marks(columns, path)
        ]:
            yield replace(reading, columns={**mapped, "label": label[0]}, why=(*reading.why, f"{label[0]} is the label"))
        else:
            yield reading


def _marks(columns: Columns, path: str) -> bool:
    """Return whether a column that is called like an expected answer marks the responses."""
    return path.rpartition(".")[2] in GOOD and columns[path].is_mark


def _prompts(columns: Columns) -> Iterator[Reading]:
    prompts = pick(columns, PROMPT, TALK) or [p for p in pick(columns, TALKS, frozenset({"messages"})) if columns[p].ends_with_user]
    for prompt in prompts:
        labels = _unlike(pick(columns, LABEL, VALUE), prompt)
        mapped: Mapped = {"prompt": prompt} | ({"label": labels[0]} if labels else {})
        why = f"{prompt} is a prompt" + (f" and {labels[0]} the expected answer" if labels else "")
        pattern = bool(labels) and columns[labels[0]].share(lambda text: "####" in str(text)) > 0.9
        yield Reading("prompt", mapped, (why,), options={"label_pattern": GSM8K} if pattern else {})


def _stepwise(columns: Columns) -> Iterator[Reading]:
    if {"question.problem", "label.steps"} <= set(columns):
        yield Reading("prm800k", {}, ("question has a problem, and label the rated completions of its steps",))
    if {"input", "label"} <= set(columns) and columns["input"].share(lambda text: TAG in str(text)) > MOSTLY_VERDICTS:
        yield Reading("math_shepherd", {}, (f"the steps of input end in {TAG}",))
    for path in pick(columns, STEPS, frozenset({"list"})):
        for labels in pick(columns, STEP_LABELS[: 1 if path in COMPLETIONS else None], frozenset({"list"})):
            if _are_parallel(columns[path], columns[labels], is_label):
                why = f"{path} and {labels} are lists of steps and of a label for each"
                for prompt in pick(columns, PROMPT, TALK):
                    yield Reading("stepwise", {"prompt": prompt, "completions": path, "labels": labels}, (why,))


def is_label(value: Any) -> bool:
    return isinstance(value, bool) or value in (1, 0, -1)


def _plain(columns: Columns) -> Iterator[Reading]:
    for path in pick(columns, PLAIN, TEXT):
        yield Reading("text", {"text": path}, (f"{path} is plain text",))


_PROPOSALS: tuple[Callable[[Columns], Iterator[Reading]], ...] = (
    _stepwise,
    _pairs,
    _graded,
    _ranked,
    _compared,
    _trees,
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
