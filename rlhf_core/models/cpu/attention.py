"""Attention in the blocks of a layout."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from rlhf_core.models.cpu.layout import Block, GroupBlock


class AttentionHeads(NamedTuple):
    """How many heads ask and how many are asked, each of how many numbers, and what their products are multiplied by."""

    queries: int
    keys: int
    size: int
    scale: float

    def split(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Queries, keys and values of all heads, as many of each: keys and values repeat where heads share them."""
        query, key, value = x.split([self.queries, self.keys, self.keys], dim=dim)
        shared = self.queries // self.keys
        return [query, *(x if shared == 1 else x.repeat_interleave(shared, dim) for x in (key, value))]


def attend(placed: torch.Tensor, block: Block | GroupBlock, heads: AttentionHeads) -> torch.Tensor:
    """What the heads say at a block's places.

    Args:
        placed: [places, (queries + 2 keys) x size].
    Returns:
        [places, queries x size].
    """
    if isinstance(block, GroupBlock):
        return _attend_in_groups(placed, block, heads)
    query, key, value = heads.split(placed.view(block.rows, block.width, -1, heads.size).transpose(1, 2), dim=1)
    causal = block.mask is None
    said = F.scaled_dot_product_attention(query, key, value, attn_mask=block.mask, is_causal=causal, scale=heads.scale)
    return said.transpose(1, 2).reshape(len(placed), -1)


def _attend_in_groups(placed: torch.Tensor, block: GroupBlock, heads: AttentionHeads) -> torch.Tensor:
    """Prefixes causally; of a group's responses all tokens ask their prefix at once, and those of each response one another."""
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
    said = torch.bmm(of_prefix.reshape(len(query), -1, block.prefix_width), prefix_value)
    said = torch.baddbmm(said.view(own), of_own, value.reshape(own))
    said = said.view(groups, heads.queries, responses, width, heads.size).permute(0, 2, 3, 1, 4).reshape(len(rest), -1)
    prefixes = attend(prefixes, Block(groups, block.prefix_width, mask=None), heads)
    return torch.cat([prefixes, said])


def _causal(width: int) -> torch.Tensor:
    """[width, width] float, 0 where a position sees another and -inf elsewhere."""
    return torch.full((width, width), -torch.inf).triu_(1)
