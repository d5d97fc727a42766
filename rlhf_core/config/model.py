"""Settings of the model that is aligned, of its adapters, and of supervised training: SFT and the reward model."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date
from fractions import Fraction as Exact
from typing import Annotated, Any, Literal

from pydantic import Field

from rlhf_core.config.base import Fraction, LearningRate, Section, shown
from rlhf_core.config.data import DataUse
from rlhf_core.config.gate import IncumbentConfig

Schedule = Literal["cosine", "linear", "constant", "wsd", "wsd_linear"]
Optimizer = Literal["adamw", "adamw_8bit", "lion"]
VisionTraining = Literal["frozen", "trained"]
REGISTERED = re.compile(r"registry|v\d+\.\d+\.\d+")  # reward.path: a version of the registry


class ArchitectureConfig(Section):
    hidden_size: int = Field(gt=0)  # width of the residual stream; an even multiple of heads
    intermediate_size: int = Field(gt=0)  # width of a layer's MLP
    layers: int = Field(gt=0)  # transformer layers
    heads: int = Field(gt=0)  # attention heads of a layer
    vocab_size: int = Field(ge=300)  # tokens of the tokenizer that is trained with the model

    def conflicts(self) -> Iterator[str]:
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            yield (
                f"hidden_size: expected an even multiple of heads={self.heads}, got {self.hidden_size}; "
                "each head needs an even width for rotary positions"
            )


class ModelConfig(Section):
    """The model that is aligned, its tokenizer and its chat template.

    template_date: the day that a chat template writes, if it writes one; a fixed day keeps the data the same from day to day.

    template_options: arguments of the model's chat template, saved with it, such as {enable_thinking: false}.

    vision: whether the vision tower of a model that sees is frozen or trained; None: the model gets text alone.
    """

    path: str | None
    revision: str | None = None  # branch, tag or commit of a model on Hugging Face; null: what the cache has, or the newest
    chat_template: str | None = None
    trust_remote_code: bool = False  # run Python code that comes with the model
    dtype: Literal["float32", "bfloat16"]
    max_length: int = Field(ge=8)
    template_date: str = "2024-07-26"
    template_options: dict[str, Any] = Field(default_factory=dict)
    architecture: ArchitectureConfig | None
    vision: VisionTraining | None = None

    def conflicts(self) -> Iterator[str]:
        try:
            date.fromisoformat(self.template_date)
        except ValueError:
            yield f"template_date: expected a day such as 2024-07-26, got {shown(repr(self.template_date))}; correct it"
        if self.revision is not None and self.path is None:
            yield f"revision: expected null without model.path, got {self.revision}; set model.path or remove the revision"
        if self.template_options and self.path is None:
            yield "template_options: expected none without model.path, whose template reads them, got some; remove them"
        if self.vision == "frozen" and self.path is None:
            yield "vision: expected trained or null without model.path, got frozen; set model.path to a model that sees"
        if self.chat_template is not None and self.path is None:
            yield f"chat_template: expected null without model.path, got {self.chat_template!r}; the trained tokenizer has a template"


class LoraConfig(Section):
    """Low-rank adapters instead of full training; merged into the weights when the model is saved.

    target_modules: names of linear layers, or all-linear: every layer but the head, routers and the projections inside state-space mixers.
    quantize: nf4 rounds the frozen linear layers to 4 bits (QLoRA); None keeps them.
    """

    rank: int = Field(default=8, gt=0)  # width of the adapters
    alpha: float = Field(default=16.0, gt=0)  # the adapters' output is multiplied by alpha / rank
    dropout: float = Field(default=0.0, ge=0, lt=1)  # share of the adapters' inputs that training drops
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    quantize: Literal["nf4"] | None = None


def offload_conflicts(zero_stage: int, *, offload_optimizer: bool, offload_parameters: bool) -> Iterator[str]:
    """Conflicts of offloading with the ZeRO stage.

    DeepSpeed moves to the host what ZeRO partitions: the optimizer's state from stage 1 on, parameters at stage 3.
    """
    if offload_optimizer and zero_stage == 0:
        yield "offload_optimizer: expected false with zero_stage=0, got true; set zero_stage to 1, 2 or 3, or offload_optimizer to false"
    if offload_parameters and zero_stage < 3:
        yield (
            f"offload_parameters: expected false with zero_stage={zero_stage}, got true; set zero_stage to 3, or offload_parameters to "
            "false"
        )


def sequence_conflicts(ranks: int, sequence_parallel: int) -> Iterator[str]:
    """Conflicts of the number of ranks with the number that share each sequence."""
    if ranks % sequence_parallel:
        yield f"sequence_parallel: expected a divisor of ranks={ranks}, got {sequence_parallel}; change one of them"


def data_parallel_keys(ranks: int, sequence_parallel: int, *, section: str = "") -> str:
    """Return the keys, with values, that give the number of ranks or of groups of ranks that take different examples.

    Args:
        section: prefix of the keys.
    """
    own = f"{section}ranks={ranks}"
    return own if sequence_parallel == 1 else f"{own} / {section}sequence_parallel={sequence_parallel}"


class LengthConfig(Section):
    """How long training takes: epochs (passes over the training rows), or a number of steps, which replaces them."""

    epochs: float = Field(default=1.0, gt=0)  # passes over the training rows; steps replaces it
    steps: int | None = Field(default=None, gt=0)  # optimizer steps; null: those of epochs

    def steps_over(self, rows: int, *, per_step: int) -> int:
        """Return the number of steps: `steps`, or those of `epochs`, rounded up and at least 1."""
        return max(1, math.ceil(Exact(repr(self.epochs)) * rows / per_step)) if self.steps is None else self.steps


class OptimizerConfig(Section):
    """Settings of the optimizer and its learning rate, for the supervised stages and rl.

    schedule: of rlhf_core/algorithms/schedules.py. min_learning_rate_fraction: its last value, as a share of the peak.
    decay_fraction: share of the steps over which wsd and wsd_linear decay.
    eps: not of lion. ema_decay: of the average of the weights, which is what the stage publishes; None: the last weights.
    """

    schedule: Schedule = "cosine"
    min_learning_rate_fraction: float = Fraction
    decay_fraction: float = Field(default=0.2, gt=0, le=1)
    optimizer: Optimizer = "adamw"  # adamw_8bit keeps its state in 8 bits, on GPUs
    # decay of the running averages of the gradient and, with adamw, of its square
    betas: list[Annotated[float, Field(ge=0, lt=1)]] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(ge=0)  # share of a weight, times the learning rate, that a step subtracts from it
    max_grad_norm: float = Field(gt=0)  # a gradient with a larger norm is scaled down to it
    ema_decay: float | None = Field(default=None, gt=0, lt=1)

    def warmup_conflicts(self, key: str, warmup: float) -> Iterator[str]:
        """Conflicts of the warm-up with the schedule.

        Args:
            key: of the warm-up. warmup: share of the steps.
        """
        if self.schedule.startswith("wsd") and warmup + self.decay_fraction > 1:
            yield (
                f"decay_fraction: expected at most {1 - warmup:.3g} with schedule {self.schedule}, which is the share of the steps after "
                f"{key}, got {self.decay_fraction}; lower it or {key}"
            )

    def offload_conflicts(self, key: str, *, offload_optimizer: bool) -> Iterator[str]:
        """Conflicts of the optimizer with offloading.

        Args:
            key: of `offload_optimizer`.
        """
        if self.optimizer == "adamw_8bit" and offload_optimizer:
            yield f"optimizer: expected adamw or lion with {key}, got adamw_8bit, which is made for a GPU; change one of them"


class SharedTrainingConfig(OptimizerConfig):
    """The section `training`, whose values a section inherits with `<<: *training`; a key that the section writes itself wins.

    YAML's merge key makes the values part of each section: DVC reruns a stage when a value that its section takes over changes, and not
    when the section has a value of its own.

    max_minutes: of training, after which the stage ends with its best state; None: no limit.
    sequence_parallel: ranks that share each sequence; ranks / sequence_parallel is the data-parallel size.
    """

    max_minutes: float | None = Field(default=None, gt=0)
    warmup_fraction: float = Fraction
    microbatch_tokens: int = Field(gt=0)
    ranks: int = Field(default=1, ge=1)
    sequence_parallel: int = Field(default=1, ge=1)
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    offload_parameters: bool = False
    gradient_checkpointing: bool = False
    checkpoint_every: int = Field(gt=0)
    eval_every: int = Field(gt=0)
    keep_best: bool = False
    disable_dropout: bool
    lora: LoraConfig | None

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks, or of groups of ranks that share sequences, which take different examples."""
        return self.ranks // self.sequence_parallel

    @property
    def _takers(self) -> str:
        return data_parallel_keys(self.ranks, self.sequence_parallel)

    def conflicts(self) -> Iterator[str]:
        yield from sequence_conflicts(self.ranks, self.sequence_parallel)
        yield from offload_conflicts(self.zero_stage, offload_optimizer=self.offload_optimizer, offload_parameters=self.offload_parameters)
        yield from self.warmup_conflicts("warmup_fraction", self.warmup_fraction)
        yield from self.offload_conflicts("offload_optimizer", offload_optimizer=self.offload_optimizer)


