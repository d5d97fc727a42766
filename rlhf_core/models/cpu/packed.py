"""A packed forward pass of a Llama trunk: real tokens without padding, and the last layer only at the wanted positions.

Hugging Face's trunk computes whole rows, with padding, and every position of the last layer. Here everything but attention runs on the real
tokens laid end to end. The weights are the model's own, and the results are equal up to rounding, which in bfloat16 is
less than the trunk's own: hidden states between the layers are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from rlhf_core.models.cpu.attention import AttentionHeads, attend
from rlhf_core.models.cpu.layers import (
    Matrix,
    rotated_qkv,
    rotated_qkv_backward,
    swiglu,
    swiglu_backward,
    widened,
)
from rlhf_core.models.cpu.layout import Layout, layout_of
from rlhf_core.models.head import piece_rows
from rlhf_core.models.lora import matrix_of


def can_pack(trunk: nn.Module) -> bool:
    """Return whether `packed_states` computes what this trunk would.

    That holds for a plain Llama on a CPU, in float32, or in bfloat16 if the CPU multiplies that fast, with whole weights and maybe
    adapters.
    """
    if type(trunk) is not LlamaModel:
        return False
    config, weight = trunk.config, trunk.embed_tokens.weight
    plain = config.hidden_act == "silu" and config.rope_parameters["rope_type"] == "default" and not config.attention_dropout
    # ZeRO 3, which marks its weights with ds_id, gathers them only when their own module is called.
    whole = weight.device.type == "cpu" and not hasattr(weight, "ds_id")
    fast = weight.dtype == torch.float32 or (weight.dtype == torch.bfloat16 and multiplies_bfloat16())
    return plain and whole and fast and all(_takes(layer) for layer in trunk.layers)


@cache
def multiplies_bfloat16() -> bool:
    """Return whether the CPU has AMX, with which products in bfloat16 are several times as fast as in float32. With AVX-512's instructions
    for bfloat16 alone oneDNN's products are slower than MKL's in float32.
    """
    return torch.cpu._is_amx_tile_supported()


def _takes(layer: LlamaDecoderLayer) -> bool:
    """Return whether all matrices of a layer are plain, or frozen with adapters, and have one dtype."""
    found = [matrix_of(linear) for linear in _linears(layer)]
    if None in found:
        return False
    adapted = any(adapter is not None for _, adapter in found)
    norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
    factors = [factor for _, adapter in found if adapter is not None for factor in (adapter.a, adapter.b)]
    if len({tensor.dtype for tensor in (*norms, *factors, *(weight for weight, _ in found))}) > 1:
        return False
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
    """Return the trunk's last hidden states at the wanted positions.

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
    hidden = _embedded(layout.ids, trunk.embed_tokens)
    for number, layer in enumerate(trunk.layers, start=1):
        attended = _attention(layer, hidden, layout, trunk.config)
        if number == len(trunk.layers):
            attended, hidden = attended.index_select(0, layout.places[layout.wanted]), hidden.index_select(0, layout.wanted)
        else:
            attended = _Pick.apply(attended, layout.places)
        hidden = _projected(layer.self_attn.o_proj, hidden, attended)
        hidden = _mlp(layer, hidden)
    normalized = F.rms_norm(hidden, hidden.shape[-1:], widened(trunk.norm.weight), trunk.norm.variance_epsilon)
    return normalized.to(trunk.norm.weight.dtype)


def _embedded(ids: torch.Tensor, embedding: nn.Embedding) -> torch.Tensor:
    """Return the embeddings [N, H], in float32 at least."""
    if embedding.weight.dtype == torch.bfloat16:
        return _Embedding.apply(ids, embedding.weight, embedding.padding_idx)
    return F.embedding(ids, embedding.weight, embedding.padding_idx)


def _attention(layer: LlamaDecoderLayer, hidden: torch.Tensor, layout: Layout, config: Any) -> torch.Tensor:
    """Return the output of attention [P, heads * D], before the output projection."""
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
    """Return the weight of a linear layer, and the factors of its correction if it has one."""
    weight, adapter = matrix_of(linear)
    return weight, *((None, None) if adapter is None else adapter.factors())


