"""params.yaml as frozen typed models: the only reader of that file.

A stage receives its own section and never the whole tree. Unknown keys, wrong types and values that don't fit together
are refused here, before anything expensive starts, with the key's path, what was expected and what to do.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

# Which sections of params.yaml each stage reads; dvc.yaml says the same (a contract test compares them).
STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "prepare_data": ("seed", "data", "model"),
    "validate_data": ("validation", "model", "reward"),
    "train_sft": ("seed", "model", "sft"),
    "train_reward": ("seed", "model", "reward"),
    "gate_reward": ("model", "reward", "gate"),
    "train_policy": ("seed", "model", "${alignment.method}"),
    "evaluate": ("seed", "model", "rl", "evaluation"),
    "report": (
        *("seed", "model", "data", "sft", "reward", "gate", "alignment", "rl"),
        *("dpo", "kto", "rejection_sampling", "conditional_sft", "evaluation", "report"),
    ),
}
# The same of rounds/dvc.yaml, whose stages each round of iterative DPO has.
ROUND_STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "sample_round": ("seed", "model", "reward", "iterative"),
    "validate_round": ("validation", "model", "iterative"),
    "train_round": ("seed", "model", "dpo", "iterative"),
    "evaluate_round": ("seed", "model", "iterative", "evaluation"),
}
# Sections that change no result: no stage depends on them.
UNTRACKED_SECTIONS = ("cluster", "tracking", "flow", "promotion")


class ConfigError(ValueError):
    """params.yaml, or an override of it, is wrong. The message names the key, what was expected and what to do."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


Fraction = Field(ge=0.0, le=1.0)


class ArchitectureConfig(Section):
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    heads: int = Field(gt=0)
    vocab_size: int = Field(ge=300)

    @model_validator(mode="after")
    def _heads_divide(self):
        if self.hidden_size % self.heads or (self.hidden_size // self.heads) % 2:
            raise ValueError(
                f"hidden_size: expected an even multiple of heads={self.heads}, got {self.hidden_size}; "
                "each head needs an even width for rotary positions"
            )
        return self


class ModelConfig(Section):
    path: str | None
    trust_remote_code: bool
    dtype: Literal["float32", "bfloat16"]
    max_length: int = Field(ge=8)
    architecture: ArchitectureConfig


class ClerkConfig(Section):
    pretrain_lines: int = Field(ge=0)
    demonstrations: int = Field(ge=0)
    prompts: int = Field(ge=0)
    responses_per_prompt: int = Field(ge=2)
    label_noise: float = Fraction
    garbled_fraction: float = Fraction
    polite_errors_only: bool


DataUse = Literal["pretrain", "sft", "preference", "prompt"]
DataFormat = Literal[
    "preference",  # prompt, chosen, rejected; text or message lists; without a prompt column the shared prefix is the prompt
    "hh",  # Anthropic-HH transcripts in chosen and rejected
    "instruction",  # instruction (and input), output
    "messages",  # one column with a conversation whose last message is the assistant's
    "unpaired",  # prompt, completion, boolean label
    "graded",  # prompt and several completions, each marked good or bad: every good one against every bad one
    "prompt",  # prompt and, for verifiable tasks, label
    "text",  # plain text for pretraining
]


# Format -> the uses it can serve, and our names of its columns.
FORMATS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "preference": (("sft", "preference", "prompt"), ("prompt", "chosen", "rejected")),
    "hh": (("sft", "preference", "prompt"), ("chosen", "rejected")),
    "instruction": (("sft", "prompt"), ("instruction", "input", "output", "label")),
    "messages": (("sft", "prompt"), ("messages", "label")),
    "unpaired": (("sft", "preference", "prompt"), ("prompt", "completion", "label")),
    "graded": (("sft", "preference", "prompt"), ("prompt", "completions", "completion", "good")),
    "prompt": (("prompt",), ("prompt", "label")),
    "text": (("pretrain",), ("text",)),
}

# What the gate slices by without any column of the data.
BUILT_IN_SLICES = ("source", "prompt_length", "response_length", "length_order")


