"""Packs rows without padding: the sequences of a micro-batch lie end to end in one row, and each sees only itself.

    rows       a a a .      packed     a a a b
               b . . .      positions  0 1 2 0
                            segments   1 1 1 2

FlashAttention takes the lengths of such sequences (`attention_arguments`), so that neither padding nor other sequences cost anything.
Other implementations compute a row's whole attention and mask most of it, which costs more than the padding of rows of similar lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlhf_core.models.attention import FULL, SLIDING, layer_kinds, takes_lengths
from rlhf_core.models.batch import TokenBatch


@dataclass(frozen=True)
class PackedRow:
    """A batch packed into one row.

    batch: one row [1, N] of the tokens that a batch [B, T] needs. index: [B, T] int64, position of each of them in the row.
    """

    batch: TokenBatch
    index: torch.Tensor
    real: torch.Tensor

    def of(self, values: torch.Tensor) -> torch.Tensor:
        """Return values [B, T] taken from the row's tokens [1, N]."""
        return values[self.real][None]


def packs(model: PreTrainedModel, batch: TokenBatch) -> bool:
    """Return whether the model computes this batch without padding.

    It doesn't where rows have prefixes and branches, whose mask FlashAttention can't take, nor where layers have a state, which would
    pass from one sequence to the next, nor where attention of the model's own (Falcon, GPT-Neo) doesn't pass the lengths on, nor for a
    model that sees, whose positions may depend on pictures.
    """
    if batch.pictures is not None:
        return False
    if not model._supports_attention_backend or batch.mask_is_needed or len(batch.input_ids) == 1 or not takes_lengths(model):
        return False
    return not getattr(model, "_is_stateful", False) and layer_kinds(model.config.get_text_config()) <= {FULL, SLIDING}


def pack(batch: TokenBatch, rows: torch.Tensor, positions: torch.Tensor, *, routed: torch.Tensor | None = None) -> PackedRow:
    """Pack a plain batch into one row.

    The row has each sequence's tokens up to the last one that is needed, and none where none is.

    Args:
        rows, positions: [N], places of the tokens whose hidden states are needed.
        routed: [B, T] bool, further tokens that are needed.
    """
    needed = torch.zeros_like(batch.selected).index_put((rows, positions), torch.tensor(True, device=rows.device))
    if routed is not None:
        needed |= routed
    columns = torch.arange(needed.shape[1], device=needed.device).expand_as(needed)
    real = needed.flip(1).cumsum(1).flip(1) > 0  # a needed token is here or behind
    index = (real.flatten().cumsum(0) - 1).view_as(columns)
    sequences = torch.arange(1, len(needed) + 1, device=needed.device)[:, None].expand_as(columns)
    row = TokenBatch(batch.input_ids[real][None], needed[real][None], position_ids=columns[real][None], segments=sequences[real][None])
    return PackedRow(row, index, real)
