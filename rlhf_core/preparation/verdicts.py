"""Which of several answers is better: by rank or score, by a winner's name, and along a tree of replies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_core.data.schema import Message
from rlhf_core.preparation.drops import Dropped, Misfit
from rlhf_core.preparation.values import ROLES, kind, read_number, read_scalar, read_text

TIES = ("tie", "tied", "both", "neither", "none", "draw", "equal", "same", "bothbad", "tie (bothbad)")
LONGEST_ENDING = 20  # characters
_ENDING = re.compile(r"(\d+|(?<![a-z])[a-z])$")  # of response_a, answer_0, human_ref_A
# Winners that name an answer by its ending. Other names that end so, such as llama-2, are models.
_STEMS = "model|response|answer|assistant|completion|option|output|candidate|conversation"
_NAMED = re.compile(rf"(?:(?:{_STEMS})[ _-]?)?(\d+|[a-z])")


def best_and_worse(scores: Sequence[float]) -> tuple[list[int], list[int]]:
    """Return the indices of the highest scores, and of all others.

    Raises:
        Dropped: no score is higher than another.
    """
    if len(set(scores)) < 2:
        raise Dropped("no completion is better than another")
    best = max(scores)
    return [i for i, score in enumerate(scores) if score == best], [i for i, score in enumerate(scores) if score < best]


def sign_of_winner(value: Any, first: str, second: str) -> int:
    """Return -1 if the first answer wins, 1 if the second does, 0 for a tie.

    Args:
        value: first or second, the name of an answer's column, or the ending that only one of the columns has, alone or behind one of a
            few words: a or model_a for response_a.
        first, second: names of the answers' columns.
    Raises:
        Dropped: the value is null. Misfit: it names neither.
    """
    if value is None:
        raise Dropped("winner is null")
    text = read_scalar(value, "winner").lower()
    if text in TIES:
        return 0
    names = [{own, column.lower()} for own, column in (("first", first), ("second", second))]
    endings = [_ending(column) for column in (first, second)]
    named = _NAMED.fullmatch(text) if endings[0] != endings[1] else None
    wins = [text in own or (named is not None and named[1] == of) for own, of in zip(names, endings, strict=True)]
    if wins[0] == wins[1]:
        message = (
            f"column 'winner': expected {first!r}, {second!r} or tie, got {kind(value)}; map first_score and second_score, or convert it"
        )
        raise Misfit(message, "winner names neither answer")
    return -1 if wins[0] else 1


def is_verdict(value: Any, first: str, second: str) -> bool:
    """Return whether `sign_of_winner` can read the value."""
    try:
        sign_of_winner(value, first, second)
    except (Dropped, Misfit):
        return False
    return True


def _ending(name: str) -> str | None:
    found = _ENDING.search(name[-LONGEST_ENDING:].lower())
    return found[1] if found else None


class Branching(NamedTuple):
    """A conversation in a tree, and its next messages.

    ranks: of the replies, lower is better; None: not ranked. learned: whether the assistant's messages so far are the best ones.
    """

    messages: list[Message]
    replies: list[str]
    ranks: list[float | None]
    learned: bool


def branchings(root: Any, *, text: str, replies: str, rank: str) -> Iterator[Branching]:
    """Yield each conversation of a tree that ends with the user. A message that is marked as deleted ends its branch.

    Args:
        root: a message of the user: an object with a role, a text and a list of replies, which have the same keys.
        text, replies, rank: the names of these keys.
    Raises:
        Dropped, Misfit: there is no such tree.
    """
    waiting: list[tuple[Any, list[Message], bool]] = [(root, [], True)]
    while waiting:
        node, before, learned = waiting.pop()
        role, own = _role(node), read_text(node.get(text), text)
        messages = [*before, Message(role=role, content=own)]
        children = [child for child in _children(node, replies) if not child.get("deleted")]
        if role == "assistant":
            waiting += [(child, messages, learned) for child in reversed(children)]
            continue
        ranks = [None if child.get(rank) is None else read_number(child[rank], rank) for child in children]
        yield Branching(messages, [read_text(child.get(text), text) for child in children], ranks, learned)
        best = best_replies(ranks)
        waiting += [(child, messages, learned and i in best) for i, child in reversed(list(enumerate(children)))]


def best_replies(ranks: Sequence[float | None]) -> list[int]:
    """Return the indices of the replies of the best rank, or of the only reply; none if several aren't ranked."""
    known = [rank for rank in ranks if rank is not None]
    return [i for i, rank in enumerate(ranks) if (known and rank == min(known)) or len(ranks) == 1]


def _children(node: Mapping[str, Any], replies: str) -> list[Mapping[str, Any]]:
    found = node.get(replies) or []
    if not isinstance(found, list) or not all(isinstance(child, Mapping) for child in found):
        message = f"column {replies!r}: expected a list of messages with replies, got {kind(found)}; map another column"
        raise Misfit(message, "a message's replies are no list of messages")
    return found


def _role(node: Any) -> str:
    role = node.get("role") if isinstance(node, Mapping) else None
    if not isinstance(role, str) or ROLES.get(role.lower()) not in ("user", "assistant"):
        got = kind(role if isinstance(node, Mapping) else node)
        raise Misfit(f"column 'tree': expected a message with the role prompter or assistant, got {got}; map another column", "no tree")
    return ROLES[role.lower()]