class SourceConfig(Section):
    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    kind: Literal["clerk", "file", "huggingface"]
    uses: list[DataUse] = Field(min_length=1)
    weight: float = Field(gt=0)
    clerk: ClerkConfig | None = None
    path: str | None = None  # a file, a folder, or the name of a Hugging Face data set
    subset: str | None = None  # of a Hugging Face data set
    dataset_split: str = "train"  # of a Hugging Face data set
    format: DataFormat | None = None
    columns: dict[str, str | list[str]] = Field(default_factory=dict)  # our name -> theirs; dots reach into nested columns
    slices: dict[str, str] = Field(default_factory=dict)  # a name for the gate's slices -> their column
    label_pattern: str | None = None  # regular expression that finds the label inside its column; its first group, if it has one

    @model_validator(mode="after")
    def _complete(self):
        if self.kind == "clerk":
            if self.clerk is None:
                raise ValueError(f"source {self.name}: kind clerk expects a clerk section, got none; copy it from the default params.yaml")
        elif self.path is None or self.format is None:
            raise ValueError(
                f"source {self.name}: kind {self.kind} expects path and format, got path={self.path} format={self.format}; set both"
            )
        else:
            self._check_format(*FORMATS[self.format])
        return self

    def _check_format(self, uses: tuple[str, ...], columns: tuple[str, ...]) -> None:
        subject = f"source {self.name}"
        if unserved := [use for use in self.uses if use not in uses]:
            raise ValueError(f"{subject}: format {self.format} expects uses among {list(uses)}, got {unserved}; take those out")
        if unknown := [column for column in self.columns if column not in columns]:
            raise ValueError(f"{subject}: format {self.format} expects columns named {list(columns)}, got {unknown}; map ours to theirs")
        if lists := [column for column, theirs in self.columns.items() if isinstance(theirs, list) and column != "completions"]:
            raise ValueError(f"{subject}: columns {lists} expect one column each, got lists; only completions takes several")
        if taken := [name for name in self.slices if name in BUILT_IN_SLICES]:
            raise ValueError(f"{subject}: slices expect names other than {list(BUILT_IN_SLICES)}, got {taken}; rename them")
        if self.label_pattern is not None:
            try:
                re.compile(self.label_pattern)
            except re.error as error:
                message = f"{subject}: label_pattern expects a regular expression, got {self.label_pattern!r} ({error}); correct it"
                raise ValueError(message) from error


class DataConfig(Section):
    validation_fraction: float = Field(gt=0, lt=0.5)
    test_fraction: float = Field(gt=0, lt=0.5)
    max_rows: int | None = Field(default=None, gt=0)
    sources: list[SourceConfig] = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self):
        names = [s.name for s in self.sources]
        if len(set(names)) < len(names):
            raise ValueError(f"sources: expected different names, got {names}; rename one")
        return self


class ValidationConfig(Section):
    max_empty_fraction: float = Fraction
    max_identical_fraction: float = Fraction
    max_duplicate_fraction: float = Fraction
    max_contradictory_fraction: float = Fraction
    max_too_long_fraction: float = Fraction
    max_length_bias: float = Field(ge=0, le=0.5)
    min_label_balance: float = Field(ge=0, le=0.5)
    min_pairs: int = Field(ge=1)
    max_reported_ids: int = Field(ge=1)


class LoraConfig(Section):
    """Low-rank adapters in the place of full training; merged into the weights when the model is saved.

    target_modules: names of linear layers, or all-linear: every one but the head.
    """

    rank: int = Field(gt=0)
    alpha: float = Field(gt=0)
    dropout: float = Field(ge=0, lt=1)
    target_modules: Literal["all-linear"] | list[str]


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


class RewardConfig(TrainingConfig):
    enabled: bool
    epochs: float = Field(gt=0)
    margin: float
    centering_coef: float = Field(ge=0)
    ensemble: int = Field(ge=1, le=16)


class ExternalPairsConfig(Section):
    """Pairs that had no part in training, such as RewardBench's; subset names the column by which they are reported."""

    name: str = Field(pattern=r"^[A-Za-z0-9_.-]+$")
    path: str
    format: Literal["preference", "hh"]
    columns: dict[str, str] = Field(default_factory=dict)
    subset: str | None = None
    min_accuracy: float | None = Field(default=None, ge=0, le=1)


class IncumbentConfig(Section):
    """The promoted reward model as the registry has it (docs/registry.md): version and md5 of its folder, as in dvc.lock."""

    version: str
    md5: str = Field(pattern=r"^[0-9a-f]{32}\.dir$")


class RolledBackConfig(IncumbentConfig):
    """A reward model that was promoted and then taken back, and why."""

    reason: str


class GateConfig(Section):
    min_accuracy: float = Fraction
    confidence: float = Field(gt=0, lt=1)
    min_pairs: int = Field(ge=1)
    slices: list[str]
    min_slice_accuracy: float | None = Field(ge=0, le=1)
    min_slice_pairs: int = Field(ge=1)
    max_ece: float | None = Field(ge=0, le=1)
    min_shorter_accuracy: float | None = Field(ge=0, le=1)
    probe_pairs: int = Field(ge=1)
    max_score_difference: float = Field(gt=0)
    max_format_shift: float | None = Field(gt=0)
    incumbent: IncumbentConfig | None
    max_regression: float = Field(ge=0, le=1)
    external: list[ExternalPairsConfig]
    rolled_back: list[RolledBackConfig]
    override: str | None = Field(min_length=1)

    @model_validator(mode="after")
    def _names_differ(self):
        for key, names in (("slices", self.slices), ("external", [e.name for e in self.external])):
            if len(set(names)) < len(names):
                raise ValueError(f"{key}: expected different names, got {names}; take one out")
        return self


class PpoConfig(Section):
    group_size: int = Field(ge=1)
    gamma: float = Fraction
    gae_lambda: float = Fraction
    whiten_advantages: bool
    value_clip: float | None = Field(gt=0)
    value_coef: float = Field(gt=0)
    critic_learning_rate: float = Field(gt=0)
    critic_init: Literal["reward_model", "sft"]
    critic_warmup_steps: int = Field(ge=0)


