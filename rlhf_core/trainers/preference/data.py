"""Pairs and single responses as token ids, and how those of one prompt go through a model together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.batching import microbatches
from rlhf_core.engines.deepspeed_engine import TrainEngine, device
from rlhf_core.models.batch import Branches, collate_branches, continue_prefix
from rlhf_core.models.tokenizer import encode_conversation


class Continuation(NamedTuple):
    """A prompt and a response to it; the response ends with the end token."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.response_ids)


class Pair(NamedTuple):
    """Two responses to one prompt."""

    chosen: Continuation
    rejected: Continuation


class Example(NamedTuple):
    """A single response and whether it is one to learn from or to keep away from."""

    continuation: Continuation
    desirable: bool


def encode_pairs(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> tuple[list[Pair], int]:
    """Pairs from rows with messages, chosen and rejected, and the number of pairs dropped because a side is too long: cutting it
    would make it look finished. Unpaired rows (one side null) are left out.
    """
    whole = [row for row in rows if row["chosen"] is not None and row["rejected"] is not None]
    pairs = [_encode_pair(tokenizer, row) for row in whole]
    kept = [pair for pair in pairs if all(side.num_tokens <= max_length for side in pair)]
    return kept, len(pairs) - len(kept)


def encode_examples(rows: list[dict], tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> tuple[list[Example], int]:
    """Single responses from rows with messages, chosen and rejected, of which one may be null, and the number of responses dropped
    because they are too long. A pair is one desirable and one undesirable response.
    """
    examples = [
        Example(_encode(tokenizer, row, side), side == "chosen") for row in rows for side in ("chosen", "rejected") if row[side] is not None
    ]
    kept = [e for e in examples if e.continuation.num_tokens <= max_length]
    return kept, len(examples) - len(kept)


def _encode_pair(tokenizer: PreTrainedTokenizerBase, row: dict) -> Pair:
    """One tuple for the prompt of both sides."""
    chosen, rejected = (_encode(tokenizer, row, side) for side in ("chosen", "rejected"))
    return Pair(chosen, rejected._replace(prompt_ids=chosen.prompt_ids) if rejected.prompt_ids == chosen.prompt_ids else rejected)


def _encode(tokenizer: PreTrainedTokenizerBase, row: dict, side: str) -> Continuation:
    ids, start = encode_conversation(tokenizer, row["messages"], row[side])
    return Continuation(tuple(ids[:start]), tuple(ids[start:]))


def mismatched(items: Sequence[Continuation], *, shift: int, max_length: int) -> list[Continuation]:
    """Each prompt with the response `shift` items further on, from the last ones on to the first ones; cut to `max_length` tokens."""
    return [
        Continuation(item.prompt_ids, items[(i + shift) % len(items)].response_ids[: max_length - len(item.prompt_ids)])
        for i, item in enumerate(items)
    ]


@dataclass(frozen=True)
class PromptGroup:
    """What a batch asks about one prompt; each distinct response is computed once.

    positions: of the items in the batch, ascending.
    shares_prefix: compute the prompt once for all of them, where that pays.
    """

    items: list[Continuation]
    positions: list[int]
    shares_prefix: bool

    @cached_property
    def responses(self) -> dict[tuple[int, ...], int]:
        """The distinct responses, numbered."""
        return {ids: number for number, ids in enumerate(dict.fromkeys(item.response_ids for item in self.items))}

    @cached_property
    def rows(self) -> list[Branches]:
        """What goes through the model: the responses in the order of their numbers."""
        return continue_prefix(list(self.items[0].prompt_ids), [list(ids) for ids in self.responses], shared=self.shares_prefix)

    @property
    def longest(self) -> int:
        """Tokens of the longest row."""
        return max(map(len, self.rows))


def group_by_prompt(items: Sequence[Continuation], *, together: int, max_tokens: int, shares_prefix: bool) -> list[PromptGroup]:
    """The items by their prompts; where a group would have more than `max_tokens` tokens another of the same prompt is begun.

    Args:
        together: so many items, from the first on, have one prompt and stay in one group: 2 for the sides of pairs.
    """
    open_groups: dict[tuple[int, ...], tuple[PromptGroup, int]] = {}
    groups: list[PromptGroup] = []
    for at in range(0, len(items), together):
        block = items[at : at + together]
        prompt_ids = block[0].prompt_ids
        added = sum(len(item.response_ids) if shares_prefix else item.num_tokens for item in block)
        group, tokens = open_groups.get(prompt_ids, (None, 0))
        if group is None or tokens + added > max_tokens:
            shares = shares_prefix and len(prompt_ids) + added <= max_tokens  # a shared row fits the budget
            group, tokens = PromptGroup([], [], shares), len(prompt_ids) if shares_prefix else 0
            groups.append(group)
        group.items.extend(block)
        group.positions.extend(range(at, at + together))
        open_groups[prompt_ids] = (group, tokens + added)
    return groups


@dataclass(frozen=True)
class ResponseForward:
    """How responses go through a model: padding, prompts computed once or not, tokens in a micro-batch."""

    pad_id: int
    shares_prefix: bool
    microbatch_tokens: int

    def microbatches(self, items: Sequence[Continuation], *, together: int = 1) -> list[list[PromptGroup]]:
        """The items' groups, of similar length together, cut to the budget; a group that is larger is alone."""
        limits = {"together": together, "max_tokens": self.microbatch_tokens}
        groups = group_by_prompt(items, **limits, shares_prefix=self.shares_prefix)
        parts = microbatches([g.longest for g in groups], max_tokens=self.microbatch_tokens, rows=[len(g.rows) for g in groups])
        return [[groups[i] for i in part] for part in parts]

    def logprobs(self, module: TrainEngine | nn.Module, part: list[PromptGroup]) -> torch.Tensor:
        """Log-probability of each item's response, summed over its tokens: [items], group after group, on the module's device."""
        rows = [row for group in part for row in group.rows]
        flat = module(collate_branches(rows, pad_id=self.pad_id, every_token=True).to(device())).logprobs
        lengths = torch.tensor([len(branch) for row in rows for branch in row.branches])
        owners = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(flat.device)
        sums = torch.zeros(len(lengths), dtype=flat.dtype, device=flat.device).index_add(0, owners, flat)
        return sums[torch.tensor(_numbers(part), device=flat.device)]


def _numbers(part: list[PromptGroup]) -> list[int]:
    """Of each item the number of its response among all of the micro-batch."""
    numbers, offset = [], 0
    for group in part:
        numbers += [offset + group.responses[item.response_ids] for item in group.items]
        offset += len(group.responses)
    return numbers
