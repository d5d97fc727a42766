"""Low-rank adapters (LoRA): a model's matrices stay as they are, and small corrections of them are trained.

    y = W x + (alpha / rank) * B A x        W [out, in], A [rank, in], B [out, rank]

B starts at zero, so that the adapted model starts as the model itself.
Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685, section 4.1.

QLoRA: the frozen matrices W may be rounded to 4 bits. NF4 stores one of 16 values for each number, scaled by the largest magnitude of its
block of 64. The layer multiplies by the dequantized matrix, so it is exactly the plain layer with rounded weights.
Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3; without its second quantization, that of the scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from rlhf_core.config import LoraConfig
from rlhf_core.models.build import scalar_head

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_INSIDE = "adapted"
BLOCK = 64  # numbers that share a scale
KIND = "nf4"


def add_adapters(model: PreTrainedModel, config: LoraConfig | None, *, seed: int) -> None:
    """Put adapters into a language or scalar model, in place, and freeze all other weights but a scalar head's. None: no adapters.

    The model keeps its structure: an adapted linear layer becomes one that holds the original layer and its correction.

    Raises:
        ValueError: target_modules names the head, or something that isn't a linear layer of this model.
    """
    if config is None:
        return
    quantize_base(model, config)
    from peft import LoraConfig as PeftLoraConfig
    from peft import inject_adapter_in_model

    # Inside another module, so that PEFT doesn't guess from the model's type which layers are experts.
    targets = [f"{_INSIDE}.{name}" for name in _targets(model, config.target_modules)]
    options = {
        "lora_alpha": config.alpha,
        "lora_dropout": config.dropout,
        "fan_in_fan_out": any(type(m) is Conv1D for m in model.modules()),
    }
    settings = PeftLoraConfig(r=config.rank, target_modules=targets, **options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(settings, nn.ModuleDict({_INSIDE: model}))
    for layer in _adapted(model).values():  # PEFT creates modules in training mode
        layer.train(model.training)
    if model.get_output_embeddings() is None:
        scalar_head(model).requires_grad_(True)


def quantize_base(model: PreTrainedModel, config: LoraConfig | None) -> None:
    """Round every plain linear layer but the head to 4 bits, in place, if the adapters' configuration asks for it.

    Raises:
        ValueError: bitsandbytes isn't installed.
    """
    if config is not None and config.quantize is not None:
        for name in _targets(model, "all-linear"):
            parent, _, own = name.rpartition(".")
            if isinstance(layer := model.get_submodule(name), nn.Linear) and not isinstance(layer, QuantizedLinear):
                setattr(model.get_submodule(parent), own, QuantizedLinear(layer))


class Adapter(NamedTuple):
    """The correction of a layer's matrix (see `corrected`).

    weight: the matrix's name in the state dict without adapters.
    """

    weight: str
    a: nn.Parameter
    b: nn.Parameter
    scale: float
    transposed: bool

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the factors left [out, rank] and right [rank, in], whose product is the correction."""
        return self.scale * self.b, self.a


class WeightUnit(NamedTuple):
    """A part of a module's weights that depends on no other part.

    name: name of its layer or module.
    parameters: parameters that must be whole to compute it.
    weights: function that returns the part of the state dict, with the correction added unless `merged=False`. Tensors that are neither
    adapted nor quantized aren't copied.
    adapter: the part's adapter; None: it isn't adapted.
    """

    name: str
    parameters: list[nn.Parameter]
    weights: Callable[..., dict[str, torch.Tensor]]
    adapter: Adapter | None


def weight_units(module: nn.Module) -> Iterator[WeightUnit]:
    """Yield the parts of a module's weights, under the names without adapters. The module itself doesn't change.

    Each part has the correction added. Sums are computed in float32 and rounded once to the weight's dtype. Quantized layers give their
    dequantized matrices. Without adapters all units together are `module.state_dict()`.

    Yields:
        An adapted layer, or a module without its children, in the order of the state dict.
    """
    saved, adapted, inside = set(module.state_dict()), _adapted(module), None
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    for name, part in module.named_modules(remove_duplicate=False):
        if inside is not None and name.startswith(inside):
            continue
        layer = adapted.get(name)
        inside = None if layer is None else f"{name}."
        adapter = None if layer is None else _adapter(layer, f"{name}.weight")
        parameters = list(part.parameters(recurse=layer is not None))
        if parameters or any(True for _ in part.buffers(recurse=False)):
            yield WeightUnit(name, parameters, partial(_weights, part, f"{name}." if name else "", saved, dtype, adapter), adapter)