class GrpoConfig(Section):
    group_size: int = Field(ge=2)
    normalize_std: bool


class GroupConfig(Section):
    """An algorithm whose baseline comes from a prompt's other samples."""

    group_size: int = Field(ge=2)


class SampleConfig(Section):
    """An algorithm that needs no siblings: its baseline is the batch's mean or a greedy response."""

    group_size: int = Field(ge=1)


class KlConfig(Section):
    coef: float = Field(ge=0)
    placement: Literal["reward", "loss"]
    estimator: Literal["k1", "k2", "k3"]
    target: float | None = Field(gt=0)
    horizon: int = Field(gt=0)
    refresh_reference_every: int | None = Field(gt=0)
    measure: bool

    @property
    def keeps_reference(self) -> bool:
        """Whether the divergence is known: it is penalised, or at least measured."""
        return self.coef > 0 or self.measure

    @model_validator(mode="after")
    def _k1_has_no_useful_gradient(self):
        if self.placement == "loss" and self.estimator == "k1":
            raise ValueError("estimator: expected k2 or k3 with placement loss, got k1; the gradient of k1 is zero in expectation")
        return self

    @model_validator(mode="after")
    def _nothing_without_a_coefficient(self):
        for name, value in (("target", self.target), ("refresh_reference_every", self.refresh_reference_every)):
            if self.coef == 0 and value is not None:
                raise ValueError(f"{name}: expected null with coef 0, got {value}; raise coef or remove it")
        return self


RESERVED_NAMES = ("score", "mean", "std")  # score_<name> and eval_<name> are columns of the curves
LABEL_SCORERS = ("exact_match", "number", "math")  # they compare with the prompt's label


class ScorerConfig(Section):
    """One component of the reward; weight 0: only measured."""

    name: str = Field(pattern=r"^[A-Za-z0-9_]+$")
    kind: Literal["reward_model", "function", "exact_match", "number", "math", "regex", "length", "judge"]
    weight: float
    normalization: Literal["initial", "running", "none"]
    path: str | None = None  # reward_model: a folder, null takes the chain's own; function: file.py:name or package.module:name
    members: int = Field(default=1, ge=1)  # reward_model: how many of an ensemble are asked; the score is their mean
    std_coef: float = Field(default=0.0, ge=0)  # reward_model: times the members' standard deviation, subtracted from their mean
    pattern: str | None = None  # regex: 1 where it is found in the response, else 0
    target_length: int | None = Field(default=None, gt=0)  # length: tokens
    timeout: float = Field(default=60.0, gt=0)  # seconds for a step's responses

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self):
        needed = {"function": "path", "regex": "pattern", "length": "target_length"}.get(self.kind)
        allowed = {"reward_model": {"path"}}.get(self.kind, {needed})
        for field in ("path", "pattern", "target_length"):
            given = getattr(self, field) is not None
            if given and field not in allowed:
                raise ValueError(f"{field}: expected none for a scorer of kind {self.kind}, got {getattr(self, field)!r}; remove it")
            if not given and field == needed:
                raise ValueError(f"{field}: expected a value for a scorer of kind {self.kind}, got none; set it")
        if self.members > 1 and self.kind != "reward_model":
            raise ValueError(f"members: expected 1 for a scorer of kind {self.kind}, got {self.members}; only reward models are ensembles")
        if self.std_coef and self.members == 1:
            raise ValueError(f"std_coef: expected 0 with one member, got {self.std_coef}; one does not disagree with itself; raise members")
        if self.pattern is not None:
            try:
                re.compile(self.pattern)
            except re.error as error:
                raise ValueError(f"pattern: expected a regular expression, got {self.pattern!r} ({error}); correct it") from error
        return self


def _check_names_and_weights(scorers: list[ScorerConfig]) -> None:
    names = [s.name for s in scorers]
    if len(set(names)) < len(names):
        raise ValueError(f"scorers: expected different names, got {names}; rename one")
    if taken := [name for name in names if name in RESERVED_NAMES]:
        raise ValueError(f"scorers: expected names other than {list(RESERVED_NAMES)}, which the curves use, got {taken}; rename them")
    if not any(s.weight for s in scorers):
        raise ValueError("scorers: expected one with a weight other than 0, got none; nothing would be learned")


def _check_raw_scorers(scorers: list[ScorerConfig]) -> None:
    """Of a list whose weighted sum only ranks responses."""
    _check_names_and_weights(scorers)
    if normalized := [s.name for s in scorers if s.normalization != "none"]:
        raise ValueError(f"scorers: expected normalization none, got another of {normalized}; scores are only compared here, raw")


class OverlongConfig(Section):
    """DAPO's soft penalty: from 0 at max_new_tokens - buffer tokens linearly to `penalty` at max_new_tokens."""

    buffer: int = Field(gt=0)
    penalty: float = Field(gt=0)


class ScoreConfig(Section):
    scorers: list[ScorerConfig] = Field(min_length=1)
    normalization_samples: int = Field(ge=16)
    clip: float | None = Field(gt=0)
    no_eos_penalty: float = Field(ge=0)
    mask_cut_off: bool
    overlong: OverlongConfig | None
    max_unscored_fraction: float = Fraction

    @model_validator(mode="after")
    def _names_and_weights(self):
        _check_names_and_weights(self.scorers)
        return self


