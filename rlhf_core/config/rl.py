"""Settings of online RL, and the columns of its curves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, create_model, model_validator

from rlhf_core.algorithms.online import ALGORITHMS, Algorithm
from rlhf_core.config.base import RENAMED_COLUMNS, RENAMED_KEYS, LearningRate, Section, did_you_mean
from rlhf_core.config.dead import dead_settings
from rlhf_core.config.distillation import distillation_conflicts
from rlhf_core.config.model import LengthConfig, LoraConfig, OptimizerConfig, Schedule, data_parallel_keys, sequence_conflicts
from rlhf_core.config.rl_parts import (
    ALGORITHM_SECTIONS,
    DEFAULT_LIMITS,
    ROLES,
    CorrectionConfig,
    CriticConfig,
    CurriculumConfig,
    DeadlineConfig,
    DistillationConfig,
    DynamicSamplingConfig,
    EnvironmentConfig,
    KlConfig,
    LimitConfig,
    PeriodicEvaluationConfig,
    PtxConfig,
    Role,
    RoleGroup,
    RolloutConfig,
    SapoConfig,
    TrainerConfig,
    completed_limits,
    named_placement,
)
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
        wanted["teachers"] = self.distillation is not None
        return tuple(role for role in ROLES if wanted.get(role, True))

    @property
    def teaches_whole_distributions(self) -> bool:
        """Whether teachers compute in the update, for their distributions are too large to be kept."""
        return self.distillation is not None and self.distillation.compares_whole_distributions

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
        yield from self._placement_conflicts()
        yield from self._batch_conflicts()
        yield from self._combination_conflicts()
        yield from self._critic_conflicts()
        yield from distillation_conflicts(self)
        yield from self._limit_conflicts()
        yield from dead_settings(self)

    def _takers(self, ranks: int) -> str:
        return data_parallel_keys(
            ranks, self.trainer.sequence_parallel, section="trainer." if ranks == self.trainer.ranks else "placement."
        )

    def _placement_conflicts(self) -> Iterator[str]:
        placed = [role for group in self.placement for role in group.roles]
        if several := sorted({role for role in placed if placed.count(role) > 1}):
            yield f"placement: expected each role in one group, got {several} in several; keep one of each"
        if missing := [role for role in self.roles if role not in placed]:
            yield f"placement: expected a group for each role of the run, got none for {missing}; add them to a group"
        for ranks in {group.ranks for group in self.role_groups} - {self.trainer.ranks}:
            yield from (f"trainer.{conflict}" for conflict in sequence_conflicts(ranks, self.trainer.sequence_parallel))

    def _batch_conflicts(self) -> Iterator[str]:
        for what, divisor in (
            (f"{self.algorithm}.group_size", self.group_size),
            ("minibatch_size", self.minibatch_size),
        ):
            if self.samples_per_step % divisor:
                yield (f"samples_per_step: expected a multiple of {what}={divisor}, got {self.samples_per_step}; change one of them")
        for what, divided in (
            ("minibatch_size", self.minibatch_size),
            *((("ptx.batch_size", self.ptx.batch_size),) if self.ptx.coef else ()),
        ):
            for group in self.learning_groups:
                if divided % self.of_group(group).trainer.data_parallel_size:
                    yield f"{what}: expected a multiple of {self._takers(group.ranks)}, got {divided}; change one of them"
                    break

    def _combination_conflicts(self) -> Iterator[str]:
        if self.steps is not None:
            yield from self.warmup_conflicts("warmup_steps", min(1.0, self.warmup_steps / max(1, self.policy_steps)))
        yield from self.offload_conflicts("trainer.offload_optimizer", offload_optimizer=self.trainer.offload_optimizer)
        if self.policy_loss == "gspo" and self.aggregation != "sequence_mean":
            yield (
                f"loss_aggregation: expected sequence_mean or auto with policy_loss gspo, got {self.loss_aggregation}; GSPO has one "
                "ratio per sequence, and another mean would weight long responses twice"
            )
        if self.dual_clip is not None and self.policy_loss != "ppo_clip":
            yield f"dual_clip: expected null with policy_loss {self.policy_loss}, got {self.dual_clip}; only ppo_clip has it, so remove it"
        if self.lora is not None and self.lora.dropout:
            yield (
                f"lora.dropout: expected 0 in rl, got {self.lora.dropout}; set it to 0, because dropout changes the log-probabilities "
                "that the ratio compares"
            )
        if self.correction.kind != "none" and self.rollout.recomputed_fraction < 1:
            yield (
                f"rollout.recomputed_fraction: expected 1 with a correction, got {self.rollout.recomputed_fraction}; set it to 1, "
                "because a correction needs the trainer's log-probabilities of every sample"
            )
        corrects = self.learns_from_reward or not self.teaches_whole_distributions
        if corrects and self.rollout.quantization is not None and self.correction.kind == "none":
            yield (
                f"correction.kind: expected tis, icepop, sequence_tis or sequence_mask with rollout.quantization "
                f"{self.rollout.quantization}, got none; set it to tis, because the engine samples from the rounded weights' distribution "
                "and not from the policy's"
            )
        if self.rollout.max_lag and self.old_logprobs_source(0) == "from_engine" and not self.rollout.samples_whole_distribution:
            yield (
                f"rollout.max_lag: expected 0 with top_p, top_k or min_new_tokens and without a correction, got {self.rollout.max_lag}; "
                "set correction.kind, because the ratio would compare with the engine's probabilities, which are then those of another "
                "distribution"
            )
        yield from self._environment_conflicts()
        yield from self._curriculum_conflicts()
        if self.dynamic_sampling.enabled and self.group_size < 2:
            yield (
                f"dynamic_sampling: expected {self.algorithm}.group_size of at least 2, got {self.group_size}; raise it, because a "
                "group of one has no variance"
            )
        if self.spec.greedy_baseline and self.kl.in_reward and self.rollout_batch_size < self.most_ranks // self.trainer.sequence_parallel:
            yield (
                f"{self.algorithm}.group_size: expected at least {self._takers(self.most_ranks)} prompts a step, got "
                f"{self.rollout_batch_size}; lower it, because each rank computes the KL of some greedy responses"
            )
        if self.moe_aux_coef and self.trainer.sequence_parallel > 1:
            yield (
                f"moe_aux_coef: expected 0 with trainer.sequence_parallel={self.trainer.sequence_parallel}, got {self.moe_aux_coef}; "
                "change one of them, because a rank routes its own positions only"
            )
        if self.reward.overlong is not None and self.reward.overlong.buffer > self.rollout.max_new_tokens:
            yield (
                f"reward.overlong.buffer: expected at most rollout.max_new_tokens={self.rollout.max_new_tokens}, got "
                f"{self.reward.overlong.buffer}; lower it"
            )
        if self.kl.target is not None and self.kl.horizon <= self.samples_per_step / 5:
            yield (
                f"kl.horizon: expected more than a fifth of samples_per_step={self.samples_per_step} with a target, got {self.kl.horizon}; "
                "raise it, because one step could make the coefficient 0"
            )
        known = ("score", *(s.name for s in self.reward.scorers))
        if self.evaluation.metric not in known:
            yield (f"evaluation.metric: expected one of {list(known)}, got {self.evaluation.metric!r}; name the score or a scorer")
        if taken := {s.name for s in self.reward.scorers} & {column.removeprefix("eval_") for column in self.evaluation.columns}:
            yield f"reward.scorers: expected names that no figure of the evaluation has, got {sorted(taken)}; rename them"
        if any(weight < 0 for weight in self.prompt_weights.values()):
            yield f"prompt_weights: expected weights of at least 0, got {self.prompt_weights}; 0 leaves a source to evaluation.sources"

    def _critic_conflicts(self) -> Iterator[str]:
        if self.critic is None or self.critic.critic_init != "reward_model":
            return
        key, own = f"{self.algorithm}.critic_init: expected reward_model_trunk or sft", self.reward.own_reward_models
        if not own:
            yield (
                f"{key} where no rewarded scorer is the chain's reward model, got reward_model; its scores would not be in units of the "
                "reward"
            )
        if running := [s.name for s in own if s.normalization == "running"]:
            yield (
                f"{key} with normalization running of {running}, got reward_model; the scale between its scores and the rewards is "
                "unknown before the first step and changes later"
            )
        if ensembles := [s.name for s in own if s.members > 1]:
            yield (
                f"{key} with several members of {ensembles}, got reward_model; a critic is one model, and the rewards are in units of all "
                "members' scores together; reward_model_trunk starts from the first member's layers"
            )

    def _curriculum_conflicts(self) -> Iterator[str]:
        if not self.measures_success:
            return
        known = {s.name: [s] for s in self.reward.scorers} | {"score": self.reward.rewarded}
        if (name := self.curriculum.scorer) not in known:
            yield f"curriculum.scorer: expected one of {sorted(known)}, got {name!r}; name the score or a scorer"
        elif unclear := [s.name for s in known[name] if s.kind == "reward_model"]:
            yield (
                f"curriculum.scorer: expected one whose scores say success, got {name}, with the reward model {unclear[0]}; name a scorer "
                "that verifies (it may have weight 0), because a reward model's scores have no fixed level of success"
            )

    def _environment_conflicts(self) -> Iterator[str]:
        if self.environment is None:
            return
        if self.rollout.last_tokens is not None:
            yield (
                f"rollout.last_tokens: expected null with environment, got {self.rollout.last_tokens}; remove it, because an episode would "
                "end in the middle of a turn"
            )
        if self.by_turn and self.spec.turn_estimator is None:
            known = [name for name, spec in ALGORITHMS.items() if spec.turn_estimator is not None]
            yield (
                f"environment.credit: expected episode with algorithm {self.algorithm}, got turn; change one (turns: {', '.join(known)}), "
                "because its baseline is defined for whole episodes only"
            )
        if self.by_turn and not any(s.kind == "environment" and s.weight for s in self.reward.scorers):
            yield "environment.credit: expected episode without a rewarded scorer of kind environment, got turn; add one to reward.scorers"
        if self.environment.command and 2 * self.environment.agent_timeout >= self.deadlines.step:  # an episode's, and its successor's
            yield (
                f"environment.agent_timeout: expected less than half of rl.deadlines.step={self.deadlines.step:g}, which ends the run, got "
                f"{self.environment.agent_timeout:g}; lower it, or raise rl.deadlines.step"
            )
        in_flight = self.samples_per_step * (1 + self.rollout.max_lag)
        if self.rollout.max_lag and self.environment.command and self.environment.at_once < in_flight:
            yield (
                f"environment.processes: expected processes * claims of at least {in_flight} with rollout.max_lag={self.rollout.max_lag}, "
                f"for the episodes of so many steps, got {self.environment.at_once}; raise one"
            )
        if self.by_turn and self.environment.command:
            yield "environment.credit: expected episode with command, whose score is of a whole episode, got turn; change one"
        if self.rollout.min_new_tokens:
            yield (
                f"rollout.min_new_tokens: expected 0 with environment, got {self.rollout.min_new_tokens}; set it to 0, because it would "
                "hold for each turn"
            )

    def _limit_conflicts(self) -> Iterator[str]:
        for name in (name for name, limit in self.monitor.items() if limit is None and name not in DEFAULT_LIMITS):
            renamed = f"rl.monitor.{name}" in RENAMED_KEYS
            meant = f"rename it to {RENAMED_KEYS[f'rl.monitor.{name}']}" if renamed else did_you_mean(name, DEFAULT_LIMITS)
            yield f"monitor.{name}: expected a limit, got null, which only switches off {list(DEFAULT_LIMITS)}; {meant or 'remove it'}"
        known = [column for column in curve_columns(self) if column not in ("step", "scorer_metrics")]
        for name, limit in self.limits.items():
            key = f"monitor.{name}"
            if limit.metric not in known:
                todo = f"rename it to {RENAMED_COLUMNS[limit.metric]}" if limit.metric in RENAMED_COLUMNS else "correct it"
                yield f"{key}.metric: expected a column of the curves, one of {known}, got {limit.metric!r}; {todo}"
            if limit.metric in KL_COLUMNS and not self.kl.keeps_reference:
                yield (
                    f"{key}.metric: expected one that is measured, got {limit.metric} with kl.coef 0 and kl.measure false; set kl.measure "
                    f"to true or {key} to null"
                )
            if limit.action == "rollback" and self.evaluation.every is None:
                yield (
                    f"{key}.action: expected evaluation.every with rollback, got null; set evaluation.every, which finds the best policy"
                )


RlConfig = create_model(
    "RlConfig",
    __base__=RlSettings,
    __module__=__name__,
    __doc__="Online RL: the settings of every algorithm, and the section of each.",
    **{name: (kind, ... if ALGORITHMS[name].critic else Field(default_factory=kind)) for name, kind in ALGORITHM_SECTIONS.items()},
)

# Columns of plots/train_policy.csv. Those of KL_COLUMNS need a reference.
KL_COLUMNS = ("kl_mean", "kl_token_mean", "kl_token_min", "kl_token_max", "frontier_gap")
_BATCH_COLUMNS = (
    *("score_mean", "score_std", "reward_mean", "kl_mean", "kl_coef", "entropy", "response_length", "truncated_fraction"),
    *("kl_token_mean", "kl_token_min", "kl_token_max", "frontier_gap"),
    *("reward_length_correlation", "repetition", "distinct_1", "distinct_2", "unscored_fraction"),
)
_UPDATE_COLUMNS = (
    *("policy_loss", "value_loss", "clip_frac", "approx_kl", "policy_ratio_min", "policy_ratio_max"),
    *(
        "grad_norm",
        "critic_grad_norm",
        "stopped_early",
        "skipped_steps",
        "explained_variance",
        "advantage_zero_fraction",
        "logprob_difference",
    ),
)
_MISMATCH_COLUMNS = ("mismatch_mean", "mismatch_max", "mismatch_kl", "ratio_mean", "corrected_fraction")


def curve_columns(rl: RlConfig) -> tuple[str, ...]:
    """Return the columns of plots/train_policy.csv. They depend on the configuration alone, so that a resumed run has the same columns."""
    names = [s.name for s in rl.reward.scorers]
    columns = ["step", *_BATCH_COLUMNS, *(f"score_{n}" for n in names), *(f"failed_{n}" for n in names)]
    columns += [f"{kind}_{s.name}" for s in rl.reward.scorers if not s.weight for kind in ("gap", "agreement")]
    columns += [f"disagreement_{s.name}" for s in rl.reward.scorers if s.members > 1]
    if len(rewarded := [s.name for s in rl.reward.rewarded]) > 1:
        columns += [*(f"share_{name}" for name in rewarded), *(f"correlation_{a}.{b}" for a, b in combinations(rewarded, 2))]
    columns += _UPDATE_COLUMNS
    columns += ["distillation_loss"] * (rl.distillation is not None)
    columns += ["ptx_loss"] * (rl.ptx.coef > 0) + ["moe_aux_loss"] * (rl.moe_aux_coef > 0)
    columns += [] if rl.old_logprobs_source(0) == "from_engine" else _MISMATCH_COLUMNS
    columns += ["success_fraction", "mixed_fraction", "drawn_share"] * rl.measures_success
    columns += ["policy_lag", "policy_lag_max", "spans_per_response", "cut_off"] * (rl.rollout.max_lag > 0)
    if rl.dynamic_sampling.enabled:
        columns += ["dynamic_rounds", "dropped_groups", *(f"drawn_score_{name}" for name in ("mean", *names))]
    columns += ["eval_score", *(f"eval_{n}" for n in names), *rl.evaluation.columns] * (rl.evaluation.every is not None)
    columns += ["turns", "tool_calls", "failed_tool_calls", "failed_episodes"] * (rl.environment is not None)
    columns += ["scorer_metrics"] * any(s.kind in ("function", "code", "http", "llm_judge") for s in rl.reward.scorers)
    return tuple(columns)
