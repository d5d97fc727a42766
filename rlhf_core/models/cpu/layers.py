"""Forward and backward passes of a Llama's layers without autograd, on a piece of rows at a time so that results stay in cache.

With bfloat16 weights the matrices are multiplied in bfloat16, and the products are bfloat16. Hidden states between the layers, norms,
rotation and attention's softmax are float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the rows divided by their root mean square: x / rms(x)."""
    return x * _inverse_rms(x, eps)


def _inverse_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def _normalized_backward(grad: torch.Tensor, normalized: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    projected = torch.linalg.vecdot(grad, normalized).div_(grad.shape[-1]).unsqueeze(-1)
    return torch.addcmul(grad, normalized, projected, value=-1.0).mul_(inverse)


class Correction(NamedTuple):
    """Factors of the correction that adapters add to a matrix: left [out, r], right [r, in]."""

    left: torch.Tensor
    right: torch.Tensor


class Matrix:
    """A matrix [out, in] with its correction, and its gradient summed over pieces of rows.

    The gradient is that of the weight, or of the correction's factors if the weight is frozen.

    weight: the matrix without the correction, if there is one.
    trains: whether the weight's gradient is wanted; None: no gradient is wanted.
    gradients: gradients of weight, left and right; None for one that isn't wanted.
    """

    def __init__(self, weight: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None, *, trains: bool | None = None):
        self.weight = weight
        self.correction = None if left is None else Correction(left, right)
        self._wanted = (weight if trains else None, *((None, None) if trains is None else (left, right)))
        self._sums = [None if matrix is None or _is_half(matrix) else torch.zeros_like(matrix) for matrix in self._wanted]

    @property
    def gradients(self) -> tuple[torch.Tensor | None, ...]:
        pairs = zip(self._wanted, self._sums, strict=True)
        return tuple(None if m is None else torch.zeros_like(m) if total is None else total.to(m.dtype) for m, total in pairs)

    def product(self, inputs: torch.Tensor, *, added: torch.Tensor | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
        """Return the product [N, out] of the inputs [N, in], plus `added`, whose dtype may be wider and is then that of the sum."""
        if added is not None and added.dtype != inputs.dtype:
            return torch.add(added, self.product(inputs), out=out)
        matrix = self.weight.t()
        found = torch.mm(inputs, matrix, out=out) if added is None else torch.addmm(added, inputs, matrix, out=out)
        return found if self.correction is None else found.addmm_(inputs @ self.correction.right.t(), self.correction.left.t())

    def input_gradient(self, gradient: torch.Tensor, *, added: torch.Tensor | None = None) -> torch.Tensor:
        """Return the gradient [N, in] of the inputs, given that of the output, added in place to `added` if that is given."""
        found = gradient @ self.weight if added is None else added.addmm_(gradient, self.weight)
        return found if self.correction is None else found.addmm_(gradient @ self.correction.left, self.correction.right)

    def add_gradient(self, gradient: torch.Tensor, inputs: torch.Tensor) -> None:
        """Add the gradient of a piece of rows.

        Args:
            gradient: [N, out], the gradient of the output for the inputs [N, in].
        """
        if self._wanted[0] is not None:
            self._add(0, gradient.t(), inputs)
        if self.correction is not None:  # gradient^T inputs, that of their product, is never made
            self._add(1, gradient.t(), inputs @ self.correction.right.t())
            self._add(2, (gradient @ self.correction.left).t(), inputs)

    def _add(self, number: int, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add a product to a gradient in float32, unless it is the only one and not in float32 to begin with."""
        if not _is_half(left):
            self._sums[number].addmm_(left, right)
        else:
            product, total = left @ right, self._sums[number]
            self._sums[number] = product if total is None else total.float().add_(product)


def _is_half(x: torch.Tensor) -> bool:
    return x.dtype == torch.bfloat16


def widened(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor in float32 at least: unchanged if it is already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _scaled(rows: torch.Tensor, scale: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
    """Return rows * scale in the dtype of the rows; also written to `kept`, which may be narrower."""
    if kept is None or kept.dtype == rows.dtype:
        return torch.mul(rows, scale, out=kept)
    scaled = rows * scale
    kept.copy_(scaled)
    return scaled


def _rotated_part(projected: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return a view of queries and keys as complex numbers [N, heads, D / 2], of float32 at least."""
    _, heads, half = rotation.shape
    return torch.view_as_complex(projected[:, : heads * half * 2].view(-1, heads, half, 2))


def rotated_qkv(
    hidden: torch.Tensor,
    matrix: Matrix,
    eps: float,
    rotation: torch.Tensor,
    places: torch.Tensor,
    num_places: int,
    sources: torch.Tensor | None,
    learns: bool,
    rows: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rotated queries and keys, and values, in their places; if `learns`, also the normalized rows and 1 / rms.

    Args:
        sources: the row that each place copies; None: each row has one place.
    Returns:
        [places, out], [N, H] and [N, 1]; the first two have the matrix's dtype.
    """
    (count, size), weight = hidden.shape, matrix.weight
    normalized, inverse = weight.new_empty([count if learns else 0, size]), hidden.new_empty([count, 1])
    # With copies, the rows are computed in their own order and copied to their places at the end.
    placed = weight.new_zeros([num_places, len(weight)]) if sources is None else weight.new_empty([count, len(weight)])
    for first in range(0, count, rows):
        last = min(first + rows, count)
        of_rows, scale = hidden[first:last], inverse[first:last]
        scale.copy_(_inverse_rms(of_rows, eps))
        of_piece = _scaled(of_rows, scale, normalized[first:last] if learns else None)
        projected = widened(matrix.product(of_piece.to(weight.dtype)))
        _rotated_part(projected, rotation).mul_(rotation[first:last])
        if sources is None:
            placed.index_copy_(0, places[first:last], projected.to(weight.dtype))
        else:
            placed[first:last] = projected
    return placed if sources is None else placed.index_select(0, sources), normalized, inverse


def rotated_qkv_backward(
    grad: torch.Tensor,
    normalized: torch.Tensor,
    inverse: torch.Tensor,
    rotation: torch.Tensor,
    places: torch.Tensor | None,
    rows: int,
    multiplied: Matrix,
    matrix: Matrix,
) -> torch.Tensor:
    """Return the gradient of the hidden states in `rotated_qkv`.

    Args:
        grad: gradient of each place; if `places` is None, of each row, and then it is overwritten.
        multiplied: the matrix of the forward pass.
        matrix: the matrix that sums the gradients.
    """
    hidden_grad = torch.empty(normalized.shape, dtype=inverse.dtype)
    for first in range(0, len(normalized), rows):
        last = min(first + rows, len(normalized))
        part = widened(grad[first:last] if places is None else grad.index_select(0, places[first:last]))
        _rotated_part(part, rotation).mul_(rotation[first:last].conj())
        part = part.to(normalized.dtype)
        of_rows = normalized[first:last]
        hidden_grad[first:last] = _normalized_backward(widened(multiplied.input_gradient(part)), widened(of_rows), inverse[first:last])
        matrix.add_gradient(part, of_rows)
    return hidden_grad


def swiglu(
    x: torch.Tensor, norm: torch.Tensor, gate: Matrix, up: Matrix, down: Matrix, eps: float, learns: bool, rows: int
) -> tuple[torch.Tensor, ...]:
    """Return x + down(silu(gate(n)) * up(n)), n = norm * x / rms(x); if `learns`, also x / rms(x), 1 / rms, gate(n) and up(n).

    The weights are used as they are: joining them in one matrix would need a copy, which costs as much as some hundred rows.
    """
    count, size = x.shape
    kept, width, dtype = count if learns else 0, len(gate.weight), norm.dtype
    normalized, inverse = norm.new_empty([kept, size]), x.new_empty([count, 1])
    gates, ups = norm.new_empty([kept, width]), norm.new_empty([kept, width])
    result, norm = torch.empty_like(x), widened(norm)
    for first in range(0, count, rows):
        last = min(first + rows, count)
        of_rows, scale = x[first:last], inverse[first:last]
        scale.copy_(_inverse_rms(of_rows, eps))
        inputs = (_scaled(of_rows, scale, normalized[first:last] if learns else None) * norm).to(dtype)
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
    """Return the gradients of x and of the norm's weight in `swiglu`; the matrices sum their own gradients."""
    x_grad, dtype, norm = torch.empty_like(grad), norm.dtype, widened(norm)
    norm_grad = torch.zeros_like(norm)
    for first in range(0, len(grad), rows):
        last = min(first + rows, len(grad))
        of_piece, of_gate, of_up, of_rows = grad[first:last], gates[first:last], ups[first:last], widened(normalized[first:last])
        narrow, inputs = of_piece.to(dtype), (of_rows * norm).to(dtype)
        silu, inner = F.silu(of_gate), down.input_gradient(narrow)
        down.add_gradient(narrow, silu * of_up)
        up_grad = inner * silu
        gate_grad = torch.ops.aten.silu_backward(inner.mul_(of_up), of_gate)
        gate.add_gradient(gate_grad, inputs)
        up.add_gradient(up_grad, inputs)
        inputs_grad = widened(up.input_gradient(up_grad, added=gate.input_gradient(gate_grad)))
        norm_grad.add_((inputs_grad * of_rows).sum(0))
        x_grad[first:last] = _normalized_backward(inputs_grad.mul_(norm), of_rows, inverse[first:last]).add_(of_piece)
    return x_grad, norm_grad.to(dtype)
