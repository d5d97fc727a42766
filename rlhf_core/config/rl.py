"""Settings of online RL."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from rlhf_core.algorithms.online import ALGORITHMS, Algorithm
from rlhf_core.config.base import LearningRate, Section
from rlhf_core.config.curves import LimitConfig, completed_limits
from rlhf_core.config.model import LengthConfig, LoraConfig, OptimizerConfig, Schedule
from rlhf_core.config.placement import ROLES, Role, RoleGroup, TrainerConfig, named_placement
from rlhf_core.config.rl_conflicts import rl_conflicts
from rlhf_core.config.rl_parts import (
    ALGORITHM_SECTIONS,
    CorrectionConfig,
    CriticConfig,
    CurriculumConfig,
    DeadlineConfig,
    DistillationConfig,
    DynamicSamplingConfig,
    KlConfig,
    PeriodicEvaluationConfig,
    PtxConfig,
    SapoConfig,
)
from rlhf_core.config.rollout import EnvironmentConfig, RolloutConfig
from rlhf_core.config.scorers import ScoreConfig

CACHE_BLOCK = 16  # tokens of a block of vLLM's cache on a GPU


class RlSettings(OptimizerConfig, LengthConfig):
    """`RlConfig` but for the sections of the algorithms.

    epochs: passes over the training prompts. ppo_epochs: passes over each rollout batch. max_minutes: as in SharedTrainingConfig.
    """

    algorithm: Literal[tuple(ALGORITHMS)]
    max_minutes: float | None = Field(default=None, gt=0)
    samples_per_step: int = Field(gt=0)
    minibatch_size: int = Field(gt=0)
    ppo_epochs: int = Field(ge=1)
    learning_rate: LearningRate
    schedule: Schedule = "constant"
    warmup_steps: int = Field(ge=0)
    min_learning_rate_fraction: float = Field(default=0.0, ge=0, le=1)
    policy_loss: Literal["ppo_clip", "gspo", "cispo", "dppo_tv", "dppo_kl", "sapo"]
    loss_aggregation: Literal["auto", "token_mean", "sequence_mean", "constant_horizon"]
    clip_low: float = Field(gt=0, lt=1)
    clip_high: float = Field(gt=0)
    dual_clip: float | None = Field(default=None, gt=1)
    sapo: SapoConfig = Field(default_factory=SapoConfig)
    entropy_coef: float = Field(ge=0)
    moe_aux_coef: float = Field(default=0.0, ge=0)
    max_approx_kl: float | None = Field(gt=0)
    lora: LoraConfig | None
    kl: KlConfig
    distillation: DistillationConfig | None
    reward: ScoreConfig
    correction: CorrectionConfig
    dynamic_sampling: DynamicSamplingConfig
    curriculum: CurriculumConfig | None
    ptx: PtxConfig
    prompt_weights: dict[str, float] = Field(default_factory=dict)
    environment: EnvironmentConfig | None
    rollout: RolloutConfig
    evaluation: PeriodicEvaluationConfig
    monitor: dict[str, LimitConfig | None] = Field(default_factory=dict)
    placement: Annotated[list[RoleGroup], BeforeValidator(named_placement, json_schema_input_type=str | list[Any])]
    trainer: TrainerConfig
    checkpoint_every: int = Field(gt=0)
    save_rollouts_every: Literal["auto"] | Annotated[int, Field(gt=0)] | None = "auto"
    deadlines: DeadlineConfig = Field(default_factory=DeadlineConfig)
    max_replacements: int = Field(default=4, ge=0)

    @model_validator(mode="before")
    @classmethod
    def completed(cls, tree: Any) -> Any:
        monitor = tree.get("monitor", {}) if isinstance(tree, dict) else None
        return tree | {"monitor": completed_limits(monitor)} if isinstance(monitor, dict) else tree

    @property
    def spec(self) -> Algorithm:
        """What the algorithm is and needs."""
        return ALGORITHMS[self.algorithm]

    @property
    def own(self) -> Section:
        """The section of the algorithm."""
        return getattr(self, self.algorithm)

    @property
    def critic(self) -> CriticConfig | None:
        """The keys of the critic, which are in the algorithm's section; None: the algorithm has no critic."""
        return self.own if isinstance(self.own, CriticConfig) else None

    @property
    def critic_starts_from_reward_model(self) -> bool:
        return self.critic is not None and self.critic.starts_from_reward_model

    @property
    def group_size(self) -> int:
        """Samples per prompt."""
        return self.own.group_size

    @property
    def rollout_batch_size(self) -> int:
        """Prompts per step."""
        return self.samples_per_step // self.group_size

    @property
    def rollouts_every(self) -> int | None:
        """`save_rollouts_every` with auto resolved, to a tenth of the run; `steps` is known."""
        return max(1, self.steps // 10) if self.save_rollouts_every == "auto" else self.save_rollouts_every

    @property
    def saved_steps(self) -> int:
        """The largest number of steps whose rollouts a run saves: every `rollouts_every`-th, the first and the last."""
        return self.steps // self.rollouts_every + 2

    @property
    def limits(self) -> dict[str, LimitConfig]:
        """The limits of `monitor` that are switched on."""
        return {name: limit for name, limit in self.monitor.items() if limit is not None}

    @property
    def measures_success(self) -> bool:
        """Whether prompts are drawn by the policy's measured success."""
        return self.curriculum is not None and self.curriculum.by == "success"

    @property
    def keeps_best(self) -> bool:
        """Whether the best policy so far is saved, as the result or for a rollback."""
        return self.evaluation.keep_best or any(limit.action == "rollback" for limit in self.limits.values())

    @property
    def roles(self) -> tuple[Role, ...]:
        """The models of the run, by role."""
        wanted = {"critic": self.spec.critic, "reference": self.kl.keeps_reference}
        wanted["reward_models"] = any(s.kind == "reward_model" for s in self.reward.scorers)
        wanted["teachers"] = self.distillation is not None and any(teacher.path for teacher in self.distillation.teachers)
        return tuple(role for role in ROLES if wanted.get(role, True))

    @property
    def teaches_whole_distributions(self) -> bool:
        """Whether teachers compute in the update, for their distributions are too large to be kept."""
        return self.distillation is not None and self.distillation.compares_whole_distributions

    @property
    def teaches_distributions(self) -> bool:
        """Whether the policy learns teachers' distributions, whole ones or their likeliest tokens."""
        return self.distillation is not None and self.distillation.compares_distributions

    @property
    def teacher_template(self) -> str | None:
        return None if self.distillation is None else self.distillation.teacher_template

    @property
    def learns_from_reward(self) -> bool:
        """Whether a scorer has a weight; otherwise the policy learns from teachers alone, and all advantages are 0."""
        return bool(self.reward.rewarded)

    @property
    def title(self) -> str:
        """What the policy learns by: the algorithm, distillation, or both."""
        if self.distillation is None:
            return self.algorithm
        return f"{self.algorithm} and distillation" if self.learns_from_reward else "distillation"

    @property
    def role_groups(self) -> tuple[RoleGroup, ...]:
        """The groups of `placement`, each with its number of ranks and only the roles of this run."""
        groups = [([role for role in group.roles if role in self.roles], group.ranks) for group in self.placement]
        return tuple(RoleGroup(roles=roles, ranks=ranks or self.trainer.ranks) for roles, ranks in groups if roles)

    @property
    def learning_groups(self) -> tuple[RoleGroup, ...]:
        """The groups of `role_groups` with a model that is trained, the policy's first."""
        return tuple(sorted((g for g in self.role_groups if g.learns), key=lambda g: "policy" not in g.roles))

    @property
    def ranks(self) -> int:
        """The number of trainer ranks over all groups."""
        return sum(group.ranks for group in self.role_groups)

    @property
    def cpus(self) -> int:
        """CPUs that Ray counts for the job: one for each trainer rank, and for each process of a rollout engine."""
        return self.ranks + self.rollout.engines * self.rollout.tensor_parallel_size

    def over_prompts(self, prompts: int) -> RlConfig:
        """Return the section with `steps` set to the number of steps for so many training prompts.

        Raises:
            ValueError: a setting doesn't fit the number of steps.
        """
        rl = self.model_copy(update={"steps": self.steps_over(prompts, per_step=self.rollout_batch_size)})
        if found := [f"rl.{conflict}" for conflict in (*rl.conflicts(), *rl.unlearned(prompts))]:
            raise ValueError("\n".join(found))
        return rl

    def unlearned(self, prompts: int) -> Iterator[str]:
        """The conflict of a curriculum that can't act, because no prompt comes again; `steps` is known.

        Args:
            prompts: number of training prompts.
        """
        if self.measures_success and (drawn := self.steps * self.rollout_batch_size) <= prompts:
            yield (
                f"curriculum: expected more draws than the {prompts} training prompts, got {drawn}; set it to null or raise "
                "rl.epochs above 1, because success is measured when a prompt is drawn, and counts from the second time on"
            )

    def of_group(self, group: RoleGroup) -> RlConfig:
        """Return the section with the group's number of ranks as that of `trainer`."""
        return self.model_copy(update={"trainer": self.trainer.model_copy(update={"ranks": group.ranks})})

    @property
    def most_ranks(self) -> int:
        """The largest number of ranks that a group has."""
        return max(group.ranks for group in self.role_groups)

    @property
    def starts_rounded(self) -> bool:
        """Whether the policy's initial weights are rounded (QLoRA), and so differ from the SFT model's, which the rollout engines load."""
        return self.lora is not None and self.lora.quantize is not None

    @property
    def sends_reference(self) -> bool:
        """Whether the policy's whole weights are sent to a reference in another group, at the start or when it is refreshed."""
        apart = any("reference" in group.roles and "policy" not in group.roles for group in self.role_groups)
        return apart and (self.starts_rounded or self.kl.refresh_reference_every is not None)

    @property
    def aggregation(self) -> str:
        """`loss_aggregation` with auto resolved: sequence_mean for GSPO and SAPO, otherwise the algorithm's."""
        if self.loss_aggregation != "auto":
            return self.loss_aggregation
        return "sequence_mean" if self.policy_loss in ("gspo", "sapo") else self.spec.aggregation

    def caches_prefixes(self, max_length: int, *, on_gpu: bool) -> bool:
        """`rollout.prefix_caching` with auto resolved. A prompt can be shared if it fills a block of the cache.

        Args:
            max_length: tokens of prompt and response together.
        """
        if self.rollout.prefix_caching != "auto":
            return self.rollout.prefix_caching
        return on_gpu and self.rollout.backend == "vllm" and self.group_size > 1 and max_length - self.rollout.max_new_tokens > CACHE_BLOCK

    def dispatch(self, *, on_gpu: bool) -> Literal["equal", "dynamic"]:
        """`rollout.dispatch` with auto resolved. One engine gets all prompts at once, and so do all with rollouts ahead."""
        rollout = self.rollout
        wanted = rollout.dispatch == "dynamic" or (rollout.dispatch == "auto" and on_gpu)
        return "dynamic" if wanted and rollout.engines > 1 and not rollout.max_lag else "equal"

    @property
    def by_turn(self) -> bool:
        """Whether rewards belong to turns of an episode."""
        return self.environment is not None and self.environment.credit == "turn"

    @property
    def one_optimizer_step(self) -> bool:
        """Whether a batch of rollouts is used for one optimizer step only."""
        return self.ppo_epochs == 1 and self.minibatch_size == self.samples_per_step

    @property
    def ratio_moves(self) -> bool:
        """Whether the policy that is trained can differ from the one of the old log-probabilities."""
        return not self.one_optimizer_step or self.old_logprobs_source(0) == "from_engine"

    @property
    def optimizer_steps(self) -> int:
        """The number of optimizer steps of the whole run, if none is skipped and max_approx_kl ends no step early; `steps` is known."""
        return self.steps * self.ppo_epochs * (self.samples_per_step // self.minibatch_size)

    @property
    def policy_steps(self) -> int:
        """The number of optimizer steps of the whole run that train the policy."""
        return self.optimizer_steps // self.steps * sum(map(self.trains_policy, range(self.steps)))

    def trains_policy(self, step: int) -> bool:
        """Return whether a step, counted from 0, trains the policy: in the first ones of a critic only the critic learns."""
        return self.critic is None or step >= self.critic.critic_warmup_steps

    def old_logprobs_source(self, step: int) -> Literal["recompute", "from_update", "from_engine"]:
        """Return the source of the old log-probabilities in the policy loss of a step, counted from 0.

        from_engine: from the rollout engine, where rollouts are ahead and not corrected: its policies are those that sampled.
        from_update: from the update, where a batch has one optimizer step, which starts from the policy that sampled, and nothing before
            the update needs log-probabilities.
        recompute: otherwise, from a forward pass of the trainer before the update, for rollout.recomputed_fraction of the samples; the
            others take the engine's.
        """
        corrected = self.correction.kind != "none"
        if self.rollout.max_lag:
            return "recompute" if corrected else "from_engine"
        needed_before = self.kl.in_reward or corrected or not self.rollout.samples_any_token
        return "from_update" if self.one_optimizer_step and self.trains_policy(step) and not needed_before else "recompute"

    def conflicts(self) -> Iterator[str]:
        yield from rl_conflicts(self)


RlConfig = create_model(
    "RlConfig",
    __base__=RlSettings,
    __module__=__name__,
    __doc__="Online RL: the settings of every algorithm, and the section of each.",
    **{name: (kind, ... if ALGORITHMS[name].critic else Field(default_factory=kind)) for name, kind in ALGORITHM_SECTIONS.items()},
)
