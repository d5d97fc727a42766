"""A Llama trunk on the tokens that count: without padding, and its last layer only where its output is asked for.

Hugging Face's trunk computes whole rows, padding included, and every position of the last layer. Here all but attention runs on
the real tokens laid end to end, and what follows the last attention runs on the wanted positions alone. The weights are the
model's own, and the results are its results up to rounding. Used on a CPU in float32, where it was measured; any other model, device or
precision takes the model's own forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from transformers import LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

# Pairs of query and key, for each place, that copies of a prefix must spare. Measured: 100 cost 4% of the time, 300 save 30%.
COPYING_PAYS = 128
NARROWER = 0.75  # a block of attention takes rows down to this part of its longest one's length


@dataclass(frozen=True)
class Block:
    """Rows that attend together, padded to the longest of them.

    mask: [rows, 1, width, width] float, 0 or -inf, added to attention's logits; None: causal.
    """

    rows: int
    width: int
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Copies:
    """Tokens with several places.

    sources: [P] int64, the token at each place; any where there is padding.
    places: [C] int64, the places of all tokens, token after token.    starts: [N] int64, where in it each token's begin.
    """

    sources: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """Where the N real tokens of a batch are in attention's blocks, which have P places in all.

    ids: [N] int64, of the real tokens, row after row, the longest row first.
    places: [N] int64, of each real token among the places; its first one where it has several.
    copies: where a prefix has a place in each of its branches' sequences; None: each token has one place.
    wanted: [M] int64, of each wanted position among the real tokens; they may repeat.
    rotation: [N, query and key heads, D / 2] complex, of the rotary embedding.
    """

    blocks: list[Block]
    ids: torch.Tensor
    places: torch.Tensor
    copies: Copies | None
    wanted: torch.Tensor
    rotation: torch.Tensor

    @property
    def num_places(self) -> int:
        return sum(block.rows * block.width for block in self.blocks)


def can_pack(trunk: nn.Module) -> bool:
    """Whether `packed_states` computes what this trunk would: a plain Llama, float32, on a CPU, whole weights, no adapters."""
    if type(trunk) is not LlamaModel:
        return False
    config, weight = trunk.config, trunk.embed_tokens.weight
    plain = config.hidden_act == "silu" and config.rope_parameters["rope_type"] == "default" and not config.attention_dropout
    # ZeRO 3 gathers weights when their own module is called, which packed_states doesn't do; it numbers those that it has in its care.
    whole = weight.device.type == "cpu" and weight.dtype == torch.float32 and not hasattr(weight, "ds_id")
    return plain and whole and all(type(m) is nn.Linear and m.bias is None for layer in trunk.layers for m in _linears(layer))


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
        input_ids: [B, T]; tokens after a row's last wanted position are not looked at: none that count can see them.
        rows, positions: [M] int64, the wanted positions.
        position_ids: [B, T]; None: 0 to T - 1.
        visible: [B, 1, T, T] bool; None: all before, and itself.
        segments: [B, T] int64, where `visible` says no more than that rows have a prefix (0) and branches (1, 2, ...); None: it may say
            anything.
    Returns:
        [M, H].
    """
    layout = _layout(trunk, input_ids, rows, positions, position_ids, visible, segments)
    hidden = F.embedding(layout.ids, trunk.embed_tokens.weight, trunk.embed_tokens.padding_idx)
    for number, layer in enumerate(trunk.layers, start=1):
        attended = _attention(layer, hidden, layout, trunk.config)
        if number == len(trunk.layers):
            attended, hidden = attended.index_select(0, layout.places[layout.wanted]), hidden.index_select(0, layout.wanted)
        else:
            attended = _Pick.apply(attended, layout.places)
        hidden = torch.addmm(hidden, attended, layer.self_attn.o_proj.weight.t())
        hidden = _mlp(layer, hidden)
    return F.rms_norm(hidden, hidden.shape[-1:], trunk.norm.weight, trunk.norm.variance_epsilon)


