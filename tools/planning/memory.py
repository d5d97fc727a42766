"""Bytes on one GPU: of training's states and activations, of a frozen model, and of a rollout engine."""

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
    """Bytes of a number in the format that weights and activations have."""
    return BYTES_PER_PARAMETER[dtype][0]


def training_states(parameters: int, *, ranks: int, zero_stage: int, offload: bool = False, dtype: str = "bfloat16") -> States:
    """Weights, gradients and Adam's state: 2 + 2 + 12 bytes per parameter, each split over the ranks from its ZeRO stage on.

    Stage 1 splits the optimizer's state, 2 the gradients too, 3 the weights too.
    Source: Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054, section 3.1 and figure 1
    Args:
        offload: the optimizer's state is kept by the host.
    """
    weights, gradients, optimizer = (
        parameters * size / (ranks if zero_stage >= stage else 1) for size, stage in zip(BYTES_PER_PARAMETER[dtype], (3, 2, 1), strict=True)
    )
    return States(weights, gradients, 0.0 if offload else optimizer, optimizer if offload else 0.0)


def frozen_weights(parameters: int, *, ranks: int, zero_stage: int, dtype: str = "bfloat16") -> float:
    """Bytes per GPU of a model that only computes forward: whole, or with ZeRO 3 split over the ranks."""
    return parameters * element_bytes(dtype) / (ranks if zero_stage >= 3 else 1)


def layer_activations(shape: ModelShape, tokens: int, dtype: str = "bfloat16") -> float:
    """Bytes that one layer keeps for its backward pass.

    Per token: inputs and outputs of both norms (4 x hidden), queries and attention's output (2 x attention width), keys and values
    (2 x kv width), and of each active expert gate, up, its activation and their product (4 x intermediate). Attention's scores are
    not kept (flash attention recomputes them), and there is no dropout.
    Source: counted as Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, section 4.1, does for GPT
    """
    elements = 4 * shape.hidden + 2 * shape.attention_width + 2 * shape.kv_width + 4 * shape.active_experts * shape.intermediate
    return tokens * elements * element_bytes(dtype)


def activations(shape: ModelShape, tokens: int, *, checkpointing: bool, dtype: str = "bfloat16") -> float:
    """Bytes of a micro-batch's forward and backward pass.

    With checkpointing each layer keeps its input only, and one layer at a time is computed again.
    Source: Korthikanti et al. 2022, section 5 (full recomputation)
    """
    one = layer_activations(shape, tokens, dtype)
    return shape.layers * tokens * shape.hidden * element_bytes(dtype) + one if checkpointing else shape.layers * one


def forward_activations(shape: ModelShape, tokens: int, dtype: str = "bfloat16") -> float:
    """Bytes while a layer is computed without a backward pass to come."""
    return layer_activations(shape, tokens, dtype)


def logits(shape: ModelShape, tokens: int, *, training: bool, dtype: str = "bfloat16") -> float:
    """Bytes of the logits [tokens, vocab]: as the head gives them, in float32 for the log-softmax, and in training its gradient.

    An upper bound: this pipeline asks for the response's positions only.
    """
    return tokens * shape.vocab * (element_bytes(dtype) + (8 if training else 4))


def kv_bytes_per_token(shape: ModelShape, dtype: str = "bfloat16") -> float:
    """Bytes of keys and values of one token, in all layers.

    Source: Kwon et al. 2023 (vLLM), https://arxiv.org/abs/2309.06180, section 3
    """
    return 2 * shape.layers * shape.kv_width * element_bytes(dtype)


def kv_capacity(shape: ModelShape, memory: float, *, tensor_parallel: int, dtype: str = "bfloat16") -> float:
    """Tokens whose keys and values an engine can hold.

    Args:
        memory: bytes of each of its GPUs, weights included.
    """
    weights = shape.parameters * element_bytes(dtype) / tensor_parallel
    return max(0.0, memory - weights) * tensor_parallel / kv_bytes_per_token(shape, dtype)
