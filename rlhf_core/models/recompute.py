"""Gradient checkpointing: a layer keeps only its input, and computes its activations again in the backward pass.

Source: Chen et al. 2016, https://arxiv.org/abs/1604.06174
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from rlhf_core.models.head import LogprobHead


def recompute_layers(module: nn.Module, subject: str) -> None:
    """Apply gradient checkpointing to each decoder layer of the models in a module, in place; `LogprobHead` then keeps no probabilities.

    transformers' own switch works in training mode only, which also turns dropout on. This one works in both modes.

    Args:
        subject: the setting that asks for it, for the error message.
    Raises:
        ValueError: the architecture has no layers that can be computed again.
    """
    layers = list(_layers(module))
    if not layers:
        name = type(getattr(module, "model", module)).__name__
        raise ValueError(
            f"{subject}: expected false for a model without layers that transformers can checkpoint, got true for {name}; set it to false"
        )
    for layer in layers:
        if not isinstance(layer.forward, _Recomputed):
            layer.forward = _Recomputed(layer.forward)
    for part in module.modules():
        if isinstance(part, LogprobHead):
            part.keeps_probabilities = False


def recomputes_layers(module: nn.Module) -> bool:
    """Return whether `recompute_layers` was applied to the module."""
    return any(isinstance(part.__dict__.get("forward"), _Recomputed) for part in module.modules())


class _Recomputed:
    """A layer's forward whose activations are computed again in the backward pass."""

    def __init__(self, forward: Callable[..., Any]):
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)


def _layers(module: nn.Module) -> Iterator[GradientCheckpointingLayer]:
    """Yield the outermost decoder layers, since a layer may hold others."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _layers(child)
