"""Sends a LoRA policy to rollout engines that read the frozen weights from their model's folder: of each adapted weight only A and B are
sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from rlhf_core.engines.deepspeed.ranks import from_first, is_first
from rlhf_core.engines.transfer.source import (
    MadeWeight,
    Tensors,
    TensorSpec,
    adapter_names,
    by_size,
    gathered,
    own_weights,
    specs_of,
    unit_layers,
)
from rlhf_core.models.lora import Adapter, WeightUnit
from rlhf_core.models.weights import FolderWeights


@dataclass(frozen=True)
class LayerPlan:
    """How a layer's weights reach the engines.

    made: weights that engines make. adapted: engines' name of each weight whose A and B are sent, by the model's name of it.
    whole: engines' names of weights that are sent with adapters merged. merged: names of the units that these come from.
    sent: all tensors that are sent.
    """

    made: list[MadeWeight]
    adapted: dict[str, str]
    whole: set[str]
    merged: set[str]
    sent: list[TensorSpec]


class AdapterSource:
    """The weights of a trained module with adapters, as few of them as engines need.

    An engine makes a weight itself, from its model's folder and the correction, only if the result is what `PolicySource` would send: the
    folder must have the frozen weight's numbers under the engine's name. All other weights are sent whole: trained weights, 4-bit layers,
    whose rounded matrices are in no folder, and the experts of PyTorch's engine, which has one tensor for all of them where the folder has
    one for each.

    Args:
        module, names: as for `PolicySource`.
        folder: folder of the engines' initial model.
    """

    def __init__(self, module: nn.Module, names: Callable[[Tensors], Tensors], folder: str | Path):
        self._module, self._names, self._folder = module, names, folder

    def layers(self, *, needed: bool = True) -> Iterator[Tensors]:
        """Yield what is sent of each layer, as `PolicySource.layers` does. With ZeRO 3 only adapters and weights that are sent whole are
        gathered.
        """
        for units, plan in zip(unit_layers(self._module), self._plans, strict=True):
            adapters = [p for a in _adapters(units).values() for p in (a.a, a.b)]
            with gathered([*adapters, *(p for unit in units if unit.name in plan.merged for p in unit.parameters)]):
                yield self._sent(units, plan.adapted, plan.whole, plan.merged) if needed else {}

    def _sent(self, units: list[WeightUnit], adapted: dict[str, str], whole: set[str], merged: set[str]) -> Tensors:
        """Return what is sent of a layer, by its `LayerPlan`."""
        sent: Tensors = {}
        if whole:
            own = own_weights([unit for unit in units if unit.name in merged])
            sent = {name: tensor for name, tensor in self._names(own).items() if name in whole}
        for weight, adapter in _adapters(units).items():
            if (name := adapted.get(weight)) is not None:
                sent |= dict(zip(adapter_names(name), (adapter.a.detach(), adapter.b.detach()), strict=True))
        return by_size(sent)

    @property
    def specs(self) -> list[list[TensorSpec]]:
        """Specs of what is sent of each layer. The first call is a collective, as `layers` is, and reads all weights."""
        return [plan.sent for plan in self._plans]

    @property
    def made(self) -> list[list[MadeWeight]]:
        """Weights that engines make, by layer. A collective like `specs`."""
        return [plan.made for plan in self._plans]

    @cached_property
    def _plans(self) -> list[LayerPlan]:
        """Plans of all layers, made on rank 0, which compares all frozen weights with the folder's."""
        folder, found = FolderWeights(self._folder) if is_first() else None, []
        for units in unit_layers(self._module):
            with gathered(p for unit in units for p in unit.parameters):
                if folder is not None:
                    found.append(self._plan(units, folder))
        return from_first(found)

    def _plan(self, units: list[WeightUnit], folder: FolderWeights) -> LayerPlan:
        by_unit, adapters = {unit.name: own_weights([unit], merged=False) for unit in units}, _adapters(units)
        own = {name: tensor for weights in by_unit.values() for name, tensor in weights.items()}
        pointers = {p.data_ptr() for unit in units for p in unit.parameters if not p.requires_grad}
        frozen = {name for name, tensor in own.items() if tensor.data_ptr() in pointers}
        given = self._names(own)
        origins = _origins(given, own)
        rest = own.keys() - origins.values()  # from which weights without an origin are computed
        rest_is_frozen = rest <= frozen and not rest & adapters.keys()
        there = folder.read(given)
        made: list[MadeWeight] = []
        adapted: dict[str, str] = {}
        whole: set[str] = set()
        for name, tensor in given.items():
            origin = origins.get(name)
            can_be_made = rest_is_frozen if origin is None else origin in frozen
            if not (can_be_made and name in there and torch.equal(there[name].to(tensor.dtype), tensor.cpu())):
                whole.add(name)
            elif origin in adapters:
                made.append(MadeWeight(TensorSpec.of(name, tensor), adapters[origin].scale, adapters[origin].transposed))
                adapted[origin] = name
            else:
                made.append(MadeWeight(TensorSpec.of(name, tensor)))
        sources = {origins[name] for name in whole if name in origins} | (rest if whole - origins.keys() else set())
        merged = {unit for unit, weights in by_unit.items() if sources & weights.keys()}
        return LayerPlan(made, adapted, whole, merged, specs_of(self._sent(units, adapted, whole, merged)))


def _adapters(units: list[WeightUnit]) -> dict[str, Adapter]:
    """Return the adapters by the model's name of the weight."""
    return {unit.adapter.weight.removeprefix("model."): unit.adapter for unit in units if unit.adapter is not None}


def _origins(given: Tensors, own: Tensors) -> dict[str, str]:
    """Return the model's name of each of the engines' weights that is a weight of the model and has one name there."""
    names: dict[tuple, list[str]] = {}
    for name, tensor in own.items():
        names.setdefault(_place(tensor), []).append(name)
    found = {name: names.get(_place(tensor), []) for name, tensor in given.items()}
    return {name: origins[0] for name, origins in found.items() if len(origins) == 1}


def _place(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.shape, tensor.stride()