class CorrectionConfig(Section):
    kind: Literal["none", "tis", "icepop", "sequence_tis", "sequence_mask"]
    low: float = Field(ge=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self):
        if self.low >= self.high:
            raise ValueError(f"low: expected less than high={self.high}, got {self.low}; swap or change them")
        return self


class DynamicSamplingConfig(Section):
    enabled: bool
    max_rounds: int = Field(ge=1)


class PtxConfig(Section):
    coef: float = Field(ge=0)
    batch_size: int = Field(gt=0)


class PeriodicEvaluationConfig(Section):
    every: int | None = Field(gt=0)
    prompts: int = Field(gt=0)
    metric: str
    keep_best: bool

    @model_validator(mode="after")
    def _best_of_something(self):
        if self.keep_best and self.every is None:
            raise ValueError("keep_best: expected a number of steps in every, got null; nothing would be compared")
        return self


class RolloutConfig(Section):
    max_new_tokens: int = Field(gt=0)
    min_new_tokens: int = Field(ge=0)
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int | None = Field(gt=0)
    stop: list[str]
    engines: int = Field(ge=1)
    gpus_per_engine: float = Field(gt=0)
    gpu_memory_fraction: float = Field(gt=0, lt=1)
    kv_cache_gib: int = Field(gt=0)
    max_concurrent_sequences: int = Field(gt=0)
    max_logprob_difference: float = Field(gt=0)

    @model_validator(mode="after")
    def _min_within_max(self):
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens: expected at most max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}; lower it")
        return self


LimitAction = Literal["warn", "stop", "rollback"]


