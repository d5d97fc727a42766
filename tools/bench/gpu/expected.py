"""The planner's memory of a training step, for the measured settings."""

from __future__ import annotations

from tools.planning.hardware import GIB
from tools.planning.memory import activations, frozen_weights, logits, training_states
from tools.planning.shape import ModelShape

RESERVE = 3 * GIB  # of a GPU, reserved as in the planner
NF4_BYTES = 0.5 + 4 / 64  # of a rounded number and its share of a block's float32 scale (rlhf_core/models/lora.py)


def trained_bytes(shape: ModelShape, *, tokens: int, scalar: bool = False) -> float:
    """Bytes of full training in bfloat16 on one GPU: states, and a pass of `tokens`.

    Args:
        scalar: a reward model, without a vocabulary head and logits.
    """
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, ranks=1, zero_stage=2)
    one_pass = activations(shape, tokens, checkpointing=False) + (0 if scalar else logits(shape, tokens, training=True))
    return states.weights + states.gradients + states.optimizer + one_pass


def step_bytes(shape: ModelShape, *, scalar: bool = False) -> float:
    """Bytes during the optimizer step of ZeRO 1 or 2, without activations: states, and gradients once more in float32.

    The planner doesn't model this phase, which is the peak where a pass is small beside the states.
    Source: DeepSpeed 0.19.8, runtime/zero/stage_1_and_2.py, `step`
    """
    parameters = shape.scalar_parameters if scalar else shape.parameters
    states = training_states(parameters, ranks=1, zero_stage=2)
    return states.weights + states.gradients + states.optimizer + 4 * parameters


def adapted_bytes(shape: ModelShape, *, tokens: int, rank: int, quantized: bool) -> float:
    """Bytes with adapters on every linear layer of a frozen language model, from the planner's parts; the planner has no adapters."""
    base = frozen_weights(shape.parameters, ranks=1, zero_stage=2)
    if quantized:
        base += shape.active_trunk * (NF4_BYTES - 2)
    states = training_states(adapter_parameters(shape, rank), ranks=1, zero_stage=2)
    one_pass = activations(shape, tokens, checkpointing=False) + logits(shape, tokens, training=True)
    return base + states.weights + states.gradients + states.optimizer + one_pass


def adapter_parameters(shape: ModelShape, rank: int) -> int:
    """Parameters of A and B of the seven linear layers of each block."""
    h, q, kv, m = shape.hidden, shape.attention_width, shape.kv_width, shape.intermediate
    return shape.layers * rank * (2 * (h + q) + 2 * (h + kv) + 3 * (h + m))
