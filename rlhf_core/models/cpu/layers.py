"""Forward and backward passes of a Llama's layers without autograd, a piece of rows at a time so that results stay in cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from rlhf_core.models.cpu.layout import Block, GroupBlock


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x), by row."""
    return x * _inverse_rms(x, eps)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normalized_backward(grad: torch.Tensor, normalized: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    projected = torch.linalg.vecdot(grad, normalized).div_(grad.shape[-1]).unsqueeze(-1)
    return torch.addcmul(grad, normalized, projected, value=-1.0).mul_(inverse)


class Correction(NamedTuple):
    """Factors of what adapters add to a matrix: left [out, r], right [r, in]."""

    left: torch.Tensor
    right: torch.Tensor


class Matrix:
    """A matrix [out, in] with its correction, and the sum of its gradients over pieces of rows: of the weight, or if that is frozen of the
    correction's factors.

    weight: without the correction, if there is one.
    trains: the weight's gradient is wanted; None: no gradient is.
    gradients: of weight, left and right; None where not wanted.
    """

    def __init__(self, weight: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None, *, trains: bool | None = None):
        self.weight = weight
        self.correction = None if left is None else Correction(left, right)
        wanted = (weight if trains else None, *((None, None) if trains is None else (left, right)))
        self.gradients = tuple(None if matrix is None else torch.zeros_like(matrix) for matrix in wanted)

    def product(self, inputs: torch.Tensor, *, added: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """[N, out] of the inputs [N, in], plus `added`."""
        matrix = self.weight.t()
        found = torch.mm(inputs, matrix, out=out) if added is None else torch.addmm(added, inputs, matrix, out=out)
        return found if self.correction is None else found.addmm_(inputs @ self.correction.right.t(), self.correction.left.t())

    def input_gradient(self, gradient: torch.Tensor, *, added: torch.Tensor | None = None) -> torch.Tensor:
        """[N, in], given that of the output; `added` is added to in place."""
        found = gradient @ self.weight if added is None else added.addmm_(gradient, self.weight)
        return found if self.correction is None else found.addmm_(gradient @ self.correction.left, self.correction.right)

    def add_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        """
        Args:
            gradient: [N, out], of the output for the inputs [N, in].
        """
        of_weight, of_left, of_right = self.gradients
        if of_weight is not None:
            of_weight.addmm_(gradient.t(), inputs)
        if self.correction is not None:  # gradient^T inputs, that of their product, is never made
            of_left.addmm_(gradient.t(), inputs @ self.correction.right.t())
            of_right.addmm_((gradient @ self.correction.left).t(), inputs)


def _rotated_part(projected: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Queries and keys [N, heads, D / 2] as complex numbers, a view."""
    _, heads, half = rotation.shape
    return torch.view_as_complex(projected[:, : heads * half * 2].view(-1, heads, half, 2))


def rotated_qkv(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    places: torch.Tensor,
    num_places: int,
    sources: torch.Tensor | None,
    learns: bool,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, in their places; if `learns`, also the normalized rows and 1 / rms.

    Args:
        sources: the row that each place copies; None: each row has one place.
    """
    count, size = hidden.shape
    normalized, inverse = hidden.new_empty([count if learns else 0, size]), hidden.new_empty([count, 1])
    # With copies, the rows are computed in their own order and copied to their places at the end.
    placed = hidden.new_zeros([num_places, len(weight)]) if sources is None else hidden.new_empty([count, len(weight)])
    for first in range(0, count, rows):
        last = min(first + rows, count)
        of_rows, scale = hidden[first:last], inverse[first:last]
        scale.copy_(_inverse_rms(of_rows, eps))
        of_piece = torch.mul(of_rows, scale, out=normalized[first:last]) if learns else of_rows * scale
        projected = of_piece @ weight.t()
        _rotated_part(projected, rotation).mul_(rotation[first:last])
        if sources is None:
            placed.index_copy_(0, places[first:last], projected)
        else:
            placed[first:last] = projected
    return placed if sources is None else placed.index_select(0, sources), normalized, inverse


def rotated_qkv_backward(
    grad: torch.Tensor,
    normalized: torch.Tensor,
    inverse: torch.Tensor,
    weight: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor | None,
    rows: int,
    matrix: Matrix,
) -> torch.Tensor:
    """The gradient of the hidden states.

    Args:
        weight: with its correction added.
        grad: of each place; if `places` is None, of each row, and overwritten.
        matrix: sums the gradients.
    """
    hidden_grad = torch.empty_like(normalized)
    for first in range(0, len(normalized), rows):
        last = min(first + rows, len(normalized))
        part = grad[first:last] if places is None else grad.index_select(0, places[first:last])
        _rotated_part(part, rotation).mul_(rotation[first:last].conj())
        hidden_grad[first:last] = _normalized_backward(part @ weight, normalized[first:last], inverse[first:last])
        matrix.add_gradient(part, normalized[first:last])
    return hidden_grad


def swiglu(
    x: torch.Tensor, norm: torch.Tensor, gate: Matrix, up: Matrix, down: Matrix, eps: float, learns: bool, rows: int
) -> tuple[torch.Tensor, ...]:
    """x + down(silu(gate(n)) * up(n)), n = norm * x / rms(x); if `learns`, also x / rms(x), 1 / rms, gate(n) and up(n).

    The weights are multiplied by as they are: a copy of them, as of several in one, costs as much as some hundred rows.
    """
    count, size = x.shape
    kept, width = count if learns else 0, len(gate.weight)
    normalized, inverse = x.new_empty([kept, size]), x.new_empty([count, 1])
    gates, ups = x.new_empty([kept, width]), x.new_empty([kept, width])
    result = torch.empty_like(x)
    for first in range(0, count, rows):
        last = min(first + rows, count)
        of_rows, scale = x[first:last], inverse[first:last]
        scale.copy_(_inverse_rms(of_rows, eps))
        inputs = (torch.mul(of_rows, scale, out=normalized[first:last]) if learns else of_rows * scale) * norm
        of_gate = gate.product(inputs, out=gates[first:last] if learns else None)
        of_up = up.product(inputs, out=ups[first:last] if learns else None)
        down.product(F.silu(of_gate).mul_(of_up), added=of_rows, out=result[first:last])
    return result, normalized, inverse, gates, ups


def swiglu_backward(
    grad: torch.Tensor,
    norm: torch.Tensor,
    gate: Matrix,
    up: Matrix,
    down: Matrix,
    normalized: torch.Tensor,
    inverse: torch.Tensor,
    gates: torch.Tensor,
    ups: torch.Tensor,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and of the norm's weight; the matrices sum their own."""
    x_grad, norm_grad = torch.empty_like(normalized), torch.zeros_like(norm)
    for first in range(0, len(grad), rows):
        last = min(first + rows, len(grad))
        of_piece, of_gate, of_up, of_rows = grad[first:last], gates[first:last], ups[first:last], normalized[first:last]
        silu, inner, inputs = F.silu(of_gate), down.input_gradient(of_piece), of_rows * norm
        down.add_gradient(of_piece, silu * of_up)
        up_grad = inner * silu
        gate_grad = torch.ops.aten.silu_backward(inner.mul_(of_up), of_gate)
        gate.add_gradient(gate_grad, inputs)
        up.add_gradient(up_grad, inputs)
        inputs_grad = up.input_gradient(up_grad, added=gate.input_gradient(gate_grad))
        norm_grad.add_((inputs_grad * of_rows).sum(0))
        x_grad[first:last] = _normalized_backward(inputs_grad.mul_(norm), of_rows, inverse[first:last]).add_(of_piece)
    return x_grad, norm_grad


# Attention in the blocks of a layout


class AttentionHeads(NamedTuple):
    """Number of query heads and of key heads, their dimension, and the factor of their products."""

    queries: int
    keys: int
    size: int
    scale: float

    def split(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Queries, keys and values, with keys and values repeated for the query heads that share them."""
        query, key, value = x.split([self.queries, self.keys, self.keys], dim=dim)
        shared = self.queries // self.keys
        return [query, *(x if shared == 1 else x.repeat_interleave(shared, dim) for x in (key, value))]


def attend(placed: torch.Tensor, block: Block | GroupBlock, heads: AttentionHeads) -> torch.Tensor:
    """The output of attention at a block's places.

    Args:
        placed: [places, (queries + 2 keys) x size].
    Returns:
        [places, queries x size].
    """
    if isinstance(block, GroupBlock):
        return _attend_in_groups(placed, block, heads)
    query, key, value = heads.split(placed.view(block.rows, block.width, -1, heads.size).transpose(1, 2), dim=1)
    causal = block.mask is None
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=block.mask, is_causal=causal, scale=heads.scale)
    return attended.transpose(1, 2).reshape(len(placed), -1)


def _attend_in_groups(placed: torch.Tensor, block: GroupBlock, heads: AttentionHeads) -> torch.Tensor:
    """Causal attention of the prefixes, and of each response to itself and its group's prefix."""
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
    """Mask [width, width], 0 or -inf, to be added to logits."""
    return torch.full((width, width), -torch.inf).triu_(1)
