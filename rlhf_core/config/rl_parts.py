"""The sections inside `rl`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, create_model

from rlhf_core.algorithms.online import ALGORITHMS, Algorithm
from rlhf_core.config.base import LearningRate, Section
from rlhf_core.config.scorers import TeacherService


class CriticConfig(Section):
    """Keys of the critic, in the section of an algorithm that has one."""

    value_clip: float | None = Field(gt=0)
    value_coef: float = Field(gt=0)
    critic_learning_rate: LearningRate
    critic_init: Literal["reward_model", "reward_model_trunk", "sft"]
    critic_warmup_steps: int = Field(ge=0)

    @property
    def starts_from_reward_model(self) -> bool:
        """Whether the critic starts from the chain's reward model, or from its layers below the head."""
        return self.critic_init != "sft"


def _algorithm_section(name: str, spec: Algorithm) -> type[Section]:
    """Return the section `rl.<name>` of an algorithm."""
    fields: dict[str, Any] = {"group_size": (int, Field(spec.group_size, ge=spec.smallest_group))}
    for key, default in spec.settings.items():
        fields[key] = (bool, default) if isinstance(default, bool) else (float, Field(default, ge=0.0, le=1.0))
    base = CriticConfig if spec.critic else Section
    return create_model(f"{name.title().replace('_', '')}Config", __base__=base, __module__=__name__, **fields)


ALGORITHM_SECTIONS = {name: _algorithm_section(name, spec) for name, spec in ALGORITHMS.items()}
globals().update({section.__name__: section for section in ALGORITHM_SECTIONS.values()})  # where pickle looks for them


class SapoConfig(Section):
    """Temperatures of SAPO's gate, for tokens with an advantage above 0 and for the others; a higher one fades gradients sooner."""

    positive_temperature: float = Field(default=1.0, gt=0)
    negative_temperature: float = Field(default=1.05, gt=0)


class KlConfig(Section):
    coef: float = Field(ge=0)
    placement: Literal["reward", "loss"]
    estimator: Literal["k1", "k2", "k3"]
    target: float | None = Field(gt=0)
    horizon: int = Field(default=10_000, gt=0)
    refresh_reference_every: int | None = Field(default=None, gt=0)
    measure: bool

    @property
    def keeps_reference(self) -> bool:
        """Whether the reference model is kept, to penalise or measure the KL."""
        return self.coef > 0 or self.measure

    @property
    def in_reward(self) -> bool:
        """Whether the KL penalty is subtracted from the rewards."""
        return self.coef > 0 and self.placement == "reward"

    def conflicts(self) -> Iterator[str]:
        if self.placement == "loss" and self.estimator == "k1":
            yield "estimator: expected k2 or k3 with placement loss, got k1; choose one, because the gradient of k1 is zero in expectation"
        for name, value in (("target", self.target), ("refresh_reference_every", self.refresh_reference_every)):
            if self.coef == 0 and value is not None:
                yield f"{name}: expected null with coef 0, got {value}; raise coef or remove it"


class TeacherConfig(Section):
    """A teacher of rl.distillation with the policy's tokens: a folder, a Hugging Face name or a service, and its weight among several."""

    path: str | None = None
    service: TeacherService | None = None
    weight: float = Field(default=1.0, gt=0)

    def conflicts(self) -> Iterator[str]:
        if (self.path is None) == (self.service is None):
            yield f"path: expected either a path or a service, got {'none' if self.path is None else 'both'}; set one of them"


class DistillationConfig(Section):
    """On-policy distillation: the policy learns the teachers' distribution at each token of its own responses (docs/distillation.md).

    loss: sampled needs the teachers' log-probability of the sampled token alone, the others their whole distribution.
    top_k: the others compare a teacher's so many likeliest tokens and the rest as one; null: all tokens.
    beta: of jsd: near 0 it is like forward_kl, near 1 like reverse_kl.
    coef: of the divergence in the policy's loss, beside the policy loss of a reward.
    teacher_template: what teachers read in place of the last user message, which {prompt} stands for, as {label} for the prompt's label.
    """

    teachers: list[TeacherConfig] = Field(min_length=1)
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    top_k: int | None = Field(default=None, ge=1)
    beta: float = Field(default=0.5, gt=0, lt=1)
    coef: float = Field(default=1.0, gt=0)
    teacher_template: str | None = None

    @property
    def compares_distributions(self) -> bool:
        """Whether the loss is of distributions, and not of sampled tokens alone."""
        return self.loss != "sampled"

    @property
    def compares_whole_distributions(self) -> bool:
        return self.compares_distributions and self.top_k is None

    @property
    def services(self) -> list[TeacherService]:
        return [teacher.service for teacher in self.teachers if teacher.service is not None]

    @property
    def early_weights(self) -> list[float]:
        """The weights of teachers that answer before the update: first those on trainer ranks, then services."""
        return [t.weight for t in sorted(self.teachers, key=lambda teacher: teacher.service is not None)]

    @property
    def reads_label(self) -> bool:
        """Whether teachers read the prompt's label."""
        return self.teacher_template is not None and "{label}" in self.teacher_template

    @property
    def options(self) -> dict[str, float]:
        """Arguments of the divergence besides the log-probabilities."""
        return {"beta": self.beta} if self.loss == "jsd" else {}

    def conflicts(self) -> Iterator[str]:
        if self.loss != "jsd" and self.beta != 0.5:
            yield f"beta: expected 0.5, the default, with loss {self.loss}, got {self.beta}; only jsd has it, so remove it"
        if self.loss == "sampled" and self.top_k is not None:
            yield f"top_k: expected null with loss sampled, got {self.top_k}; set it to null, or choose another loss"
        if self.services and self.compares_whole_distributions:
            yield f"top_k: expected a number with a service and loss {self.loss}, got null; set it, such as to 16, or loss to sampled"
        if self.teacher_template is not None and "{prompt}" not in self.teacher_template:
            yield "teacher_template: expected {prompt} in it, got none; put it where the user's message belongs"


