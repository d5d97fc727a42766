"""The policy's weights in the form in which rollout engines get them: a layer at a time, under the engines' names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod
from typing import Protocol

import torch
from torch import nn

from rlhf_core.models.lora import WeightUnit, weight_units

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


@dataclass(frozen=True)
class MadeWeight:
    """A weight that an engine makes from the one in its model's folder.

    scale, transposed: arguments of `lora.corrected` for its correction, whose A and B are sent; scale None: it has no correction.
    """

    spec: TensorSpec
    scale: float | None = None
    transposed: bool = False


class WeightSource(Protocol):
    """A policy's weights, of which some are sent and others are made by engines.

    specs: specs of the tensors that are sent, by layer. made: weights that engines make, by layer.
    """

    @property
    def specs(self) -> list[list[TensorSpec]]: ...

    @property
    def made(self) -> list[list[MadeWeight]]: ...

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """Yield the tensors that are sent of each layer."""
        ...


class PolicySource:
    """The weights of a trained module, adapters merged, in the module's dtype.

    Args:
        module: module that wraps a Hugging Face model as its `model`.
        names: function that renames a layer's weights from the model's own names to the engines'.
    """

    def __init__(self, module: nn.Module, names: Callable[[Tensors], Tensors]):
        self._module, self._names = module, names

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """Yield the weights of each of `unit_layers`, valid until the next one.

        With ZeRO 3 this is a collective that gathers a layer at a time, so every rank iterates to the end.

        Args:
            needed: whether this rank needs the weights; otherwise it only takes part in gathering, and every layer is empty.
        """
        for units in unit_layers(self._module):
            with gathered(p for unit in units for p in unit.parameters):
                yield by_size(self._names(own_weights(units))) if needed else {}

    @cached_property
    def specs(self) -> list[list[TensorSpec]]:
        """Specs of each layer's weights. Reads all layers, so it is a collective as `layers` is."""
        return [specs_of(layer) for layer in self.layers()]

    @property
    def made(self) -> list[list[MadeWeight]]:
        return [[] for _ in self.specs]


class KeptSource:
    """A copy, in the host's memory, of the tensors that are sent of a policy.

    Args:
        source: the policy's source; None: nothing is kept.
    """

    def __init__(self, source: WeightSource | None = None) -> None:
        self.specs, self.made = ([], []) if source is None else (source.specs, source.made)
        self._layers: list[Tensors] = []

    def keep(self, layer: Tensors) -> None:
        self._layers.append({name: tensor.to("cpu", copy=True) for name, tensor in layer.items()})

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """Yield the layers as `PolicySource.layers` does, without a collective."""
        yield from self._layers


def unit_layers(module: nn.Module) -> Iterator[list[WeightUnit]]:
    """Yield the units of each layer. Units before the layers count as one layer, and so do those after them."""
    for _, units in groupby(weight_units(module), key=lambda unit: layer_of(unit.name)):
        yield list(units)


def own_weights(units: list[WeightUnit], *, merged: bool = True) -> Tensors:
    """Return the weights of some units under the names of the wrapped model."""
    return {name.removeprefix("model."): value for unit in units for name, value in unit.weights(merged=merged).items()}


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager:
    """Make these parameters whole within the block. With ZeRO 3 this is a collective; otherwise they are whole anyway."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(dict.fromkeys(parameters)))


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names under which A and B of a weight are sent."""
    return f"{name}.lora_A", f"{name}.lora_B"


def specs_of(layer: Tensors) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in layer.items()]


def by_size(tensors: Tensors) -> Tensors:
    """Sort tensors by element size, widest first, so that in one buffer each begins at a multiple of its element's size."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))


def layer_of(name: str) -> tuple[str, ...] | None:
    """Return the part of a module's name up to its first number, such as (model, layers, 3); None outside of layers."""
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    return None if number is None else tuple(parts[: number + 1])
