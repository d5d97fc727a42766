"""Attention masks of ours for any Hugging Face model: which tokens a token may see, within the window or chunk that a layer has.

A mask that a model is given replaces the one that it would make itself, its window too. So the windows are put into ours: of each type of
layer, and measured in positions, since the tokens of a row with branches aren't where they are in their sequences.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PretrainedConfig, PreTrainedModel

Reach = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # of positions of query and key: whether the one may see the other

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # where the configuration has them


def attention_arguments(model: PreTrainedModel, position_ids: torch.Tensor, visible: torch.Tensor) -> dict[str, torch.Tensor | dict]:
    """Arguments of the model's forward for tokens at these positions that see these others.

    Args:
        position_ids: [B, T] int64.
        visible: [B, 1, T, T] bool, which tokens (last) each token sees where nothing in a layer narrows that.
    Raises:
        ValueError: the model has layers that don't compute with masks.
    """
    config = model.config.get_text_config()
    kinds = layer_kinds(config)
    if unknown := sorted(kinds - {FULL, SLIDING, CHUNKED}):
        raise ValueError(f"model: expected layers of attention, which take a mask, got {', '.join(unknown)}; give it whole sequences")
    masks = {kind: _form(model, visible & _reached(config, kind, position_ids)) for kind in kinds}
    return {"position_ids": position_ids, "attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """As transformers names them; a configuration that names none has one kind."""
    if named := getattr(config, "layer_types", None):
        return set(named)
    return {next((kind for kind, name in _SIZES.items() if getattr(config, name, None) is not None), FULL)}


def longest_reach(config: PretrainedConfig) -> int:
    """Tokens of the largest window or chunk; 0: there are none."""
    return max((size(config, kind) for kind in layer_kinds(config) & set(_SIZES)), default=0)


def size(config: PretrainedConfig, kind: str) -> int:
    return getattr(config, _SIZES[kind])


def _reached(config: PretrainedConfig, kind: str, positions: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, T] bool, or True."""
    if kind == FULL:
        return torch.tensor(True, device=positions.device)
    query, key = positions[:, None, :, None], positions[:, None, None, :]
    if kind == SLIDING:
        return query - key < size(config, kind)
    return query // size(config, kind) == key // size(config, kind)


def _form(model: PreTrainedModel, mask: torch.Tensor) -> torch.Tensor:
    """As the model's implementation of attention takes it: to be added, or as it is."""
    if model.config._attn_implementation != "eager":
        return mask
    return torch.zeros(mask.shape, dtype=model.dtype, device=mask.device).masked_fill_(~mask, torch.finfo(model.dtype).min)
