"""Checks params.yaml as a whole: which keys a configuration uses, and which values must fit together across sections."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from pydantic import Field, model_validator

from rlhf_core.config.alignment import (
    AlignmentConfig,
    ConditionalSftConfig,
    DpoConfig,
    ExternalConfig,
    IterativeConfig,
    KtoConfig,
    RejectionSamplingConfig,
)
from rlhf_core.config.base import RolloutBackend, Section
from rlhf_core.config.data import DataConfig, ValidationConfig
from rlhf_core.config.gate import GateConfig
from rlhf_core.config.model import ModelConfig, RewardConfig, SftConfig, SharedTrainingConfig
from rlhf_core.config.rl import RlConfig
from rlhf_core.config.run import (
    CheckpointsConfig,
    ClusterConfig,
    EvaluationConfig,
    FlowConfig,
    RegistryConfig,
    ReportConfig,
    TrackingConfig,
)
from rlhf_core.config.scorers import ScorerConfig, TeacherService, weight_conflicts
from rlhf_core.config.seeing import vision_conflicts
from rlhf_core.config.usual import CRITIC_RATES, LEARNING_RATES, SMALL_MODEL, WRECKING_FACTOR, nulls, usual, with_usual_rates

# Keys that are read with every method. A section of another method is not read, so its conflicts don't count.
ALWAYS_USED = (
    *("seed", "model", "data", "validation", "training", "sft.enabled", "sft.train_on", "sft.train_on_thoughts", "reward.enabled"),
    *("reward.path", "reward.step_separator", "alignment", "evaluation", "report", "rl.environment"),
    *("checkpoints", "cluster", "tracking", "flow", "promotion"),
)
# Key of `evaluation` -> the key of RL that counts if it is null.
EVALUATED_AS_IN_RL = {"scorers": "rl.reward.scorers", "backend": "rl.rollout.backend", "stop": "rl.rollout.stop"}
REWARD_MODEL_SECTIONS = ("reward", "gate")  # with reward.enabled
ROUND_SECTIONS = ("iterative", "dpo")  # for the flow iterative-dpo

UseAndSplit = tuple[str, str]


class Params(Section):
    """The whole of params.yaml."""

    seed: int = Field(ge=0, lt=2**32)  # what vLLM and numpy take
    model: ModelConfig
    data: DataConfig
    validation: ValidationConfig
    training: SharedTrainingConfig
    sft: SftConfig
    reward: RewardConfig
    gate: GateConfig
    alignment: AlignmentConfig
    rl: RlConfig
    dpo: DpoConfig
    kto: KtoConfig
    rejection_sampling: RejectionSamplingConfig
    conditional_sft: ConditionalSftConfig
    external: ExternalConfig
    iterative: IterativeConfig
    evaluation: EvaluationConfig
    report: ReportConfig
    checkpoints: CheckpointsConfig
    cluster: ClusterConfig
    tracking: TrackingConfig
    flow: FlowConfig
    promotion: RegistryConfig

    @model_validator(mode="before")
    @classmethod
    def completed(cls, tree: Any) -> Any:
        return with_usual_rates(tree)

    @property
    def evaluation_scorers(self) -> tuple[str, list[ScorerConfig]]:
        """The evaluation's scorers, with their key: by default those of RL, without the chain's own reward model if none is trained."""
        if self.evaluation.scorers is not None:
            return "evaluation.scorers", self.evaluation.scorers
        return "rl.reward.scorers", [s for s in self.rl.reward.scorers if self.reward.enabled or not s.is_own_reward_model]

    @property
    def evaluation_backend(self) -> RolloutBackend:
        return self.evaluation.backend or self.rl.rollout.backend

    @property
    def harness_max_length(self) -> int:
        """Tokens of a request of evaluation.harness and its answer together."""
        return (self.evaluation.harness and self.evaluation.harness.max_length) or self.model.max_length

    @property
    def evaluation_stop(self) -> list[str]:
        """The strings that end an answer of the evaluation."""
        return self.rl.rollout.stop if self.evaluation.stop is None else self.evaluation.stop

    @property
    def method_scorers(self) -> tuple[str, list[ScorerConfig]] | None:
        """The scorers that the method learns from, with their key; None if the method learns from data."""
        lists = {
            "rl": ("rl.reward.scorers", self.rl.reward.scorers),
            "rejection_sampling": ("rejection_sampling.scorers", self.rejection_sampling.scorers),
        }
        return lists.get(self.alignment.method)

    @property
    def teachers(self) -> dict[str, str]:
        """Folder or Hugging Face name of each teacher that the method learns from, by its key."""
        distillation = self.rl.distillation if self.alignment.method == "rl" else None
        teachers = [] if distillation is None else distillation.teachers
        return {f"rl.distillation.teachers.{n}.path": teacher.path for n, teacher in enumerate(teachers) if teacher.path is not None}

    @property
    def teacher_services(self) -> dict[str, TeacherService]:
        """The services that the method learns from as teachers, by their key."""
        distillation = self.rl.distillation if self.alignment.method == "rl" else None
        teachers = [] if distillation is None else distillation.teachers
        return {f"rl.distillation.teachers.{n}.service": of.service for n, of in enumerate(teachers) if of.service is not None}

    @property
    def scorers_in_use(self) -> dict[str, list[ScorerConfig]]:
        """The scorers of the evaluation and of the method, by their key."""
        return dict(filter(None, [self.evaluation_scorers, self.method_scorers]))

    @property
    def rewarded_judges(self) -> dict[str, ScorerConfig]:
        """The language models by whose verdicts the method or a round of iterative DPO learns, by their key."""
        lists = dict(filter(None, [self.method_scorers])) | {"iterative.scorers": self.iterative.scorers}
        return {f"{key}.{s.name}": s for key, scorers in lists.items() for s in scorers if s.is_rewarded_judge}

    @property
    def environment(self) -> list[str]:
        """Further environment variables that stages see: those of flow.environment, and those that hold keys of scorers in use."""
        lists = [*self.scorers_in_use.values(), self.iterative.scorers]
        services = [*(scorer for scorers in lists for scorer in scorers), *self.teacher_services.values()]
        keys = [service.api_key_env for service in services if service.api_key_env]
        return list(dict.fromkeys([*self.flow.environment, *keys]))

    def conflicts(self) -> Iterator[str]:
        """Values of different sections that don't fit together; `conflicts` below leaves out sections that aren't read."""
        yield from self._length_conflicts()
        yield from self._sample_conflicts()
        yield from self._divided_conflicts()
        if self.rl.rollout.quantization is not None and self.model.dtype != "bfloat16":
            yield (
                f"rl.rollout.quantization: expected null with model.dtype {self.model.dtype}, got {self.rl.rollout.quantization}; set it "
                "to null or model.dtype to bfloat16, because vLLM's FP8 layers compute between bfloat16 ones"
            )
        if self.rl.rollout.send_changes and self.model.dtype != "bfloat16":
            yield (
                f"rl.rollout.send_changes: expected false with model.dtype {self.model.dtype}, got true; change one, because in every "
                "update nearly all numbers change unless they round to fewer bits"
            )
        if self.alignment.method == "rl" and self.rl.distillation is None:
            yield from (f"rl.reward.{conflict}" for conflict in weight_conflicts(self.rl.reward.scorers))
        for key, scorers in (self.scorers_in_use | {"iterative.scorers": self.iterative.scorers}).items():
            yield from self._scorer_conflicts(key, scorers)
        prompted = [s.name for s in self.data.sources if "prompt" in s.uses]
        if unknown := set(self.rl.prompt_weights) - set(prompted):
            yield f"rl.prompt_weights: expected sources of prompts, {prompted}, got {sorted(unknown)}; correct the names"
        if prompted and not any(self.rl.prompt_weights.get(name, 1.0) for name in prompted):
            yield f"rl.prompt_weights: expected a source of prompts with a weight above 0, got {self.rl.prompt_weights}; raise one"
        if unknown := set(self.rl.evaluation.sources) - set(prompted):
            yield f"rl.evaluation.sources: expected sources of prompts, {prompted}, got {sorted(unknown)}; correct the names"
        if self.rl.rollout.is_journaled and self.cluster.storage is not None:
            yield (
                f"rl.rollout.schedule: expected counted with cluster.storage, got {self.rl.rollout.schedule}; change one, because the "
                "journal is on the driver's disk, and another node may go on"
            )
        if not self.reward.enabled:
            yield from self._reward_model_conflicts()
        if self.reward.path is not None and self.rl.critic_starts_from_reward_model:
            yield (
                f"rl.{self.rl.algorithm}.critic_init: expected sft with reward.path, got {self.rl.critic.critic_init}; set it to sft, "
                "because a ready-made reward model may have layers and a tokenizer other than the policy's"
            )
        yield from self._step_conflicts()
        yield from vision_conflicts(self)
        if not self.sft.enabled and self.model.path is None:
            yield "sft.enabled: expected true without model.path, got false; set model.path to the model to start from, or train one by SFT"

    def _step_conflicts(self) -> Iterator[str]:
        """Conflicts of a process reward model, or of labelled steps without one."""
        stepwise = [s.name for s in self.data.sources if "stepwise" in s.uses]
        if self.reward.step_separator is None:
            if stepwise:
                yield (
                    f"reward.step_separator: expected the text between steps with sources of use stepwise, {stepwise}, got null; set it, "
                    'such as to "\\n\\n", or take stepwise out of their uses'
                )
            return
        if not stepwise:
            yield (
                f"reward.step_separator: expected null without a source of use stepwise, got {self.reward.step_separator!r}; add one, with "
                "labelled steps (docs/process.md), or set it to null"
            )
        if not self.reward.enabled:
            yield f"reward.step_separator: expected null with reward.enabled false, got {self.reward.step_separator!r}; change one of them"
        if self.conditional_sft.label_by == "scores" and self.alignment.method == "conditional_sft":
            yield "conditional_sft.label_by: expected preference with a process reward model, got scores; set label_by to preference"
        if self.rl.critic is not None and self.rl.critic.critic_init == "reward_model":
            yield (
                f"rl.{self.rl.algorithm}.critic_init: expected reward_model_trunk or sft with a process reward model, whose scores are of "
                "single steps, got reward_model; change it"
            )
        of_pairs = ("min_slice_accuracy", "min_shorter_accuracy", "max_format_shift")
        for key, limit in ((key, getattr(self.gate, key)) for key in of_pairs):
            if limit is not None:
                yield f"gate.{key}: expected null with a process reward model, which has no pairs to judge by, got {limit:g}; remove it"
        if self.gate.external:
            yield (
                "gate.external: expected none with a process reward model, which is judged by labelled steps, got "
                f"{[e.name for e in self.gate.external]}; take them out"
            )

    def _length_conflicts(self) -> Iterator[str]:
        for key, new in (
            ("rl.rollout", self.rl.rollout.max_new_tokens),
            ("rejection_sampling.sampling", self.rejection_sampling.sampling.max_new_tokens),
            ("iterative.sampling", self.iterative.sampling.max_new_tokens),
            ("evaluation", self.evaluation.max_new_tokens),
        ):
            if new >= self.model.max_length:
                yield (
                    f"{key}.max_new_tokens: expected less than model.max_length={self.model.max_length}, got {new}; "
                    "no token would be left for the prompt"
                )
        if self.model.path is None and self.harness_max_length > self.model.max_length:
            yield (
                f"evaluation.harness.max_length: expected at most model.max_length={self.model.max_length} of a model from nothing, got "
                f"{self.harness_max_length}; lower it"
            )

    def _divided_conflicts(self) -> Iterator[str]:
        ranks = self.cluster.inference_ranks_per_model
        for key, backend in (
            ("rl.rollout", self.rl.rollout.backend),
            ("rejection_sampling.sampling", self.rejection_sampling.sampling.backend),
            ("iterative.sampling", self.iterative.sampling.backend),
            ("evaluation", self.evaluation.backend),
        ):
            if ranks > 1 and backend not in ("vllm", None):
                yield f"{key}.backend: expected vllm with cluster.inference_ranks_per_model={ranks}, got {backend}; change one of them"

    def _sample_conflicts(self) -> Iterator[str]:
        sources = [source for source in self.data.sources if source.kind == "samples"]
        if sources and self.model.path is None:
            yield f"model.path: expected a pretrained model, from which source {sources[0].name} of kind samples draws, got null; set it"
        for source in sources:
            new = 0 if source.samples is None else source.samples.opening_tokens + source.samples.max_new_tokens
            if new >= self.model.max_length:
                yield (
                    f"data.sources.{source.name}.samples: expected opening_tokens and max_new_tokens of less than "
                    f"model.max_length={self.model.max_length} together, got {new}; no token would be left for the opening"
                )

    def _reward_model_conflicts(self) -> Iterator[str]:
        """Sections that would start from the missing reward model if reward.enabled is false."""
        if self.rl.critic_starts_from_reward_model:
            yield (
                f"rl.{self.rl.algorithm}.critic_init: expected sft while reward.enabled is false, got {self.rl.critic.critic_init}; set it "
                "to sft, for there is no reward model to start from"
            )
        if self.conditional_sft.label_by == "scores":
            yield (
                "conditional_sft.label_by: expected preference while reward.enabled is false, got scores, which the reward model gives; "
                "set label_by to preference, levels to 2 and wanted to 1"
            )

    def _scorer_conflicts(self, key: str, scorers: list[ScorerConfig]) -> Iterator[str]:
        """Conflicts of a list of scorers at `key` that needs a reward model or a judge which the chain doesn't have."""
        own = [s for s in scorers if s.is_own_reward_model]
        if own and not self.reward.enabled:
            yield (
                f"{key}: expected none of kind reward_model without a path while reward.enabled is false, got {[s.name for s in own]}; put "
                "other scorers in their place, or set reward.enabled to true"
            )
        for scorer in own:
            if scorer.steps is not None and self.reward.step_separator is None:
                yield (
                    f"{key}: expected no steps of {scorer.name} without reward.step_separator, got {scorer.steps}; remove it, or train a "
                    "process reward model"
                )
            if scorer.members != self.reward.ensemble:
                yield (
                    f"{key}: expected members={self.reward.ensemble} of {scorer.name}, as reward.ensemble (the gate judges the whole "
                    f"ensemble), got {scorer.members}; set both to the same number"
                )
        played = key in ("rl.reward.scorers", "evaluation.scorers") and self.rl.environment is not None
        if scores := [s.name for s in scorers if s.kind == "environment" and not (played and self.rl.environment.scores)]:
            yield (
                f"{key}: expected none of kind environment without rl.environment.path or rl.environment.command, which score, got "
                f"{scores}; remove it"
            )
        compared = [s.name for s in scorers if s.mode == "head_to_head"]
        if compared and (key != "evaluation.scorers" or self.rl.environment is not None):
            yield (
                f"{key}: expected mode head_to_head in evaluation.scorers alone, where two models answer, and without rl.environment, "
                f"whose turns differ, got {compared}; set mode to pairwise, which compares with the prompt's label, or to pointwise"
            )
        rewarded = [s for s in scorers if f"{key}.{s.name}" in self.rewarded_judges]
        of_rows = [s.name for s in rewarded if s.mode == "rubric" and s.criteria is None]
        if of_rows and self.gate.override is None:
            yield (
                f"{key}: expected criteria of the judges {of_rows}, got none: the gate can't judge them by pairs, whose rows have none; "
                "write criteria, set weight to 0, or write into gate.override why they may be used anyway"
            )
        others = [s.name for s in self.data.sources if "prompt" in s.uses and s.judge_name is None]
        if others and any(s.kind == "judge" for s in scorers):
            yield f"{key}: expected no judge for prompts of sources {others}, which have none; give those sources a rule as `judge`"


