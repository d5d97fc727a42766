"""Token sequences end to end in one array of 4 bytes a token, and examples made of them when they are read."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rlhf_core.data.pictures import Picture

Item = TypeVar("Item")


class SeenIds(list[int]):
    """Token ids of a text with pictures, which a model needs beside them. As lists, equal ids beside other pictures are equal."""

    def __init__(self, ids: Iterable[int], pictures: tuple[Picture, ...]):
        super().__init__(ids)
        self.pictures = pictures


def pictures_beside(ids: Sequence[int]) -> tuple[Picture, ...]:
    """Return the pictures of a text with these token ids."""
    return ids.pictures if isinstance(ids, SeenIds) else ()


def beside_pictures(ids: list[int], pictures: tuple[Picture, ...]) -> list[int]:
    """Return the token ids of a text with these pictures."""
    return SeenIds(ids, pictures) if pictures else ids


def content_of(ids: Sequence[int]) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
    """Return ids and pictures, which are equal for equal inputs of a model."""
    return tuple(ids), pictures_beside(ids)


class TokenTable:
    """Numbered token sequences."""

    def __init__(self) -> None:
        self._ids, self._ends = array("i"), array("q", [0])

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, number: int) -> list[int]:
        return self._ids[self._ends[number] : self._ends[number + 1]].tolist()

    def length(self, number: int) -> int:
        return self._ends[number + 1] - self._ends[number]

    def add(self, ids: Iterable[int]) -> int:
        """Append a sequence. Returns its number."""
        self._ids.extend(ids)
        self._ends.append(len(self._ids))
        return len(self) - 1

    def extend(self, other: TokenTable) -> None:
        """Append another table's sequences."""
        before = len(self._ids)
        self._ids.extend(other._ids)
        self._ends.extend(before + end for end in other._ends[1:])


@dataclass(frozen=True)
class EncodedTurns:
    """Conversations up to a turn, and that turn with its end; turns that follow equal prompts may share the prompt's sequence.

    prompts, turns: of each conversation, numbers of sequences in `tokens`. thoughts: tokens of the turn before its answer begins.
    pictures: of the conversations that have some, by their numbers.
    """

    tokens: TokenTable = field(default_factory=TokenTable)
    prompts: array[int] = field(default_factory=lambda: array("i"))
    turns: array[int] = field(default_factory=lambda: array("i"))
    thoughts: array[int] = field(default_factory=lambda: array("i"))
    pictures: dict[int, tuple[Picture, ...]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.prompts)

    def add(self, prompt: int, turn_ids: list[int], thoughts: int = 0, pictures: tuple[Picture, ...] = ()) -> None:
        if pictures:
            self.pictures[len(self)] = pictures
        self.prompts.append(prompt)
        self.turns.append(self.tokens.add(turn_ids))
        self.thoughts.append(thoughts)

    def extend(self, other: EncodedTurns) -> None:
        before, number = len(self.tokens), len(self)
        self.pictures.update({number + i: pictures for i, pictures in other.pictures.items()})
        self.tokens.extend(other.tokens)
        self.prompts.extend(before + place for place in other.prompts)
        self.turns.extend(before + place for place in other.turns)
        self.thoughts.extend(other.thoughts)

    def ids(self, i: int) -> list[int]:
        """Return the ids of prompt and turn."""
        return self.tokens[self.prompts[i]] + self.tokens[self.turns[i]]

    def start(self, i: int) -> int:
        """Return the number of the prompt's tokens."""
        return self.tokens.length(self.prompts[i])

    def length(self, i: int) -> int:
        return self.start(i) + self.tokens.length(self.turns[i])


class Examples(Sequence[Item], Generic[Item]):
    """Examples that `make` makes of their parts each time they are read."""

    def __init__(self, make: Callable[..., Item], parts: Sequence[tuple[Any, ...]]):
        self._make, self._parts = make, parts

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return Examples(self._make, self._parts[i])
        return self._make(*self._parts[i])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]
