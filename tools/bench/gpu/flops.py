"""Counts floating-point operations of a training step, and their share of a GPU's peak."""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_core.planning.shape import ModelShape

# FLOP/s of dense bfloat16 matrix products by the device's exact name; other boards of the same chip differ. The vendor's
# pages give twice as much, for sparse matrices: https://www.nvidia.com/en-us/data-center/h100/, .../h200/ and .../a100/.
PEAKS: dict[str, float] = {
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H200": 989.4e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}


@dataclass(frozen=True)
class Passed:
    """The tokens that one optimizer step's forward passes put through a model.

    tokens: tokens without padding. padded: tokens with padding. sequences: tokens of all sequences, with a shared prompt counted in each.
    visible: pairs of a token and one it attends to. predicted: tokens with logits.
    """

    tokens: int
    padded: int
    sequences: int
    visible: float
    predicted: int

    def __add__(self, other: Passed) -> Passed:
        return Passed(*(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def step_flops(shape: ModelShape, passed: Passed, *, adapters: bool = False) -> float:
    """Return the model FLOP of one optimizer step, forward and backward without recomputation.

        forward = 2 M tokens + 4 layers width visible + 2 E predicted         M, E: matrix elements of trunk and head
        full training: 3 forward;  adapters: the frozen matrices have no weight gradient, 2 in place of 3 for M and E

    Padding is no model FLOP. Adapters' own products and the optimizer are left out: less than 1%.
    Source: Kaplan et al. 2020, https://arxiv.org/abs/2001.08361, section 2.1; without recomputation as Chowdhery et al. 2022,
    https://arxiv.org/abs/2204.02311, appendix B
    """
    matrices = 2 * shape.active_trunk * passed.tokens + 2 * shape.embedding * passed.predicted
    attention = 4 * shape.layers * shape.attention_width * passed.visible
    return (2 if adapters else 3) * matrices + 3 * attention


def utilization(flops: float, seconds: float, device: str) -> float | None:
    """Return the model FLOPs utilization in percent: FLOP per second over the device's peak; None if the peak is unknown.

    Source: Chowdhery et al. 2022, https://arxiv.org/abs/2204.02311, section 4.1
    """
    peak = PEAKS.get(device)
    return None if peak is None else 100 * flops / seconds / peak
