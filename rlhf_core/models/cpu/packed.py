"""A packed forward pass of a Llama trunk: real tokens without padding, and the end of the last layer at the wanted positions only.

Hugging Face's trunk computes whole rows, with padding, and every position of the last layer. Here everything but attention runs on the real
tokens laid end to end. The weights are the model's own, and the results are equal up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf_core.models.cpu.layers import (
    AttentionHeads,
    Matrix,
    attend,
    rotated_qkv,
    rotated_qkv_backward,
    swiglu,
    swiglu_backward,
)
from rlhf_core.models.cpu.layout import Layout, layout_of
from rlhf_core.models.head import piece_rows
from rlhf_core.models.lora import matrix_of


def can_pack(trunk: nn.Module) -> bool:
    """Whether `packed_states` computes what this trunk would: a plain Llama, float32, on a CPU, whole weights, maybe with adapters."""
    if type(trunk) is not LlamaModel:
        return False
    config, weight = trunk.config, trunk.embed_tokens.weight
    plain = config.hidden_act == "silu" and config.rope_parameters["rope_type"] == "default" and not config.attention_dropout
    # ZeRO 3, which marks its weights with ds_id, gathers them only when their own module is called.
    whole = weight.device.type == "cpu" and weight.dtype == torch.float32 and not hasattr(weight, "ds_id")
    return plain and whole and all(_takes(layer) for layer in trunk.layers)


def _takes(layer: LlamaDecoderLayer) -> bool:
    """Whether all matrices of a layer are plain ones, or frozen ones with adapters."""
    found = [matrix_of(linear) for linear in _linears(layer)]
    if None in found:
        return False
    adapted = any(adapter is not None for _, adapter in found)
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    return not adapted or not any(weight.requires_grad for weight in (*norms, *(weight for weight, _ in found)))


def _linears(layer: LlamaDecoderLayer) -> tuple[nn.Module, ...]:
    attention, mlp = layer.self_attn, layer.mlp
    return attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj


def packed_states(
    trunk: LlamaModel,
    input_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    *,
    position_ids: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    segments: torch.Tensor | None = None,
) -> torch.Tensor:
    """The trunk's last hidden states at the wanted positions.

    Args:
        input_ids: [B, T]; tokens after a row's last wanted position are ignored, since no wanted position sees them.
        rows, positions: [M] int64, the wanted positions.
        position_ids: [B, T]; None: 0 to T - 1.
        visible: [B, 1, T, T] bool; None: all before, and itself.
        segments: [B, T] int64, of rows with a prefix and branches, in place of `visible`: see `visible_branches`.
    Returns:
        [M, H].
    """
    layout = layout_of(trunk, input_ids, rows, positions, position_ids, visible, segments)
    hidden = F.embedding(layout.ids, trunk.embed_tokens.weight, trunk.embed_tokens.padding_idx)
    for number, layer in enumerate(trunk.layers, start=1):
        attended = _attention(layer, hidden, layout, trunk.config)
        if number == len(trunk.layers):
            attended, hidden = attended.index_select(0, layout.places[layout.wanted]), hidden.index_select(0, layout.wanted)
        else:
            attended = _Pick.apply(attended, layout.places)
        hidden = _projected(layer.self_attn.o_proj, hidden, attended)
        hidden = _mlp(layer, hidden)
    return F.rms_norm(hidden, hidden.shape[-1:], trunk.norm.weight, trunk.norm.variance_epsilon)


def _attention(layer: LlamaDecoderLayer, hidden: torch.Tensor, layout: Layout, config: Any) -> torch.Tensor:
    """The output of attention [P, heads * D], before the output projection."""
    attention, norm = layer.self_attn, layer.input_layernorm
    size = attention.head_dim
    turned = partial(interleaved, size=size)
    stacked = [(attention.q_proj, turned), (attention.k_proj, turned), (attention.v_proj, lambda rows: rows)]
    weight, correction = _stacked(stacked, norm.weight)
    placed = _RotatedQkv.apply(hidden, weight, *correction, norm.variance_epsilon, layout, torch.is_grad_enabled())
    heads = AttentionHeads(config.num_attention_heads, config.num_key_value_heads, size, attention.scaling)
    parts = placed.split([block.num_places for block in layout.blocks])
    return torch.cat([attend(part, block, heads) for part, block in zip(parts, layout.blocks, strict=True)])


def _mlp(layer: LlamaDecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    matrices = [tensor for linear in (mlp.gate_proj, mlp.up_proj, mlp.down_proj) for tensor in _tensors(linear)]
    return _SwiGlu.apply(hidden, norm.weight, norm.variance_epsilon, torch.is_grad_enabled(), *matrices)


def _tensors(linear: nn.Module) -> tuple[torch.Tensor | None, ...]:
    """Weight, and the factors of its correction if it has one."""
    weight, adapter = matrix_of(linear)
    return weight, *((None, None) if adapter is None else adapter.factors())


def _projected(linear: nn.Module, added: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """added + the linear layer's output."""
    weight, adapter = matrix_of(linear)
    output = torch.addmm(added, inputs, weight.t())
    return output if adapter is None else torch.addmm(output, inputs @ adapter.a.t(), adapter.b.t(), alpha=adapter.scale)