def _layout(
    trunk: LlamaModel,
    input_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    position_ids: torch.Tensor | None,
    visible: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Layout:
    lengths = input_ids.new_zeros(len(input_ids)).scatter_reduce(0, rows, positions + 1, "amax")
    lengths[0].clamp_(min=1)  # with nothing wanted at all there is still a gradient, of zeros, for each weight: other ranks wait for it
    order = lengths.argsort(descending=True, stable=True)
    ordered = lengths[order]
    real = torch.arange(input_ids.shape[1]) < ordered[:, None]
    sequences = None if segments is None else _sequences(segments[order], real)
    if sequences is not None and _copying_pays(sequences.lengths, ordered):
        blocks, places, copies = _whole_sequences(sequences, num_tokens=int(ordered.sum()))
    else:
        (blocks, places), copies = _rows(ordered, order, visible), None
    if position_ids is None:
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    starts = torch.empty_like(lengths)
    starts[order] = ordered.cumsum(0) - ordered
    return Layout(blocks, input_ids[order][real], places, copies, starts[rows] + positions, _rotation(trunk, position_ids[order][real]))


def _rows(ordered: torch.Tensor, order: torch.Tensor, visible: torch.Tensor | None) -> tuple[list[Block], torch.Tensor]:
    """Blocks of the rows as they are, and the place of each token."""
    blocks, places, first = [], [], 0
    for count, width in _cuts(ordered.tolist()):
        real = torch.arange(width) < ordered[first : first + count, None]
        places.append(real.flatten().nonzero().squeeze(-1) + sum(b.rows * b.width for b in blocks))
        blocks.append(Block(count, width, None if visible is None else _added(visible[order[first : first + count], :, :width, :width])))
        first += count
    return blocks, torch.cat(places)


@dataclass(frozen=True)
class Sequences:
    """Each branch with its row's prefix before it, the longest first; [S] int64 each. A prefix that has lost its branches is one too."""

    prefix_starts: torch.Tensor
    prefix_lengths: torch.Tensor
    branch_starts: torch.Tensor
    branch_lengths: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        return self.prefix_lengths + self.branch_lengths


def _sequences(segments: torch.Tensor, real: torch.Tensor) -> Sequences:
    """Of the real tokens [B, T], numbered row after row."""
    row_of, _ = real.nonzero(as_tuple=True)
    runs, counts = torch.unique_consecutive(torch.stack([row_of, segments[real]]), dim=1, return_counts=True)
    starts, (rows, numbers) = counts.cumsum(0) - counts, runs
    is_prefix = numbers == 0
    prefix_starts, prefix_lengths, branches = (torch.zeros(len(real), dtype=torch.long) for _ in range(3))
    prefix_starts[rows[is_prefix]], prefix_lengths[rows[is_prefix]] = starts[is_prefix], counts[is_prefix]
    branches.index_add_(0, rows[~is_prefix], torch.ones_like(rows[~is_prefix]))
    alone = is_prefix & (branches[rows] == 0)
    chosen = ~is_prefix | alone
    rows, starts, lengths = rows[chosen], starts[chosen], counts.where(~is_prefix, 0)[chosen]
    order = (prefix_lengths[rows] + lengths).argsort(descending=True, stable=True)
    rows = rows[order]
    return Sequences(prefix_starts[rows], prefix_lengths[rows], starts[order], lengths[order])


def _copying_pays(sequences: torch.Tensor, rows: torch.Tensor) -> bool:
    """Whether attention within sequences is worth their copies, rather than attention within rows; both by their lengths."""
    return int((rows**2).sum() - (sequences**2).sum()) > COPYING_PAYS * int(sequences.sum())


def _whole_sequences(sequences: Sequences, *, num_tokens: int) -> tuple[list[Block], torch.Tensor, Copies]:
    """Blocks in which each branch follows a copy of its prefix, so that attention is causal: short branches would see little of a row of
    many, and a mask costs what it hides.
    """
    blocks, sources, real, first = [], [], [], 0
    for count, width in _cuts(sequences.lengths.tolist()):
        columns, these = torch.arange(width), slice(first, first + count)
        prefix_length = sequences.prefix_lengths[these, None]
        of_prefix = sequences.prefix_starts[these, None] + columns
        of_branch = sequences.branch_starts[these, None] + columns - prefix_length
        real.append((columns < sequences.lengths[these, None]).flatten())
        sources.append(of_prefix.where(columns < prefix_length, of_branch).flatten())
        blocks.append(Block(count, width, None))
        first += count
    is_real = torch.cat(real)
    source = torch.cat(sources).where(is_real, 0)
    places = is_real.nonzero().squeeze(-1)
    token_of = source[places]
    places = places[token_of.argsort(stable=True)]
    counts = token_of.bincount(minlength=num_tokens)
    starts = counts.cumsum(0) - counts
    return blocks, places[starts], Copies(source, places, starts)


def _cuts(lengths: list[int]) -> list[tuple[int, int]]:
    """Number of rows and width of each block, for rows in order of falling length. Rows without a token are left out."""
    cuts: list[tuple[int, int]] = []
    for length in lengths:
        if length and cuts and length >= NARROWER * cuts[-1][1]:
            cuts[-1] = (cuts[-1][0] + 1, cuts[-1][1])
        elif length:
            cuts.append((1, length))
    return cuts


def _added(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, -torch.inf)


def _rotation(trunk: LlamaModel, position_ids: torch.Tensor) -> torch.Tensor:
    angles = position_ids.float()[:, None] * trunk.rotary_emb.inv_freq
    heads = trunk.config.num_attention_heads + trunk.config.num_key_value_heads
    return torch.polar(torch.ones_like(angles), angles)[:, None].expand(-1, heads, -1).contiguous()


def _attention(layer: LlamaDecoderLayer, hidden: torch.Tensor, layout: Layout, config: Any) -> torch.Tensor:
    """What the heads say [P, heads * D], before the output projection."""
    attention, norm = layer.self_attn, layer.input_layernorm
    size = attention.head_dim
    weight = torch.cat([_interleaved(attention.q_proj.weight, size), _interleaved(attention.k_proj.weight, size), attention.v_proj.weight])
    placed = _RotatedQkv.apply(hidden, weight * norm.weight, norm.variance_epsilon, layout)
    attended = []
    for block, part in zip(layout.blocks, placed.split([b.rows * b.width for b in layout.blocks]), strict=True):
        heads = part.view(block.rows, block.width, -1, size).transpose(1, 2)
        query, key, value = heads.split([config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads], dim=1)
        groups = config.num_attention_heads // config.num_key_value_heads
        if groups > 1:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        causal = block.mask is None
        said = F.scaled_dot_product_attention(query, key, value, attn_mask=block.mask, is_causal=causal, scale=attention.scaling)
        attended.append(said.transpose(1, 2).reshape(block.rows * block.width, -1))
    return torch.cat(attended)


def _mlp(layer: LlamaDecoderLayer, hidden: torch.Tensor) -> torch.Tensor:
    norm, mlp = layer.post_attention_layernorm, layer.mlp
    weight = torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]) * norm.weight
    return _SwiGlu.apply(hidden, weight, mlp.down_proj.weight, norm.variance_epsilon)


