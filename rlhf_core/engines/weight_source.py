"""The policy's weights as rollout engines get them: a layer at a time, under the names that engines know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch
from torch import nn

from rlhf_core.models.lora import weight_units

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class TensorSpec:
    """Name, dtype (such as "float32") and shape of a weight."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorSpec:
        return cls(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * getattr(torch, self.dtype).itemsize


class PolicySource:
    """The weights of a trained module, adapters merged, in the module's dtype.

    Args:
        module: wraps a Hugging Face model as its `model`.
        names: gives a layer's weights, which have the model's own names, the names that engines know.
    """

    def __init__(self, module: nn.Module, names: Callable[[Tensors], Tensors]):
        self._module, self._names = module, names

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """Each layer's weights, valid until the next layer. What is before the layers counts as one, and so does what is after them.

        A collective with ZeRO 3, which gathers a layer at a time: every rank iterates to the end.

        Args:
            needed: False: this rank only takes part in gathering, and every layer is empty.
        """
        import deepspeed

        for _, of_layer in groupby(weight_units(self._module), key=lambda unit: layer_of(unit.name)):
            units = list(of_layer)
            parameters = dict.fromkeys(p for unit in units for p in unit.parameters)
            with deepspeed.zero.GatheredParameters(list(parameters)):  # does nothing with whole parameters
                if needed:
                    own = {name.removeprefix("model."): value for unit in units for name, value in unit.weights().items()}
                    yield by_size(self._names(own))
                else:
                    yield {}

    @cached_property
    def specs(self) -> list[list[TensorSpec]]:
        """Those of each layer. Reads all layers, so it is a collective as `layers` is."""
        return [specs_of(layer) for layer in self.layers()]


class KeptSource:
    """A copy of a policy's weights in the host's memory."""

    def __init__(self) -> None:
        self._layers: list[Tensors] = []

    def keep(self, layer: Tensors) -> None:
        self._layers.append({name: tensor.to("cpu", copy=True) for name, tensor in layer.items()})

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """As `PolicySource.layers`, without a collective."""
        yield from self._layers

    @property
    def specs(self) -> list[list[TensorSpec]]:
        return [specs_of(layer) for layer in self._layers]


def specs_of(layer: Tensors) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in layer.items()]


def by_size(tensors: Tensors) -> Tensors:
    """Wider elements first, so that in one buffer each tensor begins at a multiple of its element's size."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def layer_of(name: str) -> tuple[str, ...] | None:
    """The part of a module's name up to its first number, such as (model, layers, 3); None outside of layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else tuple(parts[: number + 1])
