"""Trains reward models by Bradley-Terry on pairs; every distinct response of a conversation is scored once.

All pairs of a conversation are in one optimizer step, so that k responses in many pairs take k forward passes and don't overfit.
Source: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, section 3.5.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.algorithms.preference_losses import bradley_terry
from rlhf_core.data.batching import Part
from rlhf_core.data.pictures import Picture
from rlhf_core.data.schema import Message
from rlhf_core.data.tokens import Examples
from rlhf_core.engines.deepspeed.engine import TrainEngine, device
from rlhf_core.engines.deepspeed.ranks import merged, own_parts, summed, total
from rlhf_core.models.batch import Branches, collate_branches, share_prefix
from rlhf_core.models.tokenizer import encode_scored_turns
from rlhf_core.trainers.supervised.encoding import Begin, at_once
from rlhf_core.trainers.supervised.loop import Metrics, Phase, beside_untrained

if TYPE_CHECKING:
    from rlhf_core.models.vision import Sight


@dataclass(frozen=True)
class Comparison:
    """A conversation's distinct responses and the pairs among them.

    sequences: token ids of conversation and response as the template writes them, the turn's end included.
    pairs: (chosen, rejected) as positions in `sequences`.
    row_ids: ids of the pairs' rows.
    max_shared_tokens: length of the longest row in which sequences share their common prefix; 0: each sequence has its own row.
    """

    max_shared_tokens: int
    sequences: list[list[int]] = field(default_factory=list)
    pairs: list[tuple[int, int]] = field(default_factory=list)
    row_ids: list[str] = field(default_factory=list)
    pictures: tuple[Picture, ...] = ()  # of the conversation, and so of each sequence

    @cached_property
    def rows(self) -> list[Branches]:
        """The model's input: the sequences in order, in shared rows or in a row for each."""
        return share_prefix(self.sequences, max_tokens=self.max_shared_tokens)

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row."""
        return max(map(len, self.rows))


def encode_comparisons(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int, max_shared_tokens: int
) -> tuple[Sequence[Comparison], int]:
    """Group rows with messages, chosen and rejected by conversation.

    Returns the comparisons in order of first appearance, and the number of pairs that were dropped because a response is too long
    (truncated, it would look complete). Unpaired rows (one side null) are left out.
    """
    return begin_comparisons(rows, tokenizer, max_length=max_length)(max_shared_tokens)


def begin_comparisons(
    rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int, begin: Begin = at_once
) -> Callable[[int], tuple[Sequence[Comparison], int]]:
    """Begin `encode_comparisons`, and return a function that takes `max_shared_tokens` and waits for the result."""
    numbers: dict[tuple[str, str], int] = {}  # conversation and response -> number
    messages: list[tuple[list[Message], str]] = []
    pairs: dict[str, list[tuple[str, int, int]]] = {}  # conversation -> row's id, chosen, rejected
    for row in rows:
        if row["chosen"] is None or row["rejected"] is None:
            continue
        key = json.dumps(row["messages"])
        for text in (row["chosen"], row["rejected"]):
            if (key, text) not in numbers:
                numbers[key, text] = len(messages)
                messages.append((row["messages"], text))
        pairs.setdefault(key, []).append((row["id"], numbers[key, row["chosen"]], numbers[key, row["rejected"]]))
    of_conversations = list(pairs.values())
    encoded = begin(encode_scored_turns, tokenizer, messages)

    def result(max_shared_tokens: int) -> tuple[Sequence[Comparison], int]:
        turns, parts, dropped = encoded(), [], 0
        for of_conversation in of_conversations:
            kept = [pair for pair in of_conversation if max(map(turns.length, pair[1:])) <= max_length]
            dropped += len(of_conversation) - len(kept)
            sides = sorted({i for pair in of_conversation for i in pair[1:] if turns.length(i) <= max_length})
            position = {i: number for number, i in enumerate(sides)}
            if kept:
                parts.append((tuple(sides), [(position[a], position[b]) for _, a, b in kept], [row_id for row_id, _, _ in kept]))

        def comparison(sides: tuple[int, ...], pairs: list[tuple[int, int]], row_ids: list[str]) -> Comparison:
            return Comparison(max_shared_tokens, [turns.ids(i) for i in sides], pairs, row_ids, turns.pictures.get(sides[0], ()))

        return Examples(comparison, parts), dropped

    return result


def reward_phase(
    train: Sequence[Comparison],
    heldout: Sequence[Comparison],
    *,
    steps: int,
    batch_size: int,
    pad_id: int,
    microbatch_tokens: int,
    margin: float,
    centering_coef: float,
    name: str = "reward",
    sight: Sight | None = None,
) -> Phase:
    """Return a phase whose steps' loss is the mean over the step's pairs, whatever the micro-batches and ranks."""

    def train_batch(engine: TrainEngine, chosen: list[int]) -> Metrics:
        batch = [train[i] for i in chosen]
        num_pairs = sum(len(c.pairs) for c in batch)
        shares, points = [], []
        for part in _own_parts(batch, microbatch_tokens):
            chosen_scores, rejected_scores = score_pairs(engine, [batch[i] for i in part.positions], pad_id=pad_id, sight=sight)
            share = bradley_terry(chosen_scores, rejected_scores, margin=margin, centering_coef=centering_coef).sum() / num_pairs
            engine.backward(share if part.counts else 0.0 * share)
            if part.counts:
                shares.append(share.detach())
                points.append(_points(chosen_scores.detach(), rejected_scores.detach()))
        loss, right = summed(total(shares), total(points))
        return {"loss": loss, "accuracy": right / num_pairs, "tokens": float(sum(len(s) for c in batch for s in c.sequences))}

    def evaluate(engine: TrainEngine) -> Metrics:
        sizes = {"pad_id": pad_id, "microbatch_tokens": microbatch_tokens}
        chosen_scores, rejected_scores = score_heldout(engine, heldout, sight=sight, **sizes)
        same = torch.zeros_like(chosen_scores)
        losses = bradley_terry(chosen_scores, rejected_scores, margin=margin, centering_coef=0.0)
        untrained = bradley_terry(same, same, margin=margin, centering_coef=0.0)
        accuracy = float(_points(chosen_scores, rejected_scores)) / len(losses)
        beside = beside_untrained(untrained, losses, accuracy_error=0.5 / math.sqrt(len(losses)))
        return {"heldout_loss": float(losses.mean()), "heldout_accuracy": accuracy, **beside}

    return Phase(name, steps, batch_size, len(train), train_batch, evaluate if heldout else None)


def score_pairs(
    engine: TrainEngine, comparisons: list[Comparison], *, pad_id: int, sight: Sight | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [pairs] of chosen and rejected, in order; each distinct sequence goes through the model once."""
    batch = collate_branches([row for c in comparisons for row in c.rows], pad_id=pad_id)
    if sight is not None:
        batch = replace(batch, pictures=sight([p for c in comparisons for _ in c.rows for p in c.pictures]))
    scores = engine(batch.to(device()))
    offsets = [0]
    for c in comparisons:
        offsets.append(offsets[-1] + len(c.sequences))
    pairs = torch.tensor([(o + a, o + b) for o, c in zip(offsets, comparisons, strict=False) for a, b in c.pairs], device=scores.device)
    return scores[pairs[:, 0]], scores[pairs[:, 1]]