class TrainingConfig(SharedTrainingConfig, LengthConfig):
    """Keys of every supervised stage."""

    batch_size: int = Field(gt=0)  # rows of an optimizer step, over all ranks; pairs or responses, where the stage learns from those
    learning_rate: LearningRate  # peak of the schedule; null: the usual one for the stage, with or without adapters

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.batch_size < self.data_parallel_size:
            yield f"batch_size: expected at least {self._takers}, got {self.batch_size}; raise it, so that each rank has an example"


class PretrainConfig(LengthConfig):
    """Pretraining of a model from scratch.

    steps: 0 means no pretraining.
    """

    steps: int | None = Field(default=None, ge=0)
    batch_size: int = Field(gt=0)  # texts of an optimizer step, over all ranks
    learning_rate: float = Field(gt=0)  # peak of the schedule


class SftConfig(TrainingConfig):
    """Settings of SFT.

    enabled: false leaves SFT out, so that every later stage starts from the model at `model.path` as it is.
    """

    enabled: bool
    pretrain: PretrainConfig
    train_on: Literal["last_turn", "all_turns"]
    train_on_thoughts: bool

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.pretrain.steps != 0 and self.pretrain.batch_size < self.data_parallel_size:
            got = self.pretrain.batch_size
            yield f"pretrain.batch_size: expected at least {self._takers}, got {got}; raise it, so that each rank has an example"