class LimitConfig(Section):
    """A column of RL's curves, when it is past its limit (one of above, below, fall), and what happens then (docs/monitors.md).

    fall: share of its highest value so far by which it has fallen. window: steps over which it is averaged.
    patience: steps in a row that must be past the limit. from_step: the first step that counts.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    fall: float | None = Field(default=None, gt=0)
    window: int = Field(default=1, gt=0)
    patience: int = Field(default=1, gt=0)
    from_step: int = Field(default=1, gt=0)
    action: LimitAction

    @model_validator(mode="after")
    def _one_limit(self):
        given = {name: value for name in ("above", "below", "fall") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            raise ValueError(f"limit: expected exactly one of above, below and fall, got {given or 'none'}; split it or add one")
        return self


class TrainerConfig(Section):
    ranks: int = Field(ge=1)
    gpus_per_rank: float = Field(gt=0)
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    microbatch_tokens: int = Field(gt=0)


class DeadlineConfig(Section):
    start: float = Field(gt=0)
    step: float = Field(gt=0)


Algorithm = Literal["ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax"]


class RlConfig(Section):
    algorithm: Algorithm
    steps: int = Field(gt=0)
    samples_per_step: int = Field(gt=0)
    minibatch_size: int = Field(gt=0)
    epochs: int = Field(ge=1)
    learning_rate: float = Field(gt=0)
    warmup_steps: int = Field(ge=0)
    weight_decay: float = Field(ge=0)
    max_grad_norm: float = Field(gt=0)
    policy_loss: Literal["ppo_clip", "gspo", "cispo"]
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "constant_horizon"]
    clip_low: float = Field(gt=0, lt=1)
    clip_high: float = Field(gt=0)
    dual_clip: float | None = Field(gt=1)
    entropy_coef: float = Field(ge=0)
    moe_aux_coef: float = Field(ge=0)
    max_approx_kl: float | None = Field(gt=0)
    lora: LoraConfig | None
    ppo: PpoConfig
    grpo: GrpoConfig
    dr_grpo: GroupConfig
    rloo: GroupConfig
    reinforce_pp: SampleConfig
    reinforce_pp_baseline: GroupConfig
    remax: SampleConfig
    kl: KlConfig
    reward: ScoreConfig
    correction: CorrectionConfig
    dynamic_sampling: DynamicSamplingConfig
    ptx: PtxConfig
    prompt_weights: dict[str, float]
    rollout: RolloutConfig
    evaluation: PeriodicEvaluationConfig
    monitor: dict[str, LimitConfig | None]
    trainer: TrainerConfig
    checkpoint_every: int = Field(gt=0)
    deadlines: DeadlineConfig

    @property
    def group_size(self) -> int:
        return getattr(self, self.algorithm).group_size

    @property
    def rollout_batch_size(self) -> int:
        """Prompts per step."""
        return self.samples_per_step // self.group_size

    @property
    def limits(self) -> dict[str, LimitConfig]:
        """Those of `monitor` that are not switched off."""
        return {name: limit for name, limit in self.monitor.items() if limit is not None}

    @property
    def keeps_best(self) -> bool:
        """Whether the best policy so far is put aside: to be the result, or to have something to roll back to."""
        return self.evaluation.keep_best or any(limit.action == "rollback" for limit in self.limits.values())

    @property
    def aggregation(self) -> str:
        """What `auto` stands for: Dr. GRPO's constant horizon, GSPO's mean over sequences, otherwise the mean over tokens."""
        if self.loss_aggregation != "auto":
            return self.loss_aggregation
        if self.policy_loss == "gspo":
            return "sequence_mean"
        return "constant_horizon" if self.algorithm == "dr_grpo" else "token_mean"

    @model_validator(mode="after")
    def _batches_divide(self):
        for what, divisor in (
            (f"{self.algorithm}.group_size", self.group_size),
            ("minibatch_size", self.minibatch_size),
        ):
            if self.samples_per_step % divisor:
                raise ValueError(
                    f"samples_per_step: expected a multiple of {what}={divisor}, got {self.samples_per_step}; change one of them"
                )
        for what, divided in (
            ("minibatch_size", self.minibatch_size),
            *((("ptx.batch_size", self.ptx.batch_size),) if self.ptx.coef else ()),
        ):
            if divided % self.trainer.ranks:
                raise ValueError(f"{what}: expected a multiple of trainer.ranks={self.trainer.ranks}, got {divided}; change one of them")
        return self

    @model_validator(mode="after")
    def _combinations_make_sense(self):
        if self.policy_loss == "gspo" and self.aggregation != "sequence_mean":
            raise ValueError(
                f"loss_aggregation: expected sequence_mean or auto with policy_loss gspo, got {self.loss_aggregation}; its ratio is one "
                "per sequence, and other means would weigh long responses again"
            )
        if self.dual_clip is not None and self.policy_loss != "ppo_clip":
            raise ValueError(f"dual_clip: expected null with policy_loss {self.policy_loss}, got {self.dual_clip}; it belongs to ppo_clip")
        if self.lora is not None and self.lora.dropout:
            raise ValueError(
                f"lora.dropout: expected 0 in rl, got {self.lora.dropout}; the ratio compares log-probabilities before and after an "
                "update, and dropout would change them by itself"
            )
        if self.dynamic_sampling.enabled and self.group_size < 2:
            raise ValueError(
                f"dynamic_sampling: expected {self.algorithm}.group_size of at least 2, got {self.group_size}; a group of one is always "
                "all right or all wrong"
            )
        if self.reward.overlong is not None and self.reward.overlong.buffer > self.rollout.max_new_tokens:
            raise ValueError(
                f"reward.overlong.buffer: expected at most rollout.max_new_tokens={self.rollout.max_new_tokens}, got "
                f"{self.reward.overlong.buffer}; lower it"
            )
        if self.kl.target is not None and self.kl.horizon <= self.samples_per_step / 5:
            raise ValueError(
                f"kl.horizon: expected more than a fifth of samples_per_step={self.samples_per_step} with a target, got {self.kl.horizon}; "
                "one step could make the coefficient 0"
            )
        known = ("score", *(s.name for s in self.reward.scorers))
        if self.evaluation.metric not in known:
            raise ValueError(
                f"evaluation.metric: expected one of {list(known)}, got {self.evaluation.metric!r}; name the score or a scorer"
            )
        if any(weight <= 0 for weight in self.prompt_weights.values()):
            raise ValueError(
                f"prompt_weights: expected weights above 0, got {self.prompt_weights}; leave a source out of data.sources instead"
            )
        return self

    @model_validator(mode="after")
    def _limits_watch_what_is_measured(self):
        known = [column for column in curve_columns(self) if column not in ("step", "scorer_metrics")]
        for name, limit in self.limits.items():
            key = f"monitor.{name}"
            if limit.metric not in known:
                raise ValueError(f"{key}.metric: expected a column of the curves, one of {known}, got {limit.metric!r}; correct it")
            if limit.metric in KL_COLUMNS and not self.kl.keeps_reference:
                raise ValueError(
                    f"{key}.metric: expected one that is measured, got {limit.metric} with kl.coef 0 and kl.measure false; set kl.measure "
                    f"to true or {key} to null"
                )
            if limit.action == "rollback" and self.evaluation.every is None:
                raise ValueError(
                    f"{key}.action: expected evaluation.every with rollback, got null; without an evaluation nothing says which policy was "
                    "the best"
                )
        return self


# Of the curves of RL: what needs a reference, and what every step's update says.
KL_COLUMNS = ("kl_mean", "kl_token_mean", "kl_token_min", "kl_token_max", "frontier_gap")
_BATCH_COLUMNS = (
    *("score_mean", "score_std", "reward_mean", "kl_mean", "kl_coef", "entropy", "response_length", "cut_off_fraction"),
    *("kl_token_mean", "kl_token_min", "kl_token_max", "frontier_gap"),
    *("reward_length_correlation", "repetition", "distinct_1", "distinct_2", "unscored_fraction"),
)
_UPDATE_COLUMNS = (
    *("policy_loss", "value_loss", "clip_frac", "approx_kl", "policy_ratio_min", "policy_ratio_max"),
    *("grad_norm", "critic_grad_norm", "stopped_early", "explained_variance", "advantage_zero_fraction", "logprob_difference"),
    *("mismatch_mean", "mismatch_max", "mismatch_kl", "ratio_mean", "corrected_fraction"),
)


def curve_columns(rl: RlConfig) -> tuple[str, ...]:
    """Of plots/train_policy.csv. They follow from the configuration alone, so that a resumed run goes on with the same ones."""
    names = [s.name for s in rl.reward.scorers]
    columns = ["step", *_BATCH_COLUMNS, *(f"score_{n}" for n in names), *(f"failed_{n}" for n in names)]
    columns += [f"{kind}_{s.name}" for s in rl.reward.scorers if not s.weight for kind in ("gap", "agreement")]
    columns += [f"disagreement_{s.name}" for s in rl.reward.scorers if s.members > 1]
    columns += _UPDATE_COLUMNS
    columns += ["ptx_loss"] * (rl.ptx.coef > 0) + ["moe_aux_loss"] * (rl.moe_aux_coef > 0)
    columns += ["dynamic_rounds", "dropped_groups"] * rl.dynamic_sampling.enabled
    columns += ["eval_score", *(f"eval_{n}" for n in names)] * (rl.evaluation.every is not None)
    columns += ["scorer_metrics"] * any(s.kind == "function" for s in rl.reward.scorers)
    return tuple(columns)


PreferenceLoss = Literal["sigmoid", "robust", "hinge", "ipo", "simpo", "orpo", "apo_zero", "apo_down"]
REFERENCE_FREE = ("simpo", "orpo")


class DpoConfig(TrainingConfig):
    """Direct alignment on pairs; batch_size counts pairs."""

    steps: int = Field(gt=0)
    loss: PreferenceLoss
    beta: float = Field(gt=0)
    label_smoothing: float = Field(ge=0, lt=0.5)
    length_normalize: bool
    simpo_margin: float = Field(ge=0)
    nll_coef: float = Field(ge=0)
    reference: Literal["precomputed", "live"]

    @model_validator(mode="after")
    def _combinations_make_sense(self):
        if self.label_smoothing and self.loss not in ("sigmoid", "robust"):
            raise ValueError(
                f"label_smoothing: expected 0 with loss {self.loss}, got {self.label_smoothing}; sigmoid (conservative) and robust have it"
            )
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError("label_smoothing: expected above 0 with loss robust, got 0; it is the share of flipped labels that is assumed")
        if self.length_normalize and self.loss in ("ipo", *REFERENCE_FREE):
            raise ValueError(f"length_normalize: expected false with loss {self.loss}, got true; it is one per token already")
        return self


class KtoConfig(TrainingConfig):
    """Alignment on single responses marked good or bad; batch_size counts responses."""

    steps: int = Field(gt=0)
    loss: Literal["kto", "apo_zero_unpaired"]
    beta: float = Field(gt=0)
    desirable_weight: float = Field(ge=0)
    undesirable_weight: float = Field(ge=0)
    reference: Literal["precomputed", "live"]

    @model_validator(mode="after")
    def _something_to_learn(self):
        if not self.desirable_weight and not self.undesirable_weight:
            raise ValueError("desirable_weight: expected above 0 here or in undesirable_weight, got 0 in both; nothing would be learned")
        if self.loss == "kto" and self.batch_size < 2:
            raise ValueError("batch_size: expected at least 2 with loss kto, got 1; its KL is estimated with other rows' responses")
        return self


class SamplingConfig(Section):
    """How many responses are drawn for how many training prompts, and how."""

    prompts: int | None = Field(gt=0)
    samples_per_prompt: int = Field(ge=2)
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    max_concurrent_sequences: int = Field(gt=0)
    gpu_memory_fraction: float = Field(gt=0, lt=1)


class RejectionSamplingConfig(TrainingConfig):
    """Best of n by the scorers, then SFT on the best; min_score is in units of their weighted sum."""

    steps: int = Field(gt=0)
    sampling: SamplingConfig
    scorers: list[ScorerConfig] = Field(min_length=1)
    min_score: float | None

    @model_validator(mode="after")
    def _scores_are_raw(self):
        _check_raw_scorers(self.scorers)
        return self


class ConditionalSftConfig(TrainingConfig):
    """SFT on responses of every quality with the quality in the prompt; at inference the best is asked for (SteerLM)."""

    steps: int = Field(gt=0)
    label_by: Literal["preference", "scores"]
    levels: int = Field(ge=2, le=10)
    wanted: int = Field(ge=0)

    @model_validator(mode="after")
    def _levels_exist(self):
        if self.wanted >= self.levels:
            raise ValueError(f"wanted: expected a level from 0 to {self.levels - 1}, got {self.wanted}; the highest is the best")
        if self.label_by == "preference" and self.levels != 2:
            raise ValueError(f"levels: expected 2 with label_by preference (rejected, chosen), got {self.levels}; scores give more")
        return self


class PromotionConfig(Section):
    """When a round's policy takes the place of the one before.

    metric: win_rate (of the score, ties half) or judge (difference in shares, where the data has a judge), on held-out prompts.
    min_advantage: the lower end of the interval of the win rate minus a half, or of the difference, must be above this.
    """

    metric: Literal["win_rate", "judge"]
    prompts: int = Field(gt=0)
    confidence: float = Field(gt=0, lt=1)
    min_advantage: float = Field(ge=-1, le=1)


class IterativeConfig(Section):
    """Rounds of iterative DPO (flows/iterative_dpo.py); how a round trains is the section dpo, but for steps and learning rate."""

    start: Literal["sft", "policy", "registry"]
    steps: int = Field(gt=0)
    learning_rate: float = Field(gt=0)
    sampling: SamplingConfig
    scorers: list[ScorerConfig] = Field(min_length=1)
    min_margin: float = Field(ge=0)
    min_pairs: int = Field(ge=1)
    promotion: PromotionConfig

    @model_validator(mode="after")
    def _prompts_are_counted(self):
        if self.sampling.prompts is None:
            raise ValueError("sampling.prompts: expected a number of prompts per round, got null; rounds share the pool of prompts")
        return self

    @model_validator(mode="after")
    def _scores_are_raw(self):
        _check_raw_scorers(self.scorers)
        return self


Method = Literal["rl", "dpo", "kto", "rejection_sampling", "conditional_sft"]


class AlignmentConfig(Section):
    """Which way leads from the SFT model to the policy; each is the section and the module tasks/train_<method>.py of its name."""

    method: Method


class EvaluationConfig(Section):
    prompts: int = Field(gt=0)
    max_new_tokens: int = Field(gt=0)
    temperature: float = Field(gt=0)
    confidence: float = Field(gt=0, lt=1)
    table_rows: int = Field(gt=0)
    gpu_memory_fraction: float = Field(gt=0, lt=1)


class ReportConfig(Section):
    title: str


class ClusterConfig(Section):
    address: str | None
    start_timeout: float = Field(gt=0)
    threads: int = Field(gt=0)


class TrackingConfig(Section):
    tensorboard_dir: str | None
    wandb_project: str | None


class FlowConfig(Section):
    retries: int = Field(ge=0)
    retry_delay: float = Field(ge=0)
    stage_timeout: float = Field(gt=0)


class RegistryConfig(Section):
    """Promotion of a version in the registry of models by the flow `promote`; approval_timeout in seconds."""

    require_approval: bool
    approval_timeout: int = Field(gt=0)


class Params(Section):
    """The whole of params.yaml."""

    seed: int = Field(ge=0)
    model: ModelConfig
    data: DataConfig
    validation: ValidationConfig
    sft: SftConfig
    reward: RewardConfig
    gate: GateConfig
    alignment: AlignmentConfig
    rl: RlConfig
    dpo: DpoConfig
    kto: KtoConfig
    rejection_sampling: RejectionSamplingConfig
    conditional_sft: ConditionalSftConfig
    iterative: IterativeConfig
    evaluation: EvaluationConfig
    report: ReportConfig
    cluster: ClusterConfig
    tracking: TrackingConfig
    flow: FlowConfig
    promotion: RegistryConfig

    @model_validator(mode="after")
    def _responses_fit(self):
        for key, new in (
            ("rl.rollout", self.rl.rollout.max_new_tokens),
            ("rejection_sampling.sampling", self.rejection_sampling.sampling.max_new_tokens),
            ("iterative.sampling", self.iterative.sampling.max_new_tokens),
            ("evaluation", self.evaluation.max_new_tokens),
        ):
            if new >= self.model.max_length:
                raise ValueError(
                    f"{key}.max_new_tokens: expected less than model.max_length={self.model.max_length}, got {new}; "
                    "no token would be left for the prompt"
                )
        return self

    @model_validator(mode="after")
    def _scorers_exist(self):
        self.check_scorers("rl.reward.scorers", self.rl.reward.scorers)
        if self.alignment.method == "rejection_sampling":
            self.check_scorers("rejection_sampling.scorers", self.rejection_sampling.scorers)
        prompted = [s.name for s in self.data.sources if "prompt" in s.uses]
        if unknown := set(self.rl.prompt_weights) - set(prompted):
            raise ValueError(f"rl.prompt_weights: expected sources of prompts, {prompted}, got {sorted(unknown)}; correct the names")
        return self

    @model_validator(mode="after")
    def _own_reward_model_exists(self):
        if self.reward.enabled:
            return self
        if self.alignment.method == "rl" and self.rl.algorithm == "ppo" and self.rl.ppo.critic_init == "reward_model":
            raise ValueError(
                "rl.ppo.critic_init: expected sft while reward.enabled is false, got reward_model; there is none to start from"
            )
        if self.alignment.method == "conditional_sft" and self.conditional_sft.label_by == "scores":
            raise ValueError(
                "conditional_sft.label_by: expected preference while reward.enabled is false, got scores; they are the reward model's"
            )
        return self

    def check_scorers(self, key: str, scorers: list[ScorerConfig]) -> None:
        """What a list of scorers at `key` asks for is there: the chain's own reward model, data that the judge knows.

        For every section that is in use; whoever reads `iterative` asks for that one.

        Raises:
            ValueError: it isn't.
        """
        own = [s.name for s in scorers if s.kind == "reward_model" and s.path is None]
        if own and not self.reward.enabled:
            raise ValueError(f"{key}: expected none of kind reward_model without a path while reward.enabled is false, got {own}")
        for scorer in scorers:
            if scorer.name in own and scorer.members != self.reward.ensemble:
                raise ValueError(
                    f"{key}: expected members={self.reward.ensemble} of {scorer.name}, as reward.ensemble (the gate judges it as a whole), "
                    f"got {scorer.members}; set both to the same"
                )
        others = [s.name for s in self.data.sources if "prompt" in s.uses and s.kind != "clerk"]
        if others and any(s.kind == "judge" for s in scorers):
            raise ValueError(f"{key}: expected no judge for prompts of sources {others}, got one; it only knows the built-in data")


def read_stages(path: Path, params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The stages of a dvc.yaml by name, with `${section.key}` in it replaced from params as DVC does."""
    text = path.read_text(encoding="utf-8")
    return YAML(typ="safe", pure=True).load(fill_in(text, params))["stages"]