def _projected(linear: nn.Module, added: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """Return the linear layer's output, plus `added`."""
    weight, adapter = matrix_of(linear)
    if added.dtype != weight.dtype:
        left, right = (None, None) if adapter is None else adapter.factors()
        output = added + inputs @ weight.t()
        return output if adapter is None else output + inputs @ right.t() @ left.t()
    output = torch.addmm(added, inputs, weight.t())
    return output if adapter is None else torch.addmm(output, inputs @ adapter.a.t(), adapter.b.t(), alpha=adapter.scale)


def _stacked(
    linears: list[tuple[nn.Module, Callable[[torch.Tensor], torch.Tensor]]], norm: torch.Tensor
) -> tuple[torch.Tensor, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """Return the matrix of several linear layers with the same input, and the factors of their correction; None for the factors if none has
    one.

    The correction is added to the matrix, except in bfloat16, where rounding the sum would lose a small one.

    Args:
        linears: each layer, with the function that reorders its rows.
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
    return weight if weight.dtype == torch.bfloat16 else torch.addmm(weight, left.detach(), right.detach()), (left, right)


def interleaved(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Return rows of each head reordered to pairs (i, i + D/2), the memory layout of complex numbers. Products of query and key don't
    change.
    """
    return weight.view(len(weight) // size, 2, size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


class _Pick(Function):
    """Selects distinct rows like index_select, but copies in the backward pass instead of adding."""

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
    """Normalizes, projects, rotates queries and keys, and puts the rows in their places: [N, H] -> [P, heads * D].

    learns: keep what the backward pass needs.
    """

    @staticmethod
    def forward(ctx, hidden, weight, left, right, eps, layout, learns):
        sources = None if layout.copies is None else layout.copies.sources
        where = (layout.rotation, layout.places, layout.num_places, sources)
        matrix = _multiplied(weight, left, right)
        placed, normalized, inverse = rotated_qkv(hidden, matrix, eps, *where, learns, piece_rows(len(hidden), weight))
        ctx.save_for_backward(normalized, inverse, weight, left, right)
        ctx.layout = layout
        return placed

    @staticmethod
    def backward(ctx, grad):
        normalized, inverse, weight, *correction = ctx.saved_tensors
        rotation, places, copies = ctx.layout.rotation, ctx.layout.places, ctx.layout.copies
        rows = piece_rows(len(normalized), weight)
        if copies is not None:
            grad = F.embedding_bag(copies.places, widened(grad), copies.starts, mode="sum")
        matrix = Matrix(weight, *correction, trains=ctx.needs_input_grad[1])
        where = (rotation, None if copies is not None else places, rows)
        hidden_grad = rotated_qkv_backward(grad, normalized, inverse, *where, _multiplied(weight, *correction), matrix)
        return hidden_grad, *matrix.gradients, None, None, None


def _multiplied(weight: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None) -> Matrix:
    """Return the result of `_stacked` as a matrix."""
    return Matrix(weight, left, right) if weight.dtype == torch.bfloat16 else Matrix(weight, None, None)


class _Embedding(Function):
    """Embeddings in float32 from a bfloat16 matrix, whose gradient is summed in float32 and rounded once."""

    @staticmethod
    def forward(ctx, ids, weight, padding_id):
        ctx.save_for_backward(ids)
        ctx.shape, ctx.dtype, ctx.padding_id = weight.shape, weight.dtype, padding_id
        return F.embedding(ids, weight).float()

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        found, numbers = ids.unique(return_inverse=True)
        total = grad.new_zeros(len(found), grad.shape[-1]).index_add_(0, numbers, grad)
        if ctx.padding_id is not None:
            total[found == ctx.padding_id] = 0.0
        return None, grad.new_zeros(ctx.shape, dtype=ctx.dtype).index_copy_(0, found, total.to(ctx.dtype)), None


class _SwiGlu(Function):
    """Applies `swiglu`. The last nine arguments are weight, left and right of gate, up and down."""

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