def keys_in_use(params: Params, *, rounds: bool = False) -> tuple[str, ...]:
    """Sections and keys that the configuration reads, each with all below it. A method reads the section of its name.

    Args:
        rounds: for a series of rounds of iterative DPO, which reads further sections.
    """
    # A section with wrong types is left out of params, and its judges aren't known.
    has_judges = all(hasattr(params, name) for name in ("rl", "rejection_sampling", "iterative")) and bool(params.rewarded_judges)
    return (
        *(*ALWAYS_USED, params.alignment.method),
        *(key for own, key in EVALUATED_AS_IN_RL.items() if getattr(params.evaluation, own) is None),
        *(["sft"] if params.sft.enabled else []),
        *(REWARD_MODEL_SECTIONS if params.reward.enabled else ["gate"] * has_judges),
        *(ROUND_SECTIONS if rounds else ()),
    )


def incomplete(tree: dict[str, Any], params: Params, *, rounds: bool = False) -> Iterator[str]:
    """What valid params still lack for a run: a model, data, and learning rates where there are no usual ones.

    Args:
        tree: params as written.
        rounds: for a series of rounds of iterative DPO.
    """
    model = params.model.path is not None or params.model.architecture is not None
    if not model or not params.data.sources:
        needed = (("model.path", "model", model), ("data.sources", "data", params.data.sources))
        missing = {key: what for key, what, given in needed if not given}
        yield (
            f"{' and '.join(missing)}: expected your {' and your '.join(missing.values())}, got none; add --params and a recipe that names "
            "both, such as recipes/clerk.yaml, or the one that `rlhf data check FILE --recipe mine.yaml` writes for your data"
        )
    elif params.model.path is None:
        used = rates_in_use(params, rounds=rounds)
        for key in (key for key in nulls(tree) if key in used):
            yield f"{key}: expected a number without model.path, got null; write one, because null is the usual rate of pretrained models"