def score_heldout(
    engine: TrainEngine, comparisons: Sequence[Comparison], *, pad_id: int, microbatch_tokens: int, sight: Sight | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scores [pairs] of chosen and rejected on the CPU, in the order of comparisons and pairs; on every rank those of all."""
    starts = [0, *accumulate(len(c.pairs) for c in comparisons)]
    scores = torch.zeros(2, starts[-1])
    with torch.no_grad():
        for part in _own_parts(comparisons, microbatch_tokens):
            sides = score_pairs(engine, [comparisons[i] for i in part.positions], pad_id=pad_id, sight=sight)
            if part.counts:
                scores[:, [pair for i in part.positions for pair in range(starts[i], starts[i + 1])]] = torch.stack(sides).float().cpu()
    chosen, rejected = merged(scores)
    return chosen, rejected


def _own_parts(comparisons: Sequence[Comparison], microbatch_tokens: int) -> list[Part]:
    """Return this rank's micro-batches of comparisons, whose padded rows fit the budget; a larger comparison has its own micro-batch."""
    return own_parts([c.longest for c in comparisons], max_tokens=microbatch_tokens, rows=[len(c.rows) for c in comparisons])


def _points(chosen_scores: torch.Tensor, rejected_scores: torch.Tensor) -> torch.Tensor:
    """Return the number of pairs in the right order; a tie counts half."""
    return (chosen_scores > rejected_scores).sum() + 0.5 * (chosen_scores == rejected_scores).sum()
