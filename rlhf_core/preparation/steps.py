"""Responses in labelled steps: the formats stepwise, prm800k and math_shepherd as rows of the use stepwise.

A label is 1 (right), 0 (neutral) or -1 (wrong).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlhf_core.data.control import is_blank
from rlhf_core.data.schema import Message
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.values import kind, read_boolean, read_text

TAG = "\N{CYRILLIC SMALL LETTER KA}\N{CYRILLIC SMALL LETTER I}"  # ends each step of Math-Shepherd's `input`
SIGNS = {"+": 1, "-": -1}  # stand in the tags' places in its `label`
_FIRST_STEP = re.compile(r"\bstep 1\s*:", re.IGNORECASE)

Solution = tuple[list[str], list[int]]  # steps and their labels


def step_row(messages: Sequence[Message], steps: Sequence[str], labels: Sequence[int], separator: str) -> dict[str, Any]:
    """Return a row of the use stepwise, whose response is the steps, without white space at their edges, with the separator between them.

    Raises:
        Dropped: a step is empty, or has the separator inside it, so that the response would have other steps.
    """
    texts = [step.strip() for step in steps]
    if any(map(is_blank, texts)):
        raise Dropped("a step is empty")
    response = separator.join(texts)
    if response.split(separator) != texts:
        raise Dropped(f"a step has the separator {separator!r} inside it (reward.step_separator)")
    return {"messages": list(messages), "response": response, "labels": list(labels)}


def read_steps(steps: Any, labels: Any, *, signed: bool) -> Solution:
    """Return steps and labels of two lists.

    Args:
        signed: labels are 1, 0 and -1; otherwise true and false, or 1 and 0.
    Raises:
        Dropped: there are no steps, or their number isn't the labels'.
        Misfit: the values are no such lists.
    """
    for name, value in (("completions", steps), ("labels", labels)):
        if not isinstance(value, list):
            message = f"column {name!r}: expected a list, with an item for each step, got {kind(value)}; map another column"
            raise Misfit(message, f"{name} are no list")
    if not steps:
        raise Dropped("a response without steps")
    if len(steps) != len(labels):
        raise Dropped("there isn't one label for each step")
    return [read_text(step, "completions") for step in steps], [_label(label, signed=signed) for label in labels]


def _label(value: Any, *, signed: bool) -> int:
    if signed and not isinstance(value, bool) and value in (0, "0"):
        return 0
    return 1 if read_boolean(value, "labels", signed=signed and not isinstance(value, bool)) else -1


def rated_solutions(steps: Any) -> Iterator[Solution]:
    """Yield the solutions in PRM800K's `label.steps`: the one that was continued, and one for each completion that ends there.

    A step without a chosen completion goes on with the labeller's own, which is right. Completions without a rating are left out.

    Raises:
        Misfit: these are no such steps.
    """
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        message = f"column 'label': expected steps with rated completions, got {kind(steps)}; map another column"
        raise Misfit(message, "label has no steps with completions")
    texts: list[str] = []
    ratings: list[int] = []
    for step in steps:
        completions, chosen, own = _choice(step)
        for number, completion in enumerate(completions):
            if number != chosen and completion.get("rating") is not None:
                yield [*texts, read_text(completion.get("text"), "text")], [*ratings, _rating(completion)]
        if chosen is not None and completions[chosen].get("rating") is not None:
            texts, ratings = [*texts, read_text(completions[chosen].get("text"), "text")], [*ratings, _rating(completions[chosen])]
        elif chosen is None and own is not None:
            texts, ratings = [*texts, read_text(own.get("text"), "text")], [*ratings, 1]
        else:
            break
    if texts:
        yield texts, ratings


def _choice(step: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], int | None, Mapping[str, Any] | None]:
    """Return a step's completions, the position of the chosen one and the labeller's own completion; None without one."""
    completions, chosen, own = step.get("completions") or [], step.get("chosen_completion"), step.get("human_completion")
    are_texts = isinstance(completions, list) and all(isinstance(one, Mapping) for one in (*completions, own or {}))
    if not are_texts or not (chosen is None or chosen in range(len(completions))):
        message = (
            "column 'label': expected steps with lists of completions, each with a text, and the place of one or null as "
            f"chosen_completion, got {kind(step)}; correct the record"
        )
        raise Misfit(message, "label has no steps with completions")
    return completions, None if chosen is None else int(chosen), own


def _rating(completion: Mapping[str, Any]) -> int:
    if completion["rating"] not in (1, 0, -1):
        message = f"column 'label': expected ratings 1, 0 and -1, got {kind(completion['rating'])}; correct the record"
        raise Misfit(message, "a rating isn't 1, 0 or -1")
    return int(completion["rating"])


def tagged_steps(text: str, marked: str) -> tuple[str, Solution]:
    """Return the question, the steps and the labels of Math-Shepherd's two texts.

    Raises:
        Dropped: the texts differ in more than the tags, no step is the first, or the last one has no tag.
        Misfit: the text has no tags.
    """
    *pieces, rest = text.split(TAG)
    if not pieces:
        message = f"column 'input': expected steps that end in {TAG!r}, got {kind(text)}; use another format"
        raise Misfit(message, "input has no tags of steps")
    signs = [marked[place : place + 1] for place in _places(pieces)]
    rebuilt = "".join(piece + sign for piece, sign in zip(pieces, signs, strict=True)) + rest
    if not SIGNS.keys() >= set(signs) or rebuilt.strip() != marked.strip():
        raise Dropped("input and label differ in more than the tags of steps")
    if rest.strip():
        raise Dropped("there isn't one label for each step")
    first = _FIRST_STEP.search(pieces[0])
    if first is None:
        raise Dropped("the text before the first tag has no 'Step 1:'")
    return pieces[0][: first.start()].strip(), ([pieces[0][first.start() :], *pieces[1:]], [SIGNS[sign] for sign in signs])


def _places(pieces: Sequence[str]) -> Iterator[int]:
    """Yield the places of the signs, of one character each, behind the pieces."""
    place = 0
    for piece in pieces:
        place += len(piece)
        yield place
        place += 1