def rates_in_use(params: Params, *, rounds: bool = False) -> list[str]:
    """Return the keys of the learning rates with which a run trains, without that of pretraining."""
    used = tuple(f"{name}." for name in keys_in_use(params, rounds=rounds))
    keys = [key for key in (*LEARNING_RATES, "iterative.learning_rate") if key.startswith(used)]
    unused = {*CRITIC_RATES} - {f"rl.{params.rl.algorithm}.critic_learning_rate"}
    unused |= set() if params.reward.is_trained else {"reward.learning_rate"}
    return [key for key in keys if key not in unused]


def unusual(params: Params, parameters: int | None, *, rounds: bool = False) -> list[str]:
    """Learning rates in use so far above the usual range that they wreck pretrained models, each with that range.

    Args:
        parameters: of the model; None: unknown, which counts as large.
        rounds: for a series of rounds of iterative DPO.
    """
    if params.model.path is None or (parameters is not None and parameters < SMALL_MODEL):
        return []
    found = []
    for key in rates_in_use(params, rounds=rounds):
        trained = params.dpo if key.startswith("iterative.") else getattr(params, key.partition(".")[0])
        lora = trained.lora is not None and key not in CRITIC_RATES  # rl.lora is the policy's
        usually = usual("dpo.learning_rate" if trained is params.dpo else key, lora=lora, optimizer=trained.optimizer)
        rate = reduce(getattr, key.split("."), params)
        if rate > WRECKING_FACTOR * usually.high:
            found.append(f"{key}: {'LoRA' if lora else 'full'} training at {rate:g}; usual {usually} (docs/training.md)")
    return found


