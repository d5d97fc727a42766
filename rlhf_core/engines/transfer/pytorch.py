"""Receives weights over gloo for PyTorch's rollout engine, which has the trainer's model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine
from rlhf_core.engines.transfer.gloo import GlooReceiver


class PytorchTransfer:
    """Gives PyTorch's engine the methods by which `VllmEngine` gets weights, under its model's own names."""

    def __init__(self, engine: PytorchEngine):
        self._engine = engine

    def connect_weights(self, info: dict[str, Any]) -> None:
        """Connect to the sender.

        Args:
            info: the content of `GlooLink.info`.
        Raises:
            ValueError: the sender's weights are another model's.
        """
        self._receiver = GlooReceiver(info, worker=0, folder=self._engine.folder)
        given = {(spec.name, spec.shape) for layer in self._receiver.specs for spec in layer}
        if wrong := sorted(given ^ {(name, tuple(tensor.shape)) for name, tensor in self._engine.own_weights().items()}):
            raise ValueError(f"weights: expected those of the engine's model, got others, or none, for {wrong[0][0]}; restore them")

    def receive_weights(self, updates: Sequence[dict[str, Any]], version: int) -> int:
        """Replace the weights by those that the sender sends, one layer for each update, and return the version."""
        self._engine.start_weight_update()
        own = self._engine.own_weights()
        with torch.no_grad():
            for update in updates:
                for name, tensor in self._receiver.receive(update["layer"]).items():
                    own[name].copy_(tensor)
        return self._engine.renew(version)