def fill_in(text: str, params: dict[str, Any]) -> str:
    """`${section.key}` replaced by what params say.

    Raises:
        ConfigError: params have no such key.
    """

    def value(found: re.Match[str]) -> str:
        node: Any = params
        for part in found[1].split("."):
            if not isinstance(node, dict) or part not in node:
                raise ConfigError(f"dvc.yaml: expected a key of params.yaml in {found[0]}, got none of that name; correct its spelling")
            node = node[part]
        return str(node)

    return re.sub(r"\$\{([\w.]+)\}", value, text)


def load_params(path: Path | str = "params.yaml") -> Params:
    """Read and check params.yaml.

    Raises:
        ConfigError: the file is missing, is not YAML, or a key is unknown, missing, or of the wrong type or value.
    """
    return parse_params(read_yaml(Path(path)), subject=str(path))


def read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: expected a readable parameter file, got {error.strerror}; run from the folder that has it") from error
    return read_yaml_text(text, str(path))


def read_yaml_text(text: str, subject: str) -> dict[str, Any]:
    """Args: subject: what the text is of, for messages."""
    try:
        tree = YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"{subject}: expected YAML, got {' '.join(str(error).split())}; fix that line") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{subject}: expected a mapping of sections, got {type(tree).__name__}; see the default params.yaml")
    return tree


