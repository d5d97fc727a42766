"""Splits each sequence among the ranks of a group, which share the positions of every micro-batch.

    columns    0 1 2 3 4 5 6 .      of a batch [B, T], padded to a multiple of the group's size s
    rank 0     0 1 2 3
    rank 1             4 5 6 .      T / s columns each

Every rank of the group has the whole batch. Positions and masks are therefore known everywhere, and so is the token that follows a hidden
state across the border between two parts. A rank computes the layers for its own columns. Only attention needs the others: the group's
exchange (`rlhf_core.engines.deepspeed.sequence_parallel`) gives each rank all positions for a part of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from rlhf_core.models.attention import FULL, attention_arguments, check_length, layer_kinds, longest_alike, takes_lengths
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.packing import pack, packs


class SequenceSplit(Protocol):
    """The group of ranks that share each sequence.

    size: number of ranks in the group. index: this rank's number among them.
    """

    size: int
    index: int

    def joined(self, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the values [N] of all ranks, on every rank; differentiable with respect to this rank's own.

        Args:
            values: [n], this rank's values.
            own: [N] bool, which of all values are this rank's n. Each value belongs to one rank.
        """
        ...


@dataclass(frozen=True)
class OwnColumns:
    """The part of a batch that a rank computes.

    input_ids: [B, T / s]. arguments: arguments of the model's forward; masks and lengths are those of whole rows, as attention sees them.
    rows, positions: [n], places of the needed hidden states in these columns. own: [N] bool, which of all needed ones they are.
    """

    input_ids: torch.Tensor
    arguments: dict[str, Any]
    rows: torch.Tensor
    positions: torch.Tensor
    own: torch.Tensor

    def run(self, module: PreTrainedModel) -> Any:
        """Return the output of a model or its trunk for these columns."""
        return module(input_ids=self.input_ids, use_cache=False, **self.arguments)


def own_columns(model: PreTrainedModel, batch: TokenBatch, rows: torch.Tensor, positions: torch.Tensor, split: SequenceSplit) -> OwnColumns:
    """Return this rank's columns of a batch, in which the hidden states at rows and positions [N] are needed.

    Raises:
        ValueError: sequences are longer than the model's rotary frequencies allow, or layers of the model don't compute with masks and need
            one.
    """
    if longest_alike(model.config) is not None:
        check_length(model.config, batch.length)
    if len(rows) and packs(model, batch):
        packed = pack(batch, rows, positions)
        rows, positions, batch = torch.zeros_like(rows), packed.index[rows, positions], packed.batch
    batch = padded_columns(batch, split.size)
    if not batch.mask_is_needed and not takes_lengths(model) and layer_kinds(model.config.get_text_config()) != {FULL}:
        # The windows of some layers: the model would make their mask for its own columns only.
        width = batch.input_ids.shape[1]
        causal = torch.ones(width, width, dtype=torch.bool, device=batch.input_ids.device).tril()
        batch = replace(batch, visible=causal.expand(len(batch.input_ids), 1, -1, -1))
    width = batch.input_ids.shape[1] // split.size
    mine = slice(split.index * width, (split.index + 1) * width)
    own = positions // width == split.index
    arguments = attention_arguments(model, batch) | {"position_ids": batch.position_ids[:, mine]}
    return OwnColumns(batch.input_ids[:, mine], arguments, rows[own], positions[own] - mine.start, own)


def padded_columns(batch: TokenBatch, multiple: int) -> TokenBatch:
    """Return the batch with its position ids, padded on the right until its columns are a multiple. No other token sees the padding."""
    rows, width = batch.input_ids.shape
    added = -width % multiple
    position_ids = batch.position_ids
    if position_ids is None:  # padding repeats the last position: a model may have no further one
        position_ids = torch.arange(width + added, device=batch.input_ids.device).clamp(max=width - 1).expand(rows, -1)
    else:
        position_ids = functional.pad(position_ids, (0, added))
    visible = batch.visible
    if visible is not None:
        visible = functional.pad(visible, (0, added, 0, added))
        visible = visible | torch.eye(width + added, dtype=torch.bool, device=visible.device)  # a softmax over nothing is NaN
    return TokenBatch(
        functional.pad(batch.input_ids, (0, added)),
        functional.pad(batch.selected, (0, added)),
        position_ids,
        visible,
        None if batch.predicted_by is None else functional.pad(batch.predicted_by, (0, added)),
        None if batch.segments is None else functional.pad(batch.segments, (0, added), value=-1),
    )
