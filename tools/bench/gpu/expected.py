"""The planner's memory of a training step, for the measured settings."""

from __future__ import annotations

from rlhf_core.planning.hardware import GIB
from rlhf_core.planning.memory import Training, adapter_parameters, head_training, training_states, trunk_activations
from rlhf_core.planning.shape import ModelShape

RESERVE = 3 * GIB  # of a GPU, reserved as in the planner
ZERO_STAGE = 2


def trained_bytes(shape: ModelShape, *, tokens: int, scalar: bool = False) -> float:
    """Bytes of full training in bfloat16 on one GPU: states, and a pass of `tokens`.

    Args:
        scalar: a reward model, without a vocabulary head and logits.
    """
    how = Training(zero_stage=ZERO_STAGE)
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, how)
    head = 0.0 if scalar else head_training(shape, tokens, how)
    return states.resident + states.one_pass(trunk_activations(shape, tokens, how) + head)


def step_bytes(shape: ModelShape, *, scalar: bool = False) -> float:
    """Bytes during the optimizer step, without activations: the peak where a pass is small beside the states."""
    states = training_states(shape.scalar_parameters if scalar else shape.parameters, Training(zero_stage=ZERO_STAGE))
    return states.resident + states.step


def adapted_bytes(shape: ModelShape, *, tokens: int, rank: int, quantized: bool) -> float:
    """Bytes with adapters on every linear layer of a frozen language model."""
    how = Training(zero_stage=ZERO_STAGE, adapters=adapter_parameters(shape, rank), quantized=quantized)
    states = training_states(shape.parameters, how, linear=shape.linear)
    return states.resident + states.one_pass(trunk_activations(shape, tokens, how) + head_training(shape, tokens, how))
