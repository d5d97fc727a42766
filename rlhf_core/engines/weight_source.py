"""The policy's weights as rollout engines get them: a layer at a time, under the names that engines know."""

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
    """A weight that an engine makes of the one in its model's folder.

    scale, transposed: of its correction by `lora.corrected`, whose A and B are sent; None: it has none.
    """

    spec: TensorSpec
    scale: float | None = None
    transposed: bool = False


class WeightSource(Protocol):
    """A policy's weights, of which some may be sent, and others made by engines.

    specs: of the tensors that are sent of each layer.    made: of each layer.
    """

    @property
    def specs(self) -> list[list[TensorSpec]]: ...

    @property
    def made(self) -> list[list[MadeWeight]]: ...

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """What is sent of each layer."""
        ...


class PolicySource:
    """The weights of a trained module, adapters merged, in the module's dtype.

    Args:
        module: wraps a Hugging Face model as its `model`.
        names: gives a layer's weights, which have the model's own names, the names that engines know.
    """

    def __init__(self, module: nn.Module, names: Callable[[Tensors], Tensors]):
        self._module, self._names = module, names

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """The weights of each of `unit_layers`, valid until the next one.

        A collective with ZeRO 3, which gathers a layer at a time: every rank iterates to the end.

        Args:
            needed: False: this rank only takes part in gathering, and every layer is empty.
        """
        for units in unit_layers(self._module):
            with gathered(p for unit in units for p in unit.parameters):
                yield by_size(self._names(own_weights(units))) if needed else {}

    @cached_property
    def specs(self) -> list[list[TensorSpec]]:
        """Those of each layer. Reads all layers, so it is a collective as `layers` is."""
        return [specs_of(layer) for layer in self.layers()]

    @property
    def made(self) -> list[list[MadeWeight]]:
        return [[] for _ in self.specs]


class KeptSource:
    """A copy, in the host's memory, of what is sent of a policy.

    Args:
        source: of the policy; None: nothing is kept.
    """

    def __init__(self, source: WeightSource | None = None) -> None:
        self.specs, self.made = ([], []) if source is None else (source.specs, source.made)
        self._layers: list[Tensors] = []

    def keep(self, layer: Tensors) -> None:
        self._layers.append({name: tensor.to("cpu", copy=True) for name, tensor in layer.items()})

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """As `PolicySource.layers`, without a collective."""
        yield from self._layers


def unit_layers(module: nn.Module) -> Iterator[list[WeightUnit]]:
    """The units of each layer. What is before the layers counts as one, and so does what is after them."""
    for _, units in groupby(weight_units(module), key=lambda unit: layer_of(unit.name)):
        yield list(units)


def own_weights(units: list[WeightUnit], *, merged: bool = True) -> Tensors:
    """The weights of some units under the names of the wrapped model."""
    return {name.removeprefix("model."): value for unit in units for name, value in unit.weights(merged=merged).items()}


def gathered(parameters: Iterable[nn.Parameter]) -> AbstractContextManager:
    """Within it these parameters are whole with ZeRO 3, where it is a collective; without, they always are."""
    import deepspeed

    return deepspeed.zero.GatheredParameters(list(dict.fromkeys(parameters)))


def adapter_names(name: str) -> tuple[str, str]:
    """The names under which A and B of a weight are sent."""
    return f"{name}.lora_A", f"{name}.lora_B"


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
