"""Choose among the readings of a sample, and name the columns that a reading leaves unread."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from rlhf_core.config import shown
from rlhf_core.config.data import FORMATS
from rlhf_core.look.guess import LABEL, SIDES, Columns, Reading, side_columns

MARKS = ("helpfulness", "correctness", "score", "scores", "rating", "reward", "quality", "overall_score", "fine-grained_score")
_TURN = "; docs/tables/formats.md describes how to turn them into pairs or booleans"
FEW_WORDS = 4  # a shorter answer may be for training, or only for checking
# Lower ranks read the whole record; higher ones would read a part of the same columns.
_RANK = {
    **dict.fromkeys(("hh", "preference", "graded", "ranked", "compared", "tree", "stepwise", "prm800k", "math_shepherd"), 0),
    **{"unpaired": 1, "messages": 2, "instruction": 2, "text": 2, "prompt": 3},
}


def resolve_readings(readings: Sequence[Reading], columns: Columns) -> list[Reading]:
    """Return the readings that remain: a single one is the guess; several are a choice for the user."""
    sure = [reading for reading in readings if not reading.doubtful]
    if not sure:
        return list(readings)
    best = min(_RANK[reading.format] for reading in sure)
    left = [reading for reading in sure if _RANK[reading.format] == best]
    if best <= 1:
        return left
    left = [reading for reading in _with_answers(left, sure, columns) if not _is_derived(reading, left, columns)]
    learns = any(reading.format in ("instruction", "messages") for reading in left)
    return [*left, *(reading for reading in readings if reading.doubtful and learns)]


def _with_answers(left: list[Reading], readings: Sequence[Reading], columns: Columns) -> list[Reading]:
    """Adds a reading as prompts with labels if answers have a few words: they may be meant for training or only for checking."""
    first = left[0]
    if first.format != "instruction" or "label_pattern" in first.options or "label" in first.columns:
        return left
    output = str(first.columns.get("output", "output"))
    if output in LABEL and columns[output].share(lambda text: len(str(text).split()) <= FEW_WORDS) > 0.9:
        return [*left, *(reading for reading in readings if reading.format == "prompt" and "label" in reading.columns)]
    return left


def _is_derived(reading: Reading, others: Sequence[Reading], columns: Columns) -> bool:
    """Return whether plain text repeats the texts of other columns, as Alpaca's does."""
    if reading.format != "text" or len(others) == 1:
        return False
    text = columns[str(reading.columns.get("text", "text"))]
    outputs = [columns[str(r.columns.get("output", "output"))] for r in others if r.format == "instruction"]
    return any(
        sum(str(o) in str(t) for t, o in zip(text.values, output.values, strict=False)) > 0.9 * len(output.values) for output in outputs
    )


def unread_columns(reading: Reading, columns: Columns) -> list[str]:
    """Filled top-level columns that the reading doesn't read."""
    ours = {*FORMATS[reading.format][1]} - {"system", "tools", "history"} - {*reading.columns}
    read = {path.split(".")[0] for path in (*reading.theirs(), *ours)}
    return [path for path, column in columns.items() if "." not in path and path not in read and column.values]


def unread_marks(reading: Reading, columns: Columns) -> list[str]:
    """Columns that may mark some of the learned responses as bad: unread ones, or one that would be read as the expected answer."""
    if "sft" not in reading.uses or "preference" in reading.uses:
        return []
    as_label = [path for path in ("label",) if path in columns and path not in reading.theirs() and columns[path].is_mark]
    return [*as_label, *(path for path in unread_columns(reading, columns) if columns[path].may_mark)]


def unreadable_marks(columns: Columns, readings: Iterable[Reading]) -> str | None:
    """Return a message about responses with marks, if no reading reads the marks; else None."""
    if {"message_id", "parent_id", "role", "text"} <= set(columns):
        return "each record is one message of a tree (message_id, parent_id); take the file of whole trees, which format tree reads"
    marks = [name for name in MARKS if name in columns and columns[name].holds({"number"}) and not columns[name].is_flag]
    marks += [path for path in dict.fromkeys(path for r in readings for path in unread_marks(r, columns)) if path not in marks]
    sides = [side for side in SIDES if side_columns(columns, side, "")]
    if sides:
        return f"{sides[0][0]} and {sides[0][1]} are two responses, and which one is better stands in a column that no format reads{_TURN}"
    named = ", ".join(shown(path, 60) for path in marks)
    return f"{named}: values that may mark a response, which no format reads as they are{_TURN}" if marks else None


def unread_answers(columns: Columns, readings: Sequence[Reading]) -> str | None:
    """Return a message about two columns of texts beside a prompt that may be its answers, if the only reading is as prompts; else None."""
    if len(readings) != 1 or readings[0].format != "prompt" or "label" in readings[0].columns:
        return None
    texts = [path for path in unread_columns(readings[0], columns) if columns[path].is_prose]
    if len(texts) < 2:
        return None
    prompt = readings[0].columns.get("prompt", "prompt")
    pair = " ".join(
        f"{ours}={shlex.quote(str(theirs))}" for ours, theirs in (("prompt", prompt), ("chosen", texts[0]), ("rejected", texts[1]))
    )
    named = " and ".join(shown(path, 60) for path in texts[:2])
    return (
        f"{named} may be two answers to {shown(str(prompt), 60)}, and a reading as prompts drops them; if the first one is the better one, "
        f"add --format preference --columns {shown(pair, 400)}, with the names swapped if it is the second"
    )