def parse_params(tree: dict[str, Any], subject: str = "params") -> Params:
    try:
        return Params.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(subject, e) for e in error.errors())) from error


def _explain(subject: str, error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        return f"{subject}: {key}: expected a known key, got one that nothing reads; remove it or correct its spelling"
    if error["type"] == "missing":
        return f"{subject}: {key}: expected a value, got nothing; take it from the default params.yaml"
    if error["type"] == "value_error":
        message = str(error["ctx"]["error"])
        return f"{subject}: {key + '.' if key else ''}{message}"
    expected = re.sub(r"^Input should be ", "", error["msg"])
    return f"{subject}: {key}: expected {expected}, got {error['input']!r}; correct it there or in the override"


def apply_overrides(path: Path, overrides: dict[str, Any]) -> Params:
    """Write dotted overrides such as {"rl.algorithm": "grpo"} into params.yaml, comments kept, and check the result.

    Nothing is written when a key is unknown or a value is refused.

    Raises:
        ConfigError: naming the key.
    """
    yaml = YAML()
    yaml.preserve_quotes = True
    yaml.width = 4096
    yaml.indent(mapping=2, sequence=4, offset=2)
    yaml.representer.add_representer(type(None), lambda representer, _: representer.represent_scalar("tag:yaml.org,2002:null", "null"))
    read_yaml(path)  # for its error messages
    tree = yaml.load(path.read_text(encoding="utf-8"))
    for dotted, value in overrides.items():
        set_key(tree, dotted, value)
    plain = _plain(tree)
    params = parse_params(plain, subject="override")
    with path.open("w", encoding="utf-8") as file:
        yaml.dump(tree, file)
    return params


def set_key(tree: Any, dotted: str, value: Any) -> None:
    """Replace an existing key; list items are addressed by their number, as in data.sources.0.weight."""
    *parents, last = dotted.split(".")
    node = tree
    for part in [*parents, last]:
        holder = node
        if isinstance(holder, list) and part.isdigit() and int(part) < len(holder):
            node = holder[int(part)]
        elif isinstance(holder, dict) and part in holder:
            node = holder[part]
        else:
            known = (
                ", ".join(map(str, holder))
                if isinstance(holder, dict)
                else f"0 to {len(holder) - 1}"
                if isinstance(holder, list)
                else "nothing"
            )
            raise ConfigError(f"override {dotted}: expected a key of params.yaml, got {part!r} (known here: {known}); correct its spelling")
    holder[int(last) if isinstance(holder, list) else last] = value


def _plain(node: Any) -> Any:
    """ruamel's round-trip containers as plain ones, so that strict types accept them."""
    if isinstance(node, dict):
        return {str(k): _plain(v) for k, v in node.items()}
    if isinstance(node, list):
        return [_plain(v) for v in node]
    if isinstance(node, bool) or node is None:
        return node
    for kind in (int, float, str):
        if isinstance(node, kind):
            return kind(node)
    return node
