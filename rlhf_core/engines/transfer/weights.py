"""Packs weights for another process, and writes weights into a vLLM model on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# Tested vLLM models in which every weight equals a checkpoint's weight or a vertical stack of several, as in `packed_modules_mapping`.
STACKING_MODELS = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes [N]: Ray shares NumPy arrays between processes, but pickles tensors."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def pack(state_dict: dict[str, torch.Tensor]) -> dict[str, PackedTensor]:
    """Pack weights by name for another process, without a copy if they are on the CPU."""
    import torch

    flat = {name: tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for name, tensor in state_dict.items()}
    return {name: PackedTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape), flat[name]) for name, t in state_dict.items()}


def unpack(packed: dict[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """Unpack packed weights. The tensors share the arrays' memory and must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(p.data).view(getattr(torch, p.dtype)).reshape(p.shape) for name, p in packed.items()}


@dataclass(frozen=True, eq=False)
class Written:
    """A parameter of a vLLM model on the CPU: `name` in `module`, and the names of the weights that are stacked into it."""

    module: torch.nn.Module
    name: str
    weights: tuple[str, ...]


def replace_weights(model: torch.nn.Module, state_dict: dict[str, torch.Tensor]) -> bool:
    """Write weights with Hugging Face names to a vLLM model on the CPU. Return False, without a change, if only vLLM's reload can load
    them.
    """
    written = direct_writes(model, {name: tuple(tensor.shape) for name, tensor in state_dict.items()})
    if written is None:
        return False
    write_weights(written, state_dict)
    pack_tied_weights(model)
    return True


def direct_writes(model: torch.nn.Module, shapes: dict[str, tuple[int, ...]]) -> list[Written] | None:
    """Return the parameters into which weights of these names and shapes can be written as they are, each of them once.

    None if only vLLM's reload can load them, which is slower for a small model.
    """
    if type(model).__name__ not in STACKING_MODELS:
        return None
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found, left = [], set(shapes) - tied
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        pieces = model.packed_modules_mapping.get(leaf, [leaf])
        for name, _ in module.named_parameters(recurse=False):
            if f"{path}.{name}" in tied:
                continue
            names = tuple(".".join(filter(None, (parent, piece, name))) for piece in pieces)
            if not left.issuperset(names) or not _fits(module, name, [shapes[n] for n in names]):
                return None
            left.difference_update(names)
            found.append(Written(module, name, names))
    return None if left else found


def write_weights(written: Iterable[Written], tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors into these parameters. Each layer packs its weights again for its matrix products, as at loading."""
    modules = []
    for parameter in written:
        _set(parameter.module, parameter.name, [tensors[name] for name in parameter.weights])
        modules.append(parameter.module)
    for module in dict.fromkeys(modules):
        process_weights(module)


def pack_experts_at_next_load(model: torch.nn.Module) -> None:
    """Make vLLM's next reload pack the experts of a mixture for the CPU, as at the first load.

    Otherwise vLLM takes an existing kernel as a sign that the experts are packed, and leaves new ones unpacked.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_weights(model: torch.nn.Module) -> None:
    """Update the packed weight, which some CPUs use, of layers that share their weight.

    vLLM packs when a layer is loaded, which doesn't happen for a head that shares its weight with the embedding. A layer that only needs
    the packed weight has an empty plain one.
    """
    by_storage: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if hasattr(module, "cpu_linear") and weight is not None and weight.numel():
            by_storage.setdefault(weight.data_ptr(), []).append(module)
    for sharing in by_storage.values():
        for module in sharing if len(sharing) > 1 else ():
            process_weights(module)


def process_weights(module: torch.nn.Module) -> None:
    """Run vLLM's processing of a module's loaded weights, such as packing them for matrix products."""
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)


def _fits(module: torch.nn.Module, name: str, shapes: list[tuple[int, ...]]) -> bool:
    """Return whether the vertically stacked tensors have a parameter's shape. A layer may keep its weight in packed form only."""
    shape = getattr(module, name).shape
    if name == "weight" and hasattr(module, "output_partition_sizes"):
        shape = (module.output_size_per_partition, module.input_size_per_partition)
        if hasattr(module, "org_vocab_size"):  # padding rows follow, which belong to no token
            shape = (module.org_vocab_size, shape[1])
    return all(s and s[1:] == tuple(shape[1:]) for s in shapes) and sum(s[0] for s in shapes) == shape[0]


def _set(module: torch.nn.Module, name: str, tensors: list[torch.Tensor]) -> None:
    import torch

    parameter = getattr(module, name)
    if parameter.numel():
        rows = 0
        for tensor in tensors:
            parameter.data[rows : rows + len(tensor)].copy_(tensor)
            rows += len(tensor)
    else:
        stacked = torch.cat([t.to(parameter.dtype) for t in tensors])
        setattr(module, name, torch.nn.Parameter(stacked, requires_grad=False))