def rows_needed(params: Params) -> tuple[UseAndSplit, ...]:
    """Return the uses and splits of data/prepared that must have rows.

    train_sft and RL with rl.ptx read demonstrations, and evaluate answers held-out prompts. The gate of a reward model or a judge reads
    preferences of the split test, and a reward model that is trained those of train; for a process reward model both are labelled steps.
    DPO, KTO and conditional SFT learn from preferences of train, RL and rejection sampling from its prompts, and a policy from elsewhere
    from nothing.
    """
    needed: list[UseAndSplit] = [("prompt", "test")]
    method = params.alignment.method
    if params.sft.enabled or (method == "rl" and params.rl.ptx.coef):
        needed.append(("sft", "train"))
    if params.reward.enabled:
        needed.append((params.reward.rows_use, "test"))
    if params.rewarded_judges:
        needed.append(("preference", "test"))
    if params.reward.is_trained:
        needed.append((params.reward.rows_use, "train"))
    if method != "external":
        needed.append(("prompt" if params.method_scorers is not None else "preference", "train"))
    return tuple(sorted(set(needed)))


def needs_pairs(params: Params) -> bool:
    """Return whether a stage learns from two responses to one prompt; KTO and conditional SFT also take single responses with a label."""
    return (params.reward.enabled and params.reward.step_separator is None) or params.alignment.method == "dpo"


def conflicts(params: Params, *, rounds: bool = False) -> list[str]:
    """Return every conflict among the keys that the configuration uses, as `key: expected X, got Y; what to do`, sorted by key.

    Args:
        rounds: for a series of rounds of iterative DPO.
    """
    return sorted(set(used_conflicts(params, "", keys_in_use(params, rounds=rounds))))


def used_conflicts(section: Section, path: str, used: tuple[str, ...]) -> Iterator[str]:
    """The conflicts of a section and of all sections in it whose keys are at or below one of `used`.

    Args:
        path: of the section, with a dot after it; empty for the whole of params.yaml.
    """
    for conflict in section.conflicts():
        key = f"{path}{conflict}".partition(": ")[0]
        if any(key == prefix or key.startswith(f"{prefix}.") for prefix in used):
            yield f"{path}{conflict}"
    for name in type(section).model_fields:
        value = getattr(section, name)
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else [(None, value)]
        for key, item in items:
            if isinstance(item, Section):
                yield from used_conflicts(item, f"{path}{name}." if key is None else f"{path}{name}.{key}.", used)