def _stacked(
    linears: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]], norm: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The matrix of several linear layers with the same input, corrections added, and the factors of their correction; None: none has one.

    Args:
        linears: with each what it does to its rows.
        norm: weight of the norm before them, which is multiplied in.
    """
    rows, lefts, rights = [], [], []
    for linear, ordered in linears:
        weight, adapter = matrix_of(linear)
        left, right = (weight.new_zeros(len(weight), 0), weight.new_zeros(0, weight.shape[1])) if adapter is None else adapter.factors()
        rows.append(ordered(weight))
        lefts.append(ordered(left))
        rights.append(right)
    weight = torch.cat(rows) * norm
    if not any(len(right) for right in rights):
        return weight, (None, None)
    left, right = torch.block_diag(*lefts), torch.cat(rights) * norm
    return torch.addmm(weight, left.detach(), right.detach()), (left, right)


def interleaved(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of each head reordered to pairs (i, i + D/2), the memory layout of complex numbers. Products of query and key don't change."""
    return weight.view(len(weight) // size, 2, size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


class _Pick(Function):
    """index_select of distinct rows, so that the backward pass copies instead of adding."""

    @staticmethod
    def forward(ctx, x, places):
        ctx.save_for_backward(places)
        ctx.size = len(x)
        return x.index_select(0, places)

    @staticmethod
    def backward(ctx, grad):
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.size, grad.shape[-1]).index_copy_(0, places, grad), None


class _RotatedQkv(Function):
    """Normalize, project, rotate queries and keys, and put the rows in their places: [N, H] -> [P, heads * D].

    learns: keep what the backward pass needs.
    """

    @staticmethod
    def forward(ctx, hidden, weight, left, right, eps, layout, learns):
        sources = None if layout.copies is None else layout.copies.sources
        where = (layout.rotation, layout.places, layout.num_places, sources)
        placed, normalized, inverse = rotated_qkv(hidden, weight, eps, *where, learns, piece_rows(len(hidden), weight))
        ctx.save_for_backward(normalized, inverse, weight, left, right)
        ctx.layout = layout
        return placed

    @staticmethod
    def backward(ctx, grad):
        normalized, inverse, weight, *correction = ctx.saved_tensors
        rotation, places, copies = ctx.layout.rotation, ctx.layout.places, ctx.layout.copies
        rows = piece_rows(len(normalized), weight)
        if copies is not None:
            grad = F.embedding_bag(copies.places, grad, copies.starts, mode="sum")
        matrix = Matrix(weight, *correction, trains=ctx.needs_input_grad[1])
        where = (rotation, None if copies is not None else places, rows)
        hidden_grad = rotated_qkv_backward(grad, normalized, inverse, weight, *where, matrix)
        return hidden_grad, *matrix.gradients, None, None, None


class _SwiGlu(Function):
    """`swiglu`. The last nine arguments are weight, left and right of gate, up and down."""

    @staticmethod
    def forward(ctx, x, norm, eps, learns, *tensors):
        result, *kept = swiglu(x, norm, *_matrices(tensors), eps, learns, piece_rows(len(x), tensors[0]))
        ctx.save_for_backward(norm, *tensors, *kept)
        return result

    @staticmethod
    def backward(ctx, grad):
        norm, *saved = ctx.saved_tensors
        tensors, kept = saved[:9], saved[9:]
        matrices = _matrices(tensors, trains=ctx.needs_input_grad[4::3])
        x_grad, norm_grad = swiglu_backward(grad, norm, *matrices, *kept, piece_rows(len(grad), tensors[0]))
        return x_grad, norm_grad, None, None, *(gradient for matrix in matrices for gradient in matrix.gradients)


def _matrices(tensors: Sequence[torch.Tensor | None], trains: Sequence[bool | None] = (None, None, None)) -> list[Matrix]:
    return [Matrix(*tensors[3 * i : 3 * i + 3], trains=trains[i]) for i in range(3)]
