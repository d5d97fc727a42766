"""Frees the memory of a DeepSpeed engine that isn't used any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


def free(engine: DeepSpeedEngine) -> None:
    """Release weights, gradients, optimizer state and buffers; the engine and its module can't be used afterwards.

    With ZeRO, hooks kept in C++ refer to the optimizer, which refers to everything else. Python's garbage collector doesn't see these
    references, so without this call the engine would keep its memory to the end of the process.
    """
    engine.destroy()
    for tensor in [*engine.module.parameters(), *engine.module.buffers()]:
        vars(tensor).clear()  # with ZeRO 3 the rank's share of it
        tensor.grad = None
        tensor.data = torch.empty(0, dtype=tensor.dtype)
    optimizer = engine.optimizer
    for part in (getattr(optimizer, "optimizer", None), optimizer, engine):
        if part is not None:
            vars(part).clear()
