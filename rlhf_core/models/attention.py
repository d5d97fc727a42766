"""Attention for any Hugging Face model: masks for batches with prefixes and branches, and rotary frequencies that depend on the length.

A mask that is passed to a model replaces the one that it would make, with its windows. So `attention_arguments` puts the windows of each
type of layer into the mask. It measures them in positions, since tokens of a row with branches aren't where they are in their sequences.

transformers rescales the rotary frequencies of `longrope` and `dynamic` by the longest sequence of a batch. A token's log-probability then
depends on what comes after it and on the other rows, and a sequence that grows past the border is sampled with other frequencies than it is
trained with. `fix_frequencies` gives all sequences the frequencies of the longest allowed one, of `model.max_length` tokens: either no
sequence passes the border, or the configuration is changed to one without a border. vLLM chooses likewise, by its `max_model_len`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.models.batch import TokenBatch

log = logging.getLogger(__name__)

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_SIZES = {SLIDING: "sliding_window", CHUNKED: "attention_chunk_size"}  # the configuration's key for each
LONGROPE, DYNAMIC, FIXED = "longrope", "dynamic", "default"


# Masks


def attention_arguments(model: PreTrainedModel, batch: TokenBatch) -> dict[str, Any]:
    """Return the arguments of the model's forward for the batch's positions, and its mask or the lengths of a packed row's sequences.

    There are none where attention is plainly causal.

    Raises:
        ValueError: the model has layers that don't compute with masks.
    """
    if not batch.mask_is_needed:
        return {}
    if takes_lengths(model):
        return {"position_ids": batch.position_ids, **_lengths(batch.segments)}
    visible = batch.mask()
    config = model.config.get_text_config()
    kinds = layer_kinds(config)
    if unknown := sorted(kinds - {FULL, SLIDING, CHUNKED}):
        raise ValueError(f"model: expected layers of attention, which take a mask, got {', '.join(unknown)}; pass whole sequences")
    masks = {}
    for kind in kinds:
        mask = visible & _within_reach(config, kind, batch.position_ids)
        if model.config._attn_implementation == "eager":  # which adds the mask to the logits
            added = torch.zeros(mask.shape, dtype=model.dtype, device=mask.device)
            mask = added.masked_fill_(~mask, torch.finfo(model.dtype).min)
        masks[kind] = mask
    return {"position_ids": batch.position_ids, "attention_mask": masks if len(masks) > 1 else masks.popitem()[1]}


def takes_lengths(model: PreTrainedModel) -> bool:
    """Return whether attention takes the lengths of sequences that lie end to end, in place of a mask."""
    return model.config._attn_implementation.startswith("flash_attention")


def _lengths(segments: torch.Tensor) -> dict[str, torch.Tensor | int]:
    """Return FlashAttention's arguments for sequences end to end, numbered by `segments` [1, N]; transformers hands them to each layer."""
    lengths = segments[0].unique_consecutive(return_counts=True)[1]
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    longest = int(lengths.max())
    return {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}


def layer_kinds(config: PretrainedConfig) -> set[str]:
    """Return the types of the layers, as transformers names them; a configuration that names none has one type."""
    if named := getattr(config, "layer_types", None):
        return set(named)
    return {next((kind for kind, name in _SIZES.items() if getattr(config, name, None) is not None), FULL)}


def longest_reach(config: PretrainedConfig) -> int:
    """Return the number of tokens in the largest window or chunk; 0 if there are none."""
    return max((window_size(config, kind) for kind in layer_kinds(config) & set(_SIZES)), default=0)


def window_size(config: PretrainedConfig, kind: str) -> int:
    """Return the number of tokens in a layer's window or chunk."""
    return getattr(config, _SIZES[kind])


def _within_reach(config: PretrainedConfig, kind: str, positions: torch.Tensor) -> torch.Tensor:
    """Return whether a key's position (last) is in the window or chunk of a query's position, [B, 1, T, T] bool; or True."""
    if kind == FULL:
        return torch.tensor(True, device=positions.device)
    query, key, size = positions[:, None, :, None], positions[:, None, None, :], window_size(config, kind)
    return query - key < size if kind == SLIDING else query // size == key // size


# Rotary frequencies that depend on the length


def fix_frequencies(config: PretrainedConfig, max_length: int) -> None:
    """Change a model's configuration, in place, so that all sequences of up to `max_length` tokens have the same frequencies.

    longrope: the long factors for all. dynamic, with a factor f, of the model's length L at `max_length` M, D numbers rotated in each head:

        theta' = theta * (f * M / L - (f - 1)) ^ (D / (D - 2)),        and a default embedding from then on

    Raises:
        ValueError: the embedding is another variant of these.
    """
    text = config.get_text_config()
    for rope in [*_length_dependent(text)]:
        border = _border(text, rope)
        if max_length <= border:
            continue
        log.info(
            "model: sequences of more than %d tokens have other frequencies in its %s embedding; with model.max_length %d all have those "
            "of the longest, in the saved model too",
            *(border, rope["rope_type"], max_length),
        )
        if rope["rope_type"] == LONGROPE:
            rope["short_factor"] = rope["long_factor"]
        elif "factor" in rope and "alpha" not in rope:
            width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
            rotated, factor = int(width * rope.get("partial_rotary_factor", 1.0)), rope.pop("factor")
            stretch = factor * max_length / text.max_position_embeddings - (factor - 1)
            rope["rope_theta"] *= stretch ** (rotated / (rotated - 2))
            rope["rope_type"] = FIXED
            text.max_position_embeddings = max_length
        else:
            raise ValueError(
                f"model.max_length: expected at most {border} with a {rope['rope_type']} rotary embedding without a factor, "
                f"got {max_length}; lower it"
            )


def longest_alike(config: PretrainedConfig) -> int | None:
    """Return the longest sequence that has the frequencies of shorter ones; None if frequencies don't depend on the length."""
    text = config.get_text_config()
    return min((_border(text, rope) for rope in _length_dependent(text)), default=None)


def check_length(config: PretrainedConfig, length: int) -> None:
    """Check that sequences of `length` tokens have the rotary frequencies of shorter ones.

    Raises:
        ValueError: sequences of `length` tokens have other rotary frequencies than shorter ones.
    """
    text = config.get_text_config()
    for rope in _length_dependent(text):
        if length > (border := _border(text, rope)):
            raise ValueError(
                f"model: expected sequences of at most {border} tokens, since longer ones have other frequencies in its "
                f"{rope['rope_type']} rotary embedding, got {length}; set model.max_length to {border}, or start the chain from this model "
                "with a larger one"
            )


def _length_dependent(config: PretrainedConfig) -> Iterator[dict[str, Any]]:
    """Yield the parameters of the embeddings whose frequencies depend on the length; a model has one embedding, or one for each type of
    layer.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    for rope in (r for r in (parameters, *parameters.values()) if isinstance(r, dict)):
        kind = rope.get("rope_type") or FIXED
        if DYNAMIC in kind or (kind == LONGROPE and rope["short_factor"] != rope["long_factor"]):
            yield rope


def _border(config: PretrainedConfig, rope: dict[str, Any]) -> int:
    """Return the longest sequence with the frequencies of short ones."""
    return rope["original_max_position_embeddings"] if rope["rope_type"] == LONGROPE else config.max_position_embeddings
