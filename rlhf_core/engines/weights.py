"""A policy's weights on their way from the trainer into a rollout engine."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

# vLLM's models of which every weight is the checkpoint's, or several of them one below the other, as `packed_modules_mapping` says, and
# with which this was tried.
STACKING_MODELS = ("LlamaForCausalLM",)


@dataclass(frozen=True)
class PackedTensor:
    """A tensor as bytes [N]: Ray shares arrays between processes, but pickles every tensor by itself."""

    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray


def pack(state_dict: dict[str, torch.Tensor]) -> dict[str, PackedTensor]:
    """Weights by name for another process; without a copy where they are on the CPU."""
    import torch

    flat = {name: tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy() for name, tensor in state_dict.items()}
    return {name: PackedTensor(str(t.dtype).removeprefix("torch."), tuple(t.shape), flat[name]) for name, t in state_dict.items()}


def unpack(packed: dict[str, PackedTensor]) -> dict[str, torch.Tensor]:
    """What was packed. The tensors share the arrays' memory and must not be written to."""
    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return {name: torch.from_numpy(p.data).view(getattr(torch, p.dtype)).reshape(p.shape) for name, p in packed.items()}


def replace_weights(model: torch.nn.Module, state_dict: dict[str, torch.Tensor]) -> bool:
    """Put weights by Hugging Face's names into a vLLM model on the CPU. False, and nothing has changed, where it takes vLLM's own reload.

    That one takes three times as long for a small model. Here a layer gets its weights and multiplies by a packed copy of them anew, as
    when it was loaded; nothing is restored and wrapped first.
    """
    if type(model).__name__ not in STACKING_MODELS:
        return False
    sources = _sources(model, state_dict)
    if sources is None:
        return False
    for module, name, tensors in sources:
        _set(module, name, tensors)
    for module in dict.fromkeys(module for module, _, _ in sources):
        process_weights(module)
    pack_tied_weights(model)
    return True


def pack_experts_at_next_load(model: torch.nn.Module) -> None:
    """Have vLLM's next reload pack a mixture's experts for the CPU's products, as at the first load. Else it takes their kernel, once there
    is one, for the sign that they are packed, and leaves the new ones as they are.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def pack_tied_weights(model: torch.nn.Module) -> None:
    """Some CPUs multiply by a packed copy of a layer's weight. vLLM renews it where a layer is loaded; a head that shares its weight with
    the embedding never is. A layer that needs its weight for nothing else has an empty one beside the packed.
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
    """What vLLM does with a module's weights once they are there, such as packing them for its matrix products."""
    method = getattr(module, "quant_method", None)
    if method is not None:
        method.process_weights_after_loading(module)


Source = tuple["torch.nn.Module", str, "list[torch.Tensor]"]


def _sources(model: torch.nn.Module, state_dict: dict[str, torch.Tensor]) -> list[Source] | None:
    """Of each parameter: its module, its name there, and what is stacked to it. None: a parameter or a weight is left over, or has another
    shape."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    sources, left = [], set(state_dict) - tied
    for path, module in model.named_modules():
        parent, _, leaf = path.rpartition(".")
        pieces = model.packed_modules_mapping.get(leaf, [leaf])
        for name, _ in module.named_parameters(recurse=False):
            if f"{path}.{name}" in tied:
                continue
            names = [".".join(filter(None, (parent, piece, name))) for piece in pieces]
            if not left.issuperset(names) or not _fits(module, name, [state_dict[n] for n in names]):
                return None
            left.difference_update(names)
            sources.append((module, name, [state_dict[n] for n in names]))
    return None if left else sources


def _fits(module: torch.nn.Module, name: str, tensors: list[torch.Tensor]) -> bool:
    """Whether the tensors, one below the other, have the shape of a parameter. A layer's weight may be kept in packed form only."""
    shape = getattr(module, name).shape
    if name == "weight" and hasattr(module, "output_partition_sizes"):
        shape = (module.output_size_per_partition, module.input_size_per_partition)
        if hasattr(module, "org_vocab_size"):  # rows up to a round number follow, which no token has
            shape = (module.org_vocab_size, shape[1])
    rows = sum(len(t) for t in tensors)
    return all(t.ndim and t.shape[1:] == tuple(shape[1:]) for t in tensors) and rows == shape[0]


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
