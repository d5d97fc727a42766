"""Demonstrations as token ids: the part to be learned, and what is shown before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_core.models.tokenizer import encode_conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Demonstration:
    """Token ids, of which those from `start` on are trained on."""

    ids: list[int]
    start: int


def encode_demonstrations(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> tuple[list[Demonstration], int]:
    """Demonstrations from rows with messages and response, and how many were dropped because they were too long."""
    encoded = [Demonstration(*encode_conversation(tokenizer, row["messages"], row["response"])) for row in rows]
    return _drop_long(encoded, max_length)


def encode_texts(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> tuple[list[Demonstration], int]:
    """Plain text for pretraining: every token but the first is trained on, and the end."""
    batch = tokenizer([row["text"] for row in rows], add_special_tokens=False)["input_ids"] if rows else []
    return _drop_long([Demonstration([*ids, tokenizer.eos_token_id], 1) for ids in batch], max_length)


def _drop_long(examples: list[Demonstration], max_length: int) -> tuple[list[Demonstration], int]:
    kept = [e for e in examples if len(e.ids) <= max_length]
    return kept, len(examples) - len(kept)
