"""Demonstrations as token ids: the tokens that are trained on, and their context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from rlhf_core.data.pictures import Picture
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import EncodedTurns, Examples
from rlhf_core.models.tokenizer import encode_turns, one_object_each

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.models.batch import TokenBatch
    from rlhf_core.models.vision import Sight

TrainOn = Literal["last_turn", "all_turns"]
Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Demonstration:
    """Token ids. Those from `start` on are trained on, except the spans `skipped` (first token, end), which are in order and disjoint."""

    ids: list[int]
    start: int
    skipped: Spans = ()
    pictures: tuple[Picture, ...] = ()

    @property
    def num_trained(self) -> int:
        return len(self.ids) - self.start - sum(end - first for first, end in self.skipped)


def encode_demonstrations(
    rows: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int,
    train_on: TrainOn = "last_turn",
    train_on_thoughts: bool = True,
) -> tuple[Sequence[Demonstration], int]:
    """Return demonstrations from rows with messages and response, and how many were dropped because they were too long.

    Args:
        train_on: last_turn: the response; all_turns: every message of the assistant, with its end. A turn's context is always its prompt as
            it would be sampled from. Turns share one demonstration as long as the template renders earlier turns like the last one. If it
            doesn't, as a template that drops earlier thoughts, the next turn begins a new demonstration.
        train_on_thoughts: False: train on a turn's answer only, which comes after its thoughts.
    """
    turns = encode_turns(tokenizer, [turn for row in rows for turn in trained_turns(row, train_on)])
    counts = [len(trained_turns(row, train_on)) for row in rows]
    return demonstrations_of(turns, counts, max_length=max_length, train_on_thoughts=train_on_thoughts)


def trained_turns(row: dict, train_on: TrainOn) -> list[tuple[list[Message], Message]]:
    """Return the row's turns to be trained on: the messages before each, and the assistant's message."""
    messages, last = row["messages"], (row["messages"], {"role": "assistant", "content": row["response"]})
    if train_on == "last_turn":
        return [last]
    return [*((messages[:i], m) for i, m in enumerate(messages) if m["role"] == "assistant"), last]


def demonstrations_of(
    turns: EncodedTurns, counts: list[int], *, max_length: int, train_on_thoughts: bool
) -> tuple[Sequence[Demonstration], int]:
    """Return what `encode_demonstrations` does, from encoded turns, which can be pickled for ranks. counts: `trained_turns` of each row."""
    found, at = [], 0
    for count in counts:
        found += _of_conversation(turns, range(at, at + count), thoughts=train_on_thoughts)
        at += count
    kept = [parts for parts in found if turns.length(parts[0]) <= max_length]
    return Examples(partial(_demonstration, turns), kept), len(found) - len(kept)


def _demonstration(turns: EncodedTurns, i: int, start: int, skipped: Spans) -> Demonstration:
    return Demonstration(turns.ids(i), start, skipped, turns.pictures.get(i, ()))


def encode_texts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> tuple[list[Demonstration], int]:
    """Encode plain texts for pretraining: every token but the first is trained on, including the end token."""
    batch = tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"] if rows else []
    kept = [Demonstration(one_object_each([*ids, tokenizer.eos_token_id]), 1) for ids in batch if len(ids) < max_length]
    return kept, len(batch) - len(kept)


def collate_demonstrations(examples: list[Demonstration], *, pad_id: int, sight: Sight | None = None) -> TokenBatch:
    """Return a padded batch with the trained tokens selected, and the pictures that `sight` sees."""
    from rlhf_core.models.batch import collate_tokens  # imports torch, which tools that inspect data don't need
    from rlhf_core.models.vision import with_sight

    batch = collate_tokens([e.ids for e in examples], [e.start for e in examples], pad_id=pad_id)
    for row, example in enumerate(examples):
        for first, end in example.skipped:
            batch.selected[row, first:end] = False
    return with_sight(batch, sight, [p for e in examples for p in e.pictures])


def _of_conversation(turns: EncodedTurns, numbers: range, *, thoughts: bool) -> list[tuple[int, int, Spans]]:
    """Return demonstrations from a conversation's turns: the turn with which each ends, `start` and `skipped`.

    Args:
        thoughts: train on them too.
    """
    found: list[tuple[int, int, Spans]] = []
    before: list[int] = []
    for i in numbers:
        ids = turns.ids(i) if len(numbers) > 1 else []
        start, skipped = turns.start(i), () if thoughts else _thoughts(turns, i)
        if before and ids[: len(before)] == before and len(before) <= start:
            _, first, spans = found[-1]
            between = (len(before), skipped[0][1] if skipped else start)
            found[-1] = (i, first, (*spans, *([between] if between[0] < between[1] else [])))
        else:
            found.append((i, start, skipped))
        before = ids
    return found


def _thoughts(turns: EncodedTurns, i: int) -> Spans:
    """Return the span of a turn's thoughts, if it has any."""
    return ((turns.start(i), turns.start(i) + turns.thoughts[i]),) if turns.thoughts[i] else ()
