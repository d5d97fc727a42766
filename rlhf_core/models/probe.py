"""Probes what a model computes, before training, since architectures of one kind differ."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.models.attention import attention_arguments, longest_reach
from rlhf_core.models.batch import Branches, collate_branches
from rlhf_core.models.build import trunk

# What the forward of some architecture raises on inputs that it can't take.
PROBE_ERRORS = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError)
TOLERANCE = 1e-4  # relative to the largest number in float32, whose rounding is a tenth of it or less
HALF_TOLERANCE = 3e-2  # in bfloat16 and float16
TAKES_MASKS = ("sdpa", "eager")  # implementations of attention that compute with any mask, on any device
SHORT_PROBE = 9  # tokens of a sequence on which prefix sharing is probed where there are no windows
STATE_TOLERANCE, HALF_STATE_TOLERANCE = 1e-4, 2e-2  # relative to a hidden state's norm, in float32 and in less


@contextmanager
def probing(model: PreTrainedModel) -> Iterator[None]:
    """Context in which the model is in evaluation mode, with an implementation of attention that works on its current device and dtype.

    A model that will be trained with FlashAttention can't use it while it is in float32 or on a CPU.
    """
    training = [part for part in model.modules() if part.training]
    own = model.config._attn_implementation
    if own not in TAKES_MASKS and (model.device.type == "cpu" or model.dtype == torch.float32):
        model.config._attn_implementation = "eager"  # the setter; model.set_attn_implementation would check first
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = own
        for part in training:
            part.training = True


def agree(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float = TOLERANCE) -> bool:
    """Return whether two sets of logits or scores are the same up to rounding.

    Args:
        tolerance: in float32, relative to the largest.
    """
    tolerance = tolerance if theirs.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())


def shares_prefixes(model: PreTrainedModel, *, device: torch.device, max_length: int) -> bool:
    """Return whether training on this device computes a common prefix once: on a CPU, where that is faster, if the model allows it.

    Args:
        max_length: tokens of the longest sequence that the model will see.
    """
    return device.type == "cpu" and can_share_prefixes(model, max_length=max_length)


@torch.no_grad()
def can_share_prefixes(model: PreTrainedModel, *, max_length: int | None = None) -> bool:
    """Return whether the model computes the same for a shared row as for whole sequences, probed on one row.

    Some attention implementations take no mask, some positional encodings no position ids, and a layer with a state sees all tokens before.
    Where layers have windows or chunks, the probe's sequences are longer than all of these, if `max_length` allows it, and the probe runs
    as many layers as it takes to have one of each type.

    Args:
        max_length: tokens of the longest sequence that the model will see; None: more than any window has.
    """
    if model.config._attn_implementation not in TAKES_MASKS or _has_own_masks(model):
        return False
    prefix, branches = _probe_ids(model.config.get_text_config(), max_length)
    hidden = []
    for rows in ([Branches(prefix, branches)], [Branches(prefix, [ids]) for ids in branches]):
        batch = collate_branches(rows, pad_id=0, every_token=True).to(model.device)
        try:
            with probing(model), _each_kind_of_layer(model.config.get_text_config()):
                arguments = attention_arguments(model, batch)
                states = trunk(model)(input_ids=batch.input_ids, use_cache=False, **arguments).last_hidden_state
        except PROBE_ERRORS:
            return False
        hidden.append(states[batch.selected].float())
    shared, alone = hidden
    tolerance = STATE_TOLERANCE if model.dtype == torch.float32 else HALF_STATE_TOLERANCE
    return bool(((shared - alone).norm(dim=-1) <= tolerance * alone.norm(dim=-1)).all())


def _has_own_masks(model: PreTrainedModel) -> bool:
    """Return whether the model holds masks as buffers, as GPT-Neo does.

    They count the columns of a row, which may be longer than any sequence, and not positions.
    """
    return any(mask.ndim == 4 and mask.shape[-1] == mask.shape[-2] and not mask.is_floating_point() for mask in model.buffers())


def _probe_ids(config: PretrainedConfig, max_length: int | None) -> tuple[list[int], list[list[int]]]:
    """Return the ids of a prefix and two branches.

    With windows each sequence passes the largest by a quarter, and the first branch, which lies between the second and the prefix, is about
    half as long as that.
    """
    length = max(SHORT_PROBE, longest_reach(config) * 5 // 4 + 1)
    limits = [limit for limit in (max_length, getattr(config, "max_position_embeddings", None)) if limit]
    length = max(3, min([length, *limits]))
    prefix = length * 5 // 9
    ids = torch.randint(config.vocab_size, (2 * length - prefix,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids[:prefix], [ids[prefix:length], ids[length:-1] or ids[length:]]


@contextmanager
def _each_kind_of_layer(config: PretrainedConfig) -> Iterator[None]:
    """Context in which a model with windows runs only as many layers as it takes to have one of each type.

    Trunks that have windows iterate over `layers[: num_hidden_layers]`.
    """
    layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ["alike"]
    if longest_reach(config):
        config.num_hidden_layers = min(layers, 1 + max(kinds.index(kind) for kind in set(kinds)))
    try:
        yield
    finally:
        config.num_hidden_layers = layers
