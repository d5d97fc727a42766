"""The methods other than RL that lead from the SFT model to the policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, model_validator

from rlhf_core.config.base import LearningRate, RolloutBackend, Section
from rlhf_core.config.model import LengthConfig, LoraConfig, TrainingConfig
from rlhf_core.config.scorers import ScorerConfig, raw_scorer_conflicts

PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo", "apo_zero", "apo_down"]
REFERENCE_FREE = ("simpo", "orpo")
# What gives the reference's log-probabilities: a frozen copy, before training or during it, or the policy without its adapters.
ReferenceKind = Literal["none", "precomputed", "live", "policy"]


def _dead_copy(kind: ReferenceKind, *, offload_frozen: bool) -> Iterator[str]:
    if offload_frozen and kind in ("none", "policy"):
        yield "offload_frozen: expected false where no copy of the initial model is kept, got true; set it to false"


def _reference_kind(reference: Literal["precomputed", "live"], lora: LoraConfig | None) -> ReferenceKind:
    """How the reference is computed. Adapters leave the model that they start from as it is, rounded or not, so it needs no copy."""
    return "policy" if reference == "live" and lora is not None else reference


class DpoConfig(TrainingConfig):
    """Settings of preference optimization on pairs; batch_size counts pairs.

    reference: live: computed with each step, by a frozen copy or, with adapters, by the policy without them.
    offload_frozen: the copy's weights are on the host while it computes nothing.
    """

    loss: PreferenceLoss
    beta: float = Field(gt=0)  # strength of the pull to the reference model: a larger one keeps the policy nearer
    label_smoothing: float = Field(ge=0, lt=0.5)
    length_normalize: bool
    simpo_margin: float = Field(ge=0)
    nll_coef: float = Field(ge=0)
    reference: Literal["precomputed", "live"]
    offload_frozen: bool = False

    @property
    def reference_kind(self) -> ReferenceKind:
        return "none" if self.loss in REFERENCE_FREE else _reference_kind(self.reference, self.lora)

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            yield (
                f"label_smoothing: expected 0 with loss {self.loss}, got {self.label_smoothing}; only sigmoid (conservative DPO) "
                "and robust have it"
            )
        if self.loss == "robust" and not self.label_smoothing:
            yield "label_smoothing: expected above 0 with loss robust, got 0; it is the assumed share of flipped labels"
        if self.nll_coef and self.loss == "orpo":
            yield (
                f"nll_coef: expected 0 with loss orpo, got {self.nll_coef}; ORPO's own loss has the likelihood of the chosen response, "
                "and beta weights the odds ratio against it"
            )
        if self.reference == "live" and self.reference_kind == "none":
            yield f"reference: expected precomputed, the default, with loss {self.loss}, got live; that loss has no reference"
        yield from _dead_copy(self.reference_kind, offload_frozen=self.offload_frozen)
        if self.length_normalize and self.loss in ("ipo", *REFERENCE_FREE):
            yield f"length_normalize: expected false with loss {self.loss}, got true; that loss is per token already"


class KtoConfig(TrainingConfig):
    """Settings of preference optimization on single responses, each marked good or bad; batch_size counts responses.

    offload_frozen: as of DpoConfig.
    """

    loss: Literal["kto", "apo_zero_unpaired"]
    beta: float = Field(gt=0)  # strength of the pull to the reference model: a larger one keeps the policy nearer
    desirable_weight: float = Field(ge=0)  # of good responses in the loss
    undesirable_weight: float = Field(ge=0)  # of bad ones
    reference: Literal["precomputed", "live"]  # as of DpoConfig
    offload_frozen: bool = False

    @property
    def reference_kind(self) -> ReferenceKind:
        return _reference_kind(self.reference, self.lora)

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        yield from _dead_copy(self.reference_kind, offload_frozen=self.offload_frozen)
        if not self.desirable_weight and not self.undesirable_weight:
            yield "desirable_weight: expected above 0 here or in undesirable_weight, got 0 in both; nothing would be learned"
        if self.loss == "kto" and self.batch_size < 2:
            yield "batch_size: expected at least 2 with loss kto, got 1; it estimates the KL with other rows' responses"


class SamplingConfig(Section):
    """Settings for sampling responses to training prompts."""

    backend: RolloutBackend  # vllm or pytorch
    prompts: int | None = Field(gt=0)  # training prompts to sample for; null: all
    samples_per_prompt: int = Field(ge=2)  # responses to each
    max_new_tokens: int = Field(gt=0)  # of a response, which is cut off there
    temperature: float = Field(gt=0)  # of sampling
    top_p: float = Field(default=1.0, gt=0, le=1)  # sample from the most likely tokens with this probability together
    max_concurrent_sequences: int = Field(default=256, gt=0)  # that an engine samples at the same time
    gpu_memory_fraction: float = Field(default=0.5, gt=0, lt=1)  # of a GPU, for vLLM's weights and cache


class RejectionSamplingConfig(TrainingConfig):
    """Settings of SFT on the best of n responses by the scorers; min_score is in units of their weighted sum."""

    sampling: SamplingConfig
    scorers: list[ScorerConfig] = Field(min_length=1)
    min_score: float | None

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        yield from raw_scorer_conflicts(self.scorers)


class ConditionalSftConfig(TrainingConfig):
    """Settings of SFT on responses of every quality, with the quality level in the prompt (SteerLM).

    The policy's template asks for level `wanted`.
    """

    label_by: Literal["preference", "scores"]
    levels: int = Field(ge=2, le=10)
    wanted: int = Field(ge=0)  # the quality level in the policy's prompts; the highest is the best

    def conflicts(self) -> Iterator[str]:
        yield from super().conflicts()
        if self.wanted >= self.levels:
            yield f"wanted: expected a level from 0 to {self.levels - 1}, got {self.wanted}; the highest is the best"
        if self.label_by == "preference" and self.levels != 2:
            yield f"levels: expected 2 with label_by preference (rejected, chosen), got {self.levels}; label_by scores allows more"


class PromotionConfig(Section):
    """The requirement for a round's policy to replace the previous one.

    metric: win_rate (of the score, ties half) or judge (difference in shares, where the data has a judge), on the promotion split.
    error_budget: chance that any series from this start ever accepts a policy that is no better (rlhf_core/rounds/spending.py).
    rounds: comparisons over which most of the budget is spread; there may be more.
    min_advantage: for the lower bound of the win rate minus a half, or of the difference.
    """

    metric: Literal["win_rate", "judge"]
    prompts: int = Field(gt=0)
    error_budget: float = Field(gt=0, lt=1)
    rounds: int = Field(gt=0)
    min_advantage: float = Field(gt=-0.5, lt=0.5)

    @model_validator(mode="before")
    @classmethod
    def _has_a_budget(cls, section: Any) -> Any:
        if isinstance(section, dict) and "confidence" in section:
            raise ValueError(
                "confidence: expected error_budget (the chance that a series ever accepts a policy that is no better) and rounds, got the "
                "confidence of each round; write error_budget: 0.05 and rounds: 30 instead. A series with confidence can't be "
                "continued: begin another with --series NAME"
            )
        return section


class IterativeConfig(LengthConfig):
    """Settings of iterative DPO's rounds (flows/iterative_dpo.py). A round trains with the section dpo, but for epochs, steps and learning
    rate.
    """

    start: Literal["sft", "policy", "registry"]
    learning_rate: LearningRate
    sampling: SamplingConfig
    scorers: list[ScorerConfig] = Field(min_length=1)
    min_margin: float = Field(ge=0)
    min_pairs: int = Field(ge=1)
    promotion: PromotionConfig

    def conflicts(self) -> Iterator[str]:
        if self.sampling.prompts is None:
            yield "sampling.prompts: expected a number of prompts per round, got null; rounds share the pool of prompts"
        yield from raw_scorer_conflicts(self.scorers)


class ExternalConfig(Section):
    """A policy that was made elsewhere: a folder or a Hugging Face name of a whole model, or of adapters (PEFT) whose base is there too.

    own_template: the policy answers by its own chat template, though models/sft has another.
    """

    path: str | None
    own_template: bool

    def conflicts(self) -> Iterator[str]:
        if self.path is None:
            yield "path: expected the folder or the Hugging Face name of the policy, got null; set it"


Method = Literal["rl", "dpo", "kto", "rejection_sampling", "conditional_sft", "external"]


class AlignmentConfig(Section):
    """The method that leads from the SFT model to the policy: the section and the module tasks/train_<method>.py of its name."""

    method: Method

    @model_validator(mode="before")
    @classmethod
    def _has_no_distillation(cls, section: Any) -> Any:
        if isinstance(section, dict) and section.get("method") == "distillation":
            raise ValueError(
                "method: expected rl, whose section has distillation, got distillation; set alignment.method to rl and "
                "rl.distillation.teachers to your teachers (docs/distillation.md)"
            )
        return section
