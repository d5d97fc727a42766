"""Low-rank adapters (LoRA): a model's matrices stay as they are, and small corrections of them are trained.

    y = W x + (alpha / rank) * B A x        W [out, in], A [rank, in], B [out, rank]

B starts at zero, so that the adapted model starts as the model itself.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config import LoraConfig
from rlhf_core.models.build import scalar_head
from rlhf_core.models.quantized import QuantizedLinear, dequantized_state, quantize_linears

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_INSIDE = "adapted"
_LINEAR = (nn.Linear, Conv1D, QuantizedLinear)  # not what is derived from them: Llama 4's routers return something else


def add_adapters(model: PreTrainedModel, config: LoraConfig | None, *, seed: int) -> None:
    """Put adapters into a language or scalar model, in place, and freeze all else but a scalar head; None leaves it as it is.

    The model keeps its structure: each adapted linear layer becomes one that holds the old one and its correction.

    Raises:
        ValueError: target_modules names something that isn't a linear layer of this model, or its head.
    """
    if config is None:
        return
    quantize_base(model, config)
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    # Within another module, or PEFT would see from the model's type which names mean experts, and take plain layers for them.
    targets = [f"{_INSIDE}.{name}" for name in _targets(model, config.target_modules)]
    how = {"lora_alpha": config.alpha, "lora_dropout": config.dropout, "fan_in_fan_out": any(type(m) is Conv1D for m in model.modules())}
    settings = PeftLoraConfig(r=config.rank, target_modules=targets, **how)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, nn.ModuleDict({_INSIDE: model}))
    for layer in _adapted(model).values():  # new modules are in training mode, whatever the model is in
        layer.train(model.training)
    if model.get_output_embeddings() is None:
        scalar_head(model).requires_grad_(True)


def quantize_base(model: PreTrainedModel, config: LoraConfig | None) -> None:
    """Round every plain linear layer but the head to 4 bits, in place, where the adapters' configuration says so: what they start from.

    Raises:
        ValueError: bitsandbytes isn't installed.
    """
    if config is not None and config.quantize is not None:
        quantize_linears(model, [name for name in _targets(model, "all-linear") if type(model.get_submodule(name)) is nn.Linear])


def merged_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """A module's weights with every correction added, under the names that it has without adapters; the module itself stays as it is.

    Sums are taken in float32 and rounded once to the weight's own type. Of quantized layers it is the matrices that they compute with.
    Without adapters this is `module.state_dict()`.
    """
    state = dequantized_state(module, module.state_dict())
    for name, layer in _adapted(module).items():
        base = state[f"{name}.base_layer.weight"]
        a, b = (state[f"{name}.{matrix}.default.weight"].float() for matrix in ("lora_A", "lora_B"))
        product = (b @ a).t() if layer.fan_in_fan_out else b @ a
        state[f"{name}.base_layer.weight"] = (base.float() + layer.scaling["default"] * product).to(base.dtype)
    corrections = tuple(f"{name}.lora_" for name in _adapted(module))
    return {name.replace(".base_layer.", "."): tensor for name, tensor in state.items() if not name.startswith(corrections)}


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Within it the module computes what it would without its corrections: what it was before training. Not for training."""
    layers = _adapted(module).values()
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def _adapted(module: nn.Module) -> dict[str, LoraLayer]:
    if "peft" not in sys.modules:  # its import takes a second, and nobody has asked for adapters yet
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}


def _targets(model: PreTrainedModel, wanted: str | list[str]) -> list[str]:
    """Full names of the layers that get adapters."""
    language_head = model.get_output_embeddings()
    head = scalar_head(model) if language_head is None else language_head
    linear = [
        name for name, part in model.named_modules() if type(part) in _LINEAR and part is not head and not _read_by_parent(model, name)
    ]
    if wanted == "all-linear":
        return linear
    targets = {name: [full for full in linear if f".{full}".endswith(f".{name}")] for name in wanted}
    if unknown := [name for name, found in targets.items() if not found]:
        known = sorted({full.rpartition(".")[2] for full in linear})
        raise ValueError(f"lora.target_modules: expected linear layers of the model, among {known}, got {unknown}; correct the names")
    return sorted({full for found in targets.values() for full in found})


def _read_by_parent(model: PreTrainedModel, name: str) -> bool:
    """Whether the state-space mixer that a layer is in may read the layer's weight, so that a correction of its output would be lost."""
    parent, _, own = name.rpartition(".")
    return own in ("dt_proj", "out_proj") and hasattr(model.get_submodule(parent), "A_log")
