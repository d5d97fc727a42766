"""Computes attention in the blocks of a layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.autograd import Function
from torch.nn import functional as F

from rlhf_core.models.cpu.layers import widened
from rlhf_core.models.cpu.layout import Block, GroupBlock

# Logits of attention that are computed at once in bfloat16's attention, so that they stay in cache.
LOGITS = 1 << 20
HIDDEN = -1e30  # added to the logit of a hidden key; finite, so that a row of padding that sees nothing has no NaN


class AttentionHeads(NamedTuple):
    """The number of query heads and of key heads, their dimension, and the factor of their products."""

    queries: int
    keys: int
    size: int
    scale: float

    def split(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Return queries, keys and values, with keys and values repeated for the query heads that share them."""
        query, key, value = x.split([self.queries, self.keys, self.keys], dim=dim)
        shared = self.queries // self.keys
        return [query, *(x if shared == 1 else x.repeat_interleave(shared, dim) for x in (key, value))]


def attend(placed: torch.Tensor, block: Block | GroupBlock, heads: AttentionHeads) -> torch.Tensor:
    """Return the output of attention at the places of a block.

    Args:
        placed: [places, (queries + 2 keys) x size].
    Returns:
        [places, queries x size].
    """
    if isinstance(block, GroupBlock):
        return _attend_in_groups(widened(placed), block, heads).to(placed.dtype)
    if placed.dtype == torch.bfloat16:
        return _HalfAttention.apply(placed, block, heads)
    query, key, value = heads.split(placed.view(block.rows, block.width, -1, heads.size).transpose(1, 2), dim=1)
    causal = block.mask is None
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=block.mask, is_causal=causal, scale=heads.scale)
    return attended.transpose(1, 2).reshape(len(placed), -1)


def _attend_in_groups(placed: torch.Tensor, block: GroupBlock, heads: AttentionHeads) -> torch.Tensor:
    """Compute causal attention of the prefixes, and of each response to itself and its group's prefix."""
    groups, responses, width = block.groups, block.responses, block.response_width
    prefixes, rest = placed.split([block.prefix_places, len(placed) - block.prefix_places])
    by_head = rest.view(groups, responses, width, -1, heads.size).permute(3, 0, 1, 2, 4)
    query, key, value = (x.transpose(0, 1).reshape(groups * heads.queries, -1, heads.size) for x in heads.split(by_head, dim=0))
    of_prefix = prefixes.view(groups, block.prefix_width, -1, heads.size).transpose(1, 2)
    prefix_key, prefix_value = (x.reshape(len(query), -1, heads.size) for x in heads.split(of_prefix, dim=1)[1:])
    own = (-1, width, heads.size)  # [groups x heads x responses, width, size]
    mask = block.prefix_mask.expand(-1, heads.queries, -1, -1).flatten(0, 1)
    to_prefix = torch.baddbmm(mask, query, prefix_key.transpose(1, 2), alpha=heads.scale).view(-1, width, block.prefix_width)
    to_own = torch.baddbmm(_causal(width), query.reshape(own), key.reshape(own).transpose(1, 2), alpha=heads.scale)
    weights = torch.cat([to_prefix, to_own], dim=-1).softmax(-1)
    of_prefix, of_own = weights.split([block.prefix_width, width], dim=-1)
    attended = torch.bmm(of_prefix.reshape(len(query), -1, block.prefix_width), prefix_value)
    attended = torch.baddbmm(attended.view(own), of_own, value.reshape(own))
    attended = attended.view(groups, heads.queries, responses, width, heads.size).permute(0, 2, 3, 1, 4).reshape(len(rest), -1)
    prefixes = attend(prefixes, Block(groups, block.prefix_width, mask=None), heads)
    return torch.cat([prefixes, attended])


def _causal(width: int) -> torch.Tensor:
    """Return mask [width, width], 0 or -inf, to be added to logits."""
    return torch.full((width, width), -torch.inf).triu_(1)


class _Piece(NamedTuple):
    """The queries of some rows, and the keys up to `end` that they see."""

    rows: slice
    queries: slice
    end: int