def _interleaved(weight: torch.Tensor, size: int) -> torch.Tensor:
    """Rows of each head in pairs (i, i + D/2), as complex numbers lie in memory. Done to query and key alike, it changes no product."""
    return weight.view(-1, 2, size // 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


def _normalized(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x / rms(x) and 1 / rms(x), by row."""
    inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return x * inverse, inverse


def _normalized_backward(grad: torch.Tensor, normalized: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    projected = torch.linalg.vecdot(grad, normalized).div_(grad.shape[-1]).unsqueeze(-1)
    return torch.addcmul(grad, normalized, projected, value=-1).mul_(inverse)


class _Pick(Function):
    """Rows of a matrix, each at most once: unlike index_select's, the backward pass copies and doesn't add."""

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
    """Normalize, project, rotate queries and keys, and put the rows in their places: [N, H] -> [P, heads * D]."""

    @staticmethod
    def forward(ctx, hidden, weight, eps, layout):
        normalized, inverse = _normalized(hidden, eps)
        projected = normalized @ weight.t()
        _rotated_part(projected, layout).mul_(layout.rotation)
        ctx.save_for_backward(normalized, inverse, weight)
        ctx.layout = layout
        if layout.copies is not None:
            return projected.index_select(0, layout.copies.sources)
        return projected.new_zeros(layout.num_places, len(weight)).index_copy_(0, layout.places, projected)

    @staticmethod
    def backward(ctx, grad):
        normalized, inverse, weight = ctx.saved_tensors
        copies = ctx.layout.copies
        if copies is None:
            grad = grad.index_select(0, ctx.layout.places)
        else:
            grad = F.embedding_bag(copies.places, grad, copies.starts, mode="sum")
        _rotated_part(grad, ctx.layout).mul_(ctx.layout.rotation.conj())
        return _normalized_backward(grad @ weight, normalized, inverse), grad.t() @ normalized, None, None


def _rotated_part(projected: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Queries and keys [N, heads, D / 2] as complex numbers, a view."""
    _, heads, half = layout.rotation.shape
    return torch.view_as_complex(projected[:, : heads * half * 2].view(-1, heads, half, 2))


class _SwiGlu(Function):
    """x + down(silu(gate(n)) * up(n)), n = x / rms(x); gate and up are the halves of one weight."""

    @staticmethod
    def forward(ctx, x, gate_up, down, eps):
        normalized, inverse = _normalized(x, eps)
        gate, up = (normalized @ gate_up.t()).chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = sigmoid * gate
        ctx.save_for_backward(normalized, inverse, gate_up, down, silu, sigmoid, up)
        return torch.addmm(x, silu * up, down.t())

    @staticmethod
    def backward(ctx, grad):
        normalized, inverse, gate_up, down, silu, sigmoid, up = ctx.saved_tensors
        inner = grad @ down
        halves = inner.new_empty(len(inner), len(gate_up))
        gate_grad, up_grad = halves.chunk(2, dim=-1)
        torch.mul(inner, silu, out=up_grad)
        slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)  # of silu
        torch.mul(inner.mul_(up), slope, out=gate_grad)
        down_grad = grad.t() @ (silu * up)
        return grad + _normalized_backward(halves @ gate_up, normalized, inverse), halves.t() @ normalized, down_grad, None
