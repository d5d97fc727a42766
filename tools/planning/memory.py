"""Bytes on one GPU: training states and activations, frozen models, and rollout engines."""

from __future__ import annotations

from typing import NamedTuple

from tools.planning.shape import ModelShape


class States(NamedTuple):
    """Bytes per GPU, and on the host for each GPU."""

    weights: float
    gradients: float
    optimizer: float
    host: float


# (weights, gradients, optimizer) in bytes per parameter. bfloat16: Adam keeps float32 weights and two moments, 4 + 4 + 4.
BYTES_PER_PARAMETER: dict[str, tuple[int, int, int]] = {"bfloat16": (2, 2, 12), "float32": (4, 4, 8)}


def element_bytes(dtype: str) -> int:
    """Bytes of one weight or activation."""
    return BYTES_PER_PARAMETER[dtype][0]


def training_states(parameters: int, *, ranks: int, zero_stage: int, offload: bool = False, dtype: str = "bfloat16") -> States:
    """Weights, gradients and Adam's state: 2 + 2 + 12 bytes per parameter, each split over the ranks from its ZeRO stage on.

    Stage 1 splits the optimizer's state, 2 the gradients too, 3 the weights too.
    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3.1 and figure 1
    Args:
        offload: the optimizer's state is on the host.
    """
    weights, gradients, optimizer = (
        parameters * size / (ranks if zero_stage >= stage else 1) for size, stage in zip(BYTES_PER_PARAMETER[dtype], (3, 2, 1), strict=True)
    )
    return States(weights, gradients, 0.0 if offload else optimizer, optimizer if offload else 0.0)


def frozen_weights(parameters: int, *, ranks: int, zero_stage: int, dtype: str = "bfloat16") -> float:
    """Bytes per GPU of a model without training, which ZeRO 3 splits over the ranks."""
    return parameters * element_bytes(dtype) / (ranks if zero_stage >= 3 else 1)


def layer_activations(shape: ModelShape, tokens: int, dtype: str = "bfloat16") -> float:
    """Bytes that one layer stores for its backward pass.

    Per token: inputs and outputs of both norms (4 x hidden), queries and attention's output (2 x attention width), keys and values
    (2 x kv width), and of each active expert gate, up, its activation and their product (4 x intermediate). Attention scores
    aren't stored (flash attention recomputes them), and there is no dropout.
    Source: the count of Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.1, adapted from GPT
    """
    elements = 4 * shape.hidden + 2 * shape.attention_width + 2 * shape.kv_width + 4 * shape.active_experts * shape.intermediate
    return tokens * elements * element_bytes(dtype)


def activations(shape: ModelShape, tokens: int, *, checkpointing: bool, dtype: str = "bfloat16") -> float:
    """Bytes of a micro-batch's forward and backward pass.

    With checkpointing each layer stores only its input, and one layer at a time is recomputed.
    Source: Korthikanti et al. 2022, section 5 (full recomputation)
    """
    one = layer_activations(shape, tokens, dtype)
    return shape.layers * tokens * shape.hidden * element_bytes(dtype) + one if checkpointing else shape.layers * one


def forward_activations(shape: ModelShape, tokens: int, dtype: str = "bfloat16") -> float:
    """Bytes of a forward pass without a backward pass: one layer's activations."""
    return layer_activations(shape, tokens, dtype)


def logits(shape: ModelShape, tokens: int, *, training: bool, dtype: str = "bfloat16") -> float:
    """Bytes of the logits [tokens, vocab]: the head's output, its float32 copy for the log-softmax, and in training the gradient.

    An upper bound: this pipeline only computes logits at response positions.
    """
    return tokens * shape.vocab * (element_bytes(dtype) + (8 if training else 4))


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bfloat16") -> float:
    """Bytes of keys and values of one token, in all layers.

    Source: Kwon et al. 2023 (vLLM), https://arxiv.org/abs/2309.06180, section 3
    """
    return 2 * shape.layers * shape.kv_width * element_bytes(dtype)


def kv_capacity(shape: ModelShape, memory: float, *, tensor_parallel: int, dtype: str = "bfloat16") -> float:
    """Number of tokens whose keys and values fit into an engine.

    Args:
        memory: bytes of each of its GPUs, weights included.
    """
    weights = shape.parameters * element_bytes(dtype) / tensor_parallel
    return max(0.0, memory - weights) * tensor_parallel / kv_bytes_per_token(shape, dtype)