class _HalfAttention(Function):
    """`attend` in bfloat16, with logits and softmax in float32 and other products in bfloat16.

    The weights are computed again in the backward pass.

    torch's own, with bfloat16, takes two to three times as long in the backward pass as with float32.
    """

    @staticmethod
    def forward(ctx, placed, block, heads):
        ctx.save_for_backward(placed)
        ctx.block, ctx.heads = block, heads
        query, key, value = _by_key_head(placed, block, heads)
        wide_key, value = _copied(key, torch.float32), _copied(value, value.dtype)
        attended = placed.new_empty(block.rows, block.width, heads.keys, heads.queries // heads.keys, heads.size)
        for piece in _pieces(block, heads):
            weights = _weights(query, wide_key, piece, block, heads)
            found = torch.bmm(weights.to(value.dtype), value[piece.rows, :, : piece.end].flatten(0, 1))
            attended[piece.rows, piece.queries] = _heads_last(found, query, piece)
        return attended.view(len(placed), -1)

    @staticmethod
    def backward(ctx, grad):
        (placed,), block, heads = ctx.saved_tensors, ctx.block, ctx.heads
        query, key, value = _by_key_head(placed, block, heads)
        grad = grad.view(block.rows, block.width, heads.keys, -1, heads.size).permute(0, 2, 3, 1, 4)
        wide_key, wide_value, key = _copied(key, torch.float32), _copied(value, torch.float32), _copied(key, key.dtype)
        placed_grad = torch.empty_like(placed).view(block.rows, block.width, -1, heads.size)
        query_grad = placed_grad[:, :, : heads.queries].unflatten(2, (heads.keys, -1))
        key_grad, value_grad = torch.zeros_like(wide_key), torch.zeros_like(wide_value)
        for piece in _pieces(block, heads):
            weights = _weights(query, wide_key, piece, block, heads)
            of_queries, of_grad = (x[piece.rows, :, :, piece.queries] for x in (query, grad))
            of_queries, narrow, wide = (
                _copied(x, dtype).flatten(0, 1).flatten(1, 2)
                for x, dtype in ((of_queries, placed.dtype), (of_grad, placed.dtype), (of_grad, torch.float32))
            )
            seen = (piece.rows, slice(None), slice(piece.end))
            weights_grad = torch.bmm(wide, wide_value[seen].flatten(0, 1).transpose(1, 2))
            logits_grad = torch._softmax_backward_data(weights_grad, weights, -1, torch.float32).mul_(heads.scale).to(placed.dtype)
            query_grad[piece.rows, piece.queries] = _heads_last(torch.bmm(logits_grad, key[seen].flatten(0, 1)), query, piece)
            like = (-1, heads.keys, piece.end, heads.size)
            key_grad[seen] += torch.bmm(logits_grad.transpose(1, 2), of_queries).view(like)
            value_grad[seen] += torch.bmm(weights.to(placed.dtype).transpose(1, 2), narrow).view(like)
        placed_grad[:, :, heads.queries : heads.queries + heads.keys] = key_grad.transpose(1, 2)
        placed_grad[:, :, heads.queries + heads.keys :] = value_grad.transpose(1, 2)
        return placed_grad.view(placed.shape), None, None


def _by_key_head(placed: torch.Tensor, block: Block, heads: AttentionHeads) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries as [rows, key heads, G, width, size], where G queries share a key head; keys and values as [rows, key heads, width,
    size].
    """
    query, key, value = placed.view(block.rows, block.width, -1, heads.size).split([heads.queries, heads.keys, heads.keys], dim=2)
    return query.unflatten(2, (heads.keys, -1)).permute(0, 2, 3, 1, 4), key.transpose(1, 2), value.transpose(1, 2)


def _copied(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype, memory_format=torch.contiguous_format)


def _pieces(block: Block, heads: AttentionHeads) -> Iterator[_Piece]:
    """Yield consecutive rows and queries. Causal attention leaves out the keys after a piece's last query."""
    queries = min(block.width, max(32, LOGITS // (heads.queries * block.width)))
    rows = max(1, LOGITS // (heads.queries * queries * block.width))
    for row in range(0, block.rows, rows):
        for query in range(0, block.width, queries):
            last = min(query + queries, block.width)
            yield _Piece(slice(row, min(row + rows, block.rows)), slice(query, last), last if block.mask is None else block.width)


def _weights(query: torch.Tensor, wide_key: torch.Tensor, piece: _Piece, block: Block, heads: AttentionHeads) -> torch.Tensor:
    """Return attention's weights [rows x key heads, G x queries, keys], in float32."""
    of_queries = query[piece.rows, :, :, piece.queries]
    wide = _copied(of_queries, torch.float32).mul_(heads.scale).flatten(0, 1).flatten(1, 2)
    logits = torch.bmm(wide, wide_key[piece.rows, :, : piece.end].flatten(0, 1).transpose(1, 2))
    shaped = logits.view(*of_queries.shape[:4], piece.end)
    if block.mask is None:
        own = shaped[..., piece.queries]
        own += _causal(own.shape[-1])
    else:
        shaped += block.mask[piece.rows, :, None, piece.queries].clamp(min=HIDDEN)
    return logits.softmax(-1)


def _heads_last(found: torch.Tensor, query: torch.Tensor, piece: _Piece) -> torch.Tensor:
    """Return [rows x key heads, G x queries, size] rearranged as [rows, queries, key heads, G, size]."""
    _, keys, group, _, size = query.shape
    return found.view(-1, keys, group, piece.queries.stop - piece.queries.start, size).permute(0, 3, 1, 2, 4)
