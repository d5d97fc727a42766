"""Linear layers with 4-bit weights, as the frozen base of adapters (QLoRA).

A matrix is kept as NF4: for each number one of 16 values, scaled by the largest magnitude of its block of 64. What is computed is the
product with the matrix that this stands for, so that the layer is exactly the plain one with rounded weights.
Source: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3; without its second quantization, that of the scales.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

BLOCK = 64  # numbers that share a scale
KIND = "nf4"


class QuantizedLinear(nn.Linear):
    """A linear layer with the rounded weights of another one, and its bias. Its matrix is no parameter.

    weight: uint8 [out * in / 2, 1], two numbers in each, filled up to whole blocks.
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
        """The matrix [out, in] that is computed with; float32."""
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
    """input W^T; the matrix is made again for the gradient, and not kept."""

    @staticmethod
    def forward(ctx, input: torch.Tensor, layer: QuantizedLinear) -> torch.Tensor:
        ctx.layer = layer
        return input @ layer.dequantized().to(input.dtype).t()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient: torch.Tensor):
        return gradient @ ctx.layer.dequantized().to(gradient.dtype), None


def quantize_linears(model: nn.Module, names: list[str]) -> None:
    """Put quantized layers into the places of those of these full names."""
    for name in names:
        parent, _, own = name.rpartition(".")
        setattr(model.get_submodule(parent), own, QuantizedLinear(model.get_submodule(name)))


def dequantized_state(module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state dict of a module, with the matrices that its quantized layers stand for, in the type of its other weights."""
    layers = {name: part for name, part in module.named_modules() if isinstance(part, QuantizedLinear)}
    if not layers:
        return state
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    matrices = {f"{name}.weight": layer.dequantized().to(dtype) for name, layer in layers.items()}
    return {name: tensor for name, tensor in (state | matrices).items() if name.removesuffix(".scales") not in layers}


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    """All numbers in rows of a block, zeros at the end. A matrix whose rows end within a block comes back wrong on a CPU (0.50.2)."""
    return nn.functional.pad(matrix.flatten(), (0, -matrix.numel() % BLOCK)).reshape(-1, BLOCK)


def _library():
    try:
        from bitsandbytes import functional
    except ImportError as error:
        raise ValueError("lora.quantize: expected bitsandbytes to be installed, got no such package; install it or set null") from error
    return functional
