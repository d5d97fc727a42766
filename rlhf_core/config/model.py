"""The model that is aligned, adapters on it, and its supervised training: SFT and the reward model."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from typing import Any, Literal

from pydantic import Field

from rlhf_core.config.base import Fraction, Section, shown


class ArchitectureConfig(Section):
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    vocab_size: int = Field(ge=300)

    def conflicts(self) -> Iterator[str]:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            yield (
                f"hidden_size: expected an even multiple of heads={self.heads}, got {self.hidden_size}; "
                "each head needs an even width for rotary positions"
            )


class ModelConfig(Section):
    """template_date: the day that a chat template writes, if it writes one; a fixed day keeps the data the same from day to day.

    template_options: arguments of the model's chat template, saved with it, such as {enable_thinking: false}.
    """

    path: str | None
    revision: str | None = None
    chat_template: str | None = None
    trust_remote_code: bool = False
    dtype: Literal["float32", "bfloat16"]
    max_length: int = Field(ge=8)
    template_date: str = "2024-07-26"
    template_options: dict[str, Any] = Field(default_factory=dict)
    architecture: ArchitectureConfig

    def conflicts(self) -> Iterator[str]:
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            yield f"template_date: expected a day such as 2024-07-26, got {shown(repr(self.template_date))}; correct it"
        if self.revision is not None and self.path is None:
            yield f"revision: expected null without model.path, got {self.revision}; set model.path or remove the revision"
        if self.template_options and self.path is None:
            yield "template_options: expected none without model.path, whose template reads them, got some; remove them"
        if self.chat_template is not None and self.path is None:
            yield f"chat_template: expected null without model.path, got {self.chat_template!r}; the trained tokenizer has a template"


class LoraConfig(Section):
    """Low-rank adapters instead of full training; merged into the weights when the model is saved.

    target_modules: names of linear layers, or all-linear: every layer but the head, routers and the projections inside state-space mixers.
    quantize: nf4 rounds the frozen linear layers to 4 bits (QLoRA); None keeps them.
    """

    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str]
    quantize: Literal["nf4"] | None = None


class SharedTrainingConfig(Section):
    """The section `training`, whose values a section takes over with `<<: *training`; a key that the section writes itself wins.

    YAML's merge key makes the values part of each section: DVC reruns a stage when a value that its section takes over changes, and not
    when the section has a value of its own.
    """

    warmup_fraction: float = Fraction
    min_learning_rate_fraction: float = Fraction
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    microbatch_tokens: int = Field(gt=0)
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    checkpoint_every: int = Field(gt=0)
    eval_every: int = Field(gt=0)
    disable_dropout: bool
    lora: LoraConfig | None


class TrainingConfig(SharedTrainingConfig):
    """Keys of every supervised stage."""

    batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0)


class PretrainConfig(Section):
    steps: int = Field(ge=0)
    batch_size: int = Field(gt=0)
    learning_rate: float = Field(gt=0)


class SftConfig(TrainingConfig):
    pretrain: PretrainConfig
    steps: int = Field(gt=0)
    train_on: Literal["last_turn", "all_turns"]
    train_on_thoughts: bool


class RewardConfig(TrainingConfig):
    enabled: bool
    epochs: float = Field(gt=0)
    margin: float = 0.0
    centering_coef: float = Field(ge=0)
    ensemble: int = Field(ge=1, le=16)
