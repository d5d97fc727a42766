"""Demonstrations as token ids: the tokens that are trained on, and their context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rlhf_core.data.schema import Message
from rlhf_core.models.tokenizer import encode_turn, one_object_each

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_core.models.batch import TokenBatch

TrainOn = Literal["last_turn", "all_turns"]


@dataclass(frozen=True)
class Demonstration:
    """Token ids. Those from `start` on are trained on, except the spans `skipped` (first token, end), which are in order and disjoint."""

    ids: list[int]
    start: int
    skipped: tuple[tuple[int, int], ...] = ()

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
) -> tuple[list[Demonstration], int]:
    """Demonstrations from rows with messages and response, and how many were dropped because they were too long.

    Args:
        train_on: last_turn: the response; all_turns: every message of the assistant, with its end. A turn's context is always its prompt as
            it would be sampled from. Turns share one demonstration as long as the template renders earlier turns like the last one. If it
            doesn't, as a template that drops earlier thoughts, the next turn begins a new demonstration.
        train_on_thoughts: False: train on a turn's answer only, which comes after its thoughts.
    """
    encoded = [
        demonstration
        for row in rows
        for demonstration in _of_conversation(
            tokenizer, [*row["messages"], {"role": "assistant", "content": row["response"]}], train_on, thoughts=train_on_thoughts
        )
    ]
    return _drop_long(encoded, max_length)


def encode_texts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> tuple[list[Demonstration], int]:
    """Plain texts for pretraining: every token but the first is trained on, including the end token."""
    batch = tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"] if rows else []
    return _drop_long([Demonstration(one_object_each([*ids, tokenizer.eos_token_id]), 1) for ids in batch], max_length)


def collate_demonstrations(examples: list[Demonstration], *, pad_id: int) -> TokenBatch:
    """A padded batch with the trained tokens selected."""
    from rlhf_core.models.batch import collate_tokens  # imports torch, which tools that inspect data don't need

    batch = collate_tokens([e.ids for e in examples], [e.start for e in examples], pad_id=pad_id)
    for row, example in enumerate(examples):
        for first, end in example.skipped:
            batch.selected[row, first:end] = False
    return batch


def _of_conversation(
    tokenizer: PreTrainedTokenizerBase, conversation: list[Message], train_on: TrainOn, *, thoughts: bool
) -> list[Demonstration]:
    """
    Args:
        thoughts: train on them too.
    """
    turns = [i for i, message in enumerate(conversation) if message["role"] == "assistant"]
    found: list[Demonstration] = []
    for turn in turns if train_on == "all_turns" else turns[-1:]:
        ids, start, answer = encode_turn(tokenizer, conversation[:turn], conversation[turn])
        before = found[-1] if found else None
        continues = before is not None and ids[: len(before.ids)] == before.ids and len(before.ids) <= start
        skipped = () if thoughts or answer == start else ((start, answer),)
        if continues:
            between = (len(before.ids), answer if skipped else start)
            skipped = (*before.skipped, *([between] if between[0] < between[1] else []))
            found[-1] = Demonstration(ids, before.start, skipped)
        else:
            found.append(Demonstration(ids, start, skipped))
    return found


def _drop_long(examples: list[Demonstration], max_length: int) -> tuple[list[Demonstration], int]:
    kept = [e for e in examples if len(e.ids) <= max_length]
    return kept, len(examples) - len(kept)