def _adapter(layer: LoraLayer, weight: str) -> Adapter:
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    return Adapter(weight, a, b, layer.scaling["default"], layer.fan_in_fan_out)


def matrix_of(layer: nn.Module) -> tuple[torch.Tensor, Adapter | None] | None:
    """Return the matrix [out, in] of a linear layer without a bias, and its correction (None if it has none, or it is disabled).

    None instead of both if the layer computes anything else, such as dropout before the correction.
    """
    base = layer
    if "peft" in sys.modules and type(layer) is not nn.Linear:
        from peft.tuners.lora.layer import Linear

        if type(layer) is not Linear or layer.merged or layer.lora_variant or layer.fan_in_fan_out:
            return None
        if list(layer.lora_A) != ["default"] or layer.lora_B["default"].bias is not None:
            return None
        base = layer.base_layer
    if type(base) is not nn.Linear or base.bias is not None:
        return None
    if base is layer or layer.disable_adapters:
        return base.weight, None
    dropout = layer.lora_dropout["default"]
    drops = not isinstance(dropout, nn.Identity) and dropout.training and dropout.p > 0
    return None if drops else (base.weight, _adapter(layer, "weight"))


def _weights(
    part: nn.Module, prefix: str, saved: set[str], dtype: torch.dtype, adapter: Adapter | None, *, merged: bool = True
) -> dict[str, torch.Tensor]:
    """Return the weights of one unit by their names in the state dict.

    Args:
        saved: names in the whole module's state dict, which leaves some buffers out.
    """
    weight_options = {"prefix": prefix.removesuffix("."), "recurse": adapter is not None, "remove_duplicate": False}
    state = {
        name: t.detach() for name, t in (*part.named_parameters(**weight_options), *part.named_buffers(**weight_options)) if name in saved
    }
    state = dequantized_state(part, state, prefix=prefix, dtype=dtype)
    if adapter is None:
        return state
    state = {n.replace(".base_layer.", "."): tensor for n, tensor in state.items() if not n.startswith(f"{prefix}lora_")}
    if merged:
        correction = {"scale": adapter.scale, "transposed": adapter.transposed}
        state[adapter.weight] = corrected(state[adapter.weight], adapter.a.detach(), adapter.b.detach(), **correction)
    return state


def corrected(weight: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, scale: float, transposed: bool) -> torch.Tensor:
    """Return the matrix W + scale * B A, computed in float32 and rounded once to W's dtype.

    Args:
        weight: W [out, in], or [in, out] if transposed.    a: [rank, in].    b: [out, rank].
    """
    product = b.float() @ a.float()
    return (weight.float() + scale * (product.t() if transposed else product)).to(weight.dtype)


@contextmanager
def without_adapters(module: nn.Module) -> Iterator[None]:
    """Let the module compute without its corrections and without dropout within the block, as before training. For inference only."""
    layers, training = _adapted(module).values(), [part for part in module.modules() if part.training]
    for layer in layers:
        layer.enable_adapters(False)
    module.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True
        for layer in layers:
            layer.enable_adapters(True)


def _adapted(module: nn.Module) -> dict[str, LoraLayer]:
    if "peft" not in sys.modules:  # importing it takes a second; no adapters exist yet
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLayer)}


def has_adapters(module: nn.Module) -> bool:
    """Return whether the module has adapters."""
    return bool(_adapted(module))


def _targets(model: PreTrainedModel, wanted: str | list[str]) -> list[str]:
    """Return full names of the layers that get adapters."""
    language_head = model.get_output_embeddings()
    head = scalar_head(model) if language_head is None else language_head
    linear = [
        name
        for name, part in model.named_modules()
        if _is_linear(type(part)) and part is not head and not _read_by_parent(model, name) and not _is_frozen_vision(model, part)
    ]
    if not linear:
        raise ValueError(f"lora: expected a model with linear layers, got {type(model).__name__} without any; set lora to null")
    if wanted == "all-linear":
        return linear
    targets = {name: [full for full in linear if f".{full}".endswith(f".{name}")] for name in wanted}
    if unknown := [name for name, found in targets.items() if not found]:
        known = sorted({full.rpartition(".")[2] for full in linear})
        raise ValueError(f"lora.target_modules: expected linear layers of the model, among {known}, got {unknown}; correct the names")
    return sorted({full for found in targets.values() for full in found})


