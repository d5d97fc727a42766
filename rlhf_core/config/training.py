"""Supervised training: what its stages share, SFT and the reward model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlhf_core.config.base import Fraction, Section
from rlhf_core.config.model import LoraConfig


class PretrainConfig(Section):
    steps: int = Field(ge=0)
    batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0)


class TrainingConfig(Section):
    """What the supervised stages share."""

    batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    warmup_fraction: float = Fraction
    min_learning_rate_fraction: float = Fraction
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    microbatch_tokens: int = Field(gt=0)
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    checkpoint_every: int = Field(gt=0)
    eval_every: int = Field(gt=0)
    lora: LoraConfig | None


class SftConfig(TrainingConfig):
    pretrain: PretrainConfig
    steps: int = Field(gt=0)
    train_on: Literal["last_turn", "all_turns"]
    train_on_thoughts: bool


class RewardConfig(TrainingConfig):
    enabled: bool
    epochs: float = Field(gt=0)
    margin: float
    centering_coef: float = Field(ge=0)
    ensemble: int = Field(ge=1, le=16)
