"""Trying out what a model computes, before anything is trained: what architectures do isn't assumed from their names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

# What a forward of some architecture raises on inputs that it can't take.
TRIAL_ERRORS = (ValueError, TypeError, RuntimeError, AttributeError, LookupError, AssertionError)
TOLERANCE = 1e-4  # of the largest number in float32, whose rounding is a tenth of it or less
HALF_TOLERANCE = 3e-2  # in bfloat16 and float16
TAKES_MASKS = ("sdpa", "eager")  # implementations of attention that compute with any mask, on any device


@contextmanager
def on_trial(model: PreTrainedModel) -> Iterator[None]:
    """Within it the model is in evaluation mode, and computes attention in a way that works for it where and as it is now: loaded in
    float32 and on a CPU it can't use FlashAttention, which it will be trained with.
    """
    training = [part for part in model.modules() if part.training]
    own = model.config._attn_implementation
    if own not in TAKES_MASKS and (model.device.type == "cpu" or model.dtype == torch.float32):
        model.config._attn_implementation = "eager"  # the setter, which model.set_attn_implementation would check first
    model.eval()
    try:
        yield
    finally:
        model.config._attn_implementation = own
        for part in training:
            part.training = True


def agree(ours: torch.Tensor, theirs: torch.Tensor, *, tolerance: float = TOLERANCE) -> bool:
    """Whether logits or scores are the same up to rounding.

    Args:
        tolerance: in float32, relative to the largest.
    """
    tolerance = tolerance if theirs.dtype in (torch.float32, torch.float64) else HALF_TOLERANCE
    return ours.shape == theirs.shape and bool((ours - theirs).abs().max() <= tolerance * theirs.abs().max())