def _is_frozen_vision(model: PreTrainedModel, layer: nn.Module) -> bool:
    """Return whether the layer belongs to a vision tower that isn't trained."""
    sees = hasattr(model.config, "vision_config")
    return sees and not isinstance(layer, QuantizedLinear) and not any(p.requires_grad for p in layer.parameters())


@cache
def _is_linear(kind: type) -> bool:
    """Return whether a module's class computes what a linear layer does.

    Falcon's is derived from it and does; Llama 4's router returns other numbers.
    """
    if kind in (nn.Linear, Conv1D, QuantizedLinear):
        return True
    if not issubclass(kind, nn.Linear):
        return False
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            layer, numbers = kind(3, 2), torch.randn(4, 3)
            found = layer(numbers)
        except Exception:  # another class's arguments, or its forward pass
            return False
        expected = nn.functional.linear(numbers, layer.weight, layer.bias)
    return isinstance(found, torch.Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-6)


def _read_by_parent(model: PreTrainedModel, name: str) -> bool:
    """Return whether a layer's parent may read its weight directly, so that a correction of the layer's output would be ignored.

    This holds in state-space mixers and in torch's attention (vision towers).
    """
    path, _, own = name.rpartition(".")
    parent = model.get_submodule(path)
    return own in ("dt_proj", "out_proj") and (hasattr(parent, "A_log") or isinstance(parent, nn.MultiheadAttention))


# 4-bit base layers


class QuantizedLinear(nn.Linear):
    """A linear layer with the rounded weights of another one, and its bias. The matrix is not a parameter.

    weight: uint8 [out * in / 2, 1], two numbers in each, padded to whole blocks.
    scales: the bytes of a float32 for each block, which no cast of the module touches.
    Raises:
        ValueError: bitsandbytes isn't installed.
    """

    def __init__(self, layer: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = layer.in_features, layer.out_features
        packed, state = _library().quantize_4bit(_blocks(layer.weight.detach().float()), blocksize=BLOCK, quant_type=KIND)
        self.register_buffer("weight", packed)
        self.register_buffer("scales", state.absmax.view(torch.uint8))
        self.bias = layer.bias

    def dequantized(self) -> torch.Tensor:
        """Return the matrix [out, in] in float32 by which the layer multiplies."""
        library, count = _library(), self.out_features * self.in_features
        state = library.QuantState(
            absmax=self.scales.view(torch.float32),
            shape=torch.Size((-(-count // BLOCK), BLOCK)),
            code=library.get_4bit_type(KIND, device=self.weight.device),
            blocksize=BLOCK,
            quant_type=KIND,
            dtype=torch.float32,
        )
        return library.dequantize_4bit(self.weight, state).flatten()[:count].reshape(self.out_features, self.in_features)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        product = _Product.apply(input, self)
        return product if self.bias is None else product + self.bias


class _Product(Function):
    """The product input W^T. The backward pass dequantizes the matrix again instead of keeping it."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return input @ layer.dequantized().to(input.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        return gradient @ ctx.layer.dequantized().to(gradient.dtype), None


def dequantized_state(module: nn.Module, state: dict[str, torch.Tensor], *, prefix: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the dequantized matrices of the module's quantized layers, in a dtype and by their names in the state dict.

    Args:
        prefix: prefix of the module's names in the state dict.
    """
    layers = {f"{prefix}{name}".removesuffix("."): part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}
    matrices = {f"{name}.weight": layer.dequantized().to(dtype) for name, layer in layers.items() if f"{name}.weight" in state}
    return {name: tensor for name, tensor in (state | matrices).items() if name.removesuffix(".scales") not in layers}


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix's numbers in rows of one block, zeros at the end: bitsandbytes 0.50.2 corrupts rows that end within a block on a
    CPU.
    """
    return nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK)).reshape(-1, BLOCK)


def _library():
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ValueError("lora.quantize: expected bitsandbytes to be installed, got no such package; install it or set null") from error
    return functional