class CorrectionConfig(Section):
    kind: Literal["none", "tis", "icepop", "sequence_tis", "sequence_mask"]
    low: float = Field(ge=0)
    high: float = Field(gt=0)

    def conflicts(self) -> Iterator[str]:
        if self.low >= self.high:
            yield f"low: expected less than high={self.high}, got {self.low}; swap or change them"


class DynamicSamplingConfig(Section):
    enabled: bool
    max_rounds: int = Field(ge=1)


class CurriculumConfig(Section):
    """Which prompts are drawn, and in which order.

    by: success: rarely those that the policy always or never solves; column: in the order of a column of the data, smallest first.
    column: a name in the sources' `slices`.
    scorer: whose raw scores say success, from `threshold` on; score: the weighted sum.
    half_life: steps in which a measured success loses half its weight.
    floor: the least share of its turns in which a prompt is drawn.
    """

    by: Literal["success", "column"]
    column: str | None = None
    scorer: str = "score"
    threshold: float = 0.5
    half_life: float = Field(default=20.0, gt=0)
    floor: float = Field(default=0.05, gt=0, le=1)

    def conflicts(self) -> Iterator[str]:
        if (self.by == "column") != (self.column is not None):
            wanted = "a name in the slices of the prompts' sources" if self.by == "column" else "null"
            yield f"column: expected {wanted} with by {self.by}, got {self.column or 'null'}; set it, or change by"


class PtxConfig(Section):
    coef: float = Field(ge=0)
    batch_size: int = Field(gt=0)


class PeriodicEvaluationConfig(Section):
    """The evaluation during training, on validation prompts.

    samples: sampled responses to each prompt beside the greedy one, for pass@k. pass_score: what the metric of one that passes is at least.
    sources: data sources that are evaluated apart, on `prompts` prompts each; []: all sources together.
    """

    every: int | None = Field(gt=0)
    prompts: int = Field(gt=0)
    metric: str
    keep_best: bool
    samples: int = Field(default=0, ge=0)
    pass_score: float = 1.0
    sources: list[str] = Field(default_factory=list)

    @property
    def measures(self) -> tuple[str, ...]:
        """Names of what has an interval, and a value for each of `sources`."""
        return ("score", *(f"pass_{k}" for k in dict.fromkeys((1, self.samples)) if self.samples))

    @property
    def columns(self) -> list[str]:
        """Columns of the curves beside `eval_score` and those of the scorers."""
        ends, without_score = ("", "_low", "_high"), [f"eval_{name}" for name in self.measures[1:]]
        columns = [*without_score, *(f"eval_{name}{end}" for name in self.measures for end in ends[1:])]
        return columns + [f"eval_{name}{end}.{source}" for source in self.sources for name in self.measures for end in ends]

    def conflicts(self) -> Iterator[str]:
        set_up = {"keep_best": self.keep_best, "samples": self.samples > 0, "sources": bool(self.sources)}
        for key in (key for key, is_set in set_up.items() if is_set and self.every is None):
            yield f"{key}: expected a number of steps in every, got null; set every, or remove {key}"
        if self.pass_score != 1.0 and not self.samples:
            yield f"pass_score: expected 1 without samples, got {self.pass_score}; set samples, or remove it"
        if len(set(self.sources)) < len(self.sources):
            yield f"sources: expected each source once, got {self.sources}; remove the others"


class DeadlineConfig(Section):
    """Seconds after which the start of an actor, or its work in one step, counts as failed."""

    start: float = Field(default=300.0, gt=0)
    step: float = Field(default=600.0, gt=0)