class RewardConfig(TrainingConfig):
    """Settings of the reward model.

    path: a ready-made reward model in place of a trained one: a folder, a Hugging Face name, `registry` for the promoted version, or a
    version such as v2.0.0. pinned: that version's hashes, which the flow writes when it starts.
    step_separator: the text between two steps of a response, for a process reward model, which scores the end of each step; None: the
    model scores whole responses. With `path` the text must be the model's own.
    """

    enabled: bool
    path: str | None
    pinned: IncumbentConfig | None = None
    step_separator: str | None = Field(min_length=1)
    margin: float = 0.0  # subtracted from the difference of a pair's scores in the loss, so that they should differ by more
    centering_coef: float = Field(ge=0)
    ensemble: int = Field(ge=1, le=16)

    @property
    def is_trained(self) -> bool:
        """Whether the chain trains a reward model."""
        return self.enabled and self.path is None

    @property
    def rows_use(self) -> DataUse:
        """The use of the rows that the reward model learns from, and by which the gate judges it."""
        return "preference" if self.step_separator is None else "stepwise"

    @property
    def is_registered(self) -> bool:
        """Whether `path` names a version of the registry."""
        return self.path is not None and REGISTERED.fullmatch(self.path) is not None

    def conflicts(self) -> Iterator[str]:
        if self.is_trained:
            yield from super().conflicts()
        if self.path is not None and not self.enabled:
            yield f"path: expected null with reward.enabled false, got {shown(self.path)}; set reward.enabled to true or path to null"
        if self.path is not None and self.ensemble > 1:
            yield f"ensemble: expected 1 with reward.path, which names one model, got {self.ensemble}; set it to 1"
