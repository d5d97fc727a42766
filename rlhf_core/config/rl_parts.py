"""The sections inside `rl`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, create_model
from pydantic_core import PydanticCustomError

from rlhf_core.algorithms.online import ALGORITHMS, Algorithm
from rlhf_core.config.base import LearningRate, RolloutBackend, Section, StopStrings
from rlhf_core.config.model import offload_conflicts, sequence_conflicts

# The share of a GPU for one actor; rlhf_core/planning/placement.py resolves auto.
GpuShare = Literal["auto"] | Annotated[float, Field(gt=0)]


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
    """A teacher of rl.distillation: a folder or a Hugging Face name with the policy's tokens, and its weight among several."""

    path: str
    weight: float = Field(default=1.0, gt=0)


class DistillationConfig(Section):
    """On-policy distillation: the policy learns the teachers' distribution at each token of its own responses (docs/distillation.md).

    loss: sampled needs the teachers' log-probability of the sampled token alone, the others their whole distribution.
    beta: of jsd: near 0 it is like forward_kl, near 1 like reverse_kl.
    coef: of the divergence in the policy's loss, beside the policy loss of a reward.
    """

    teachers: list[TeacherConfig] = Field(min_length=1)
    loss: Literal["sampled", "reverse_kl", "forward_kl", "jsd"] = "reverse_kl"
    beta: float = Field(default=0.5, gt=0, lt=1)
    coef: float = Field(default=1.0, gt=0)

    @property
    def compares_whole_distributions(self) -> bool:
        return self.loss != "sampled"

    @property
    def options(self) -> dict[str, float]:
        """Arguments of the divergence besides the log-probabilities."""
        return {"beta": self.beta} if self.loss == "jsd" else {}

    def conflicts(self) -> Iterator[str]:
        if self.loss != "jsd" and self.beta != 0.5:
            yield f"beta: expected 0.5, the default, with loss {self.loss}, got {self.beta}; only jsd has it, so remove it"


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


class RolloutConfig(Section):
    """How the rollout engines sample.

    max_logprob_difference: engine against trainer in float32, for any token of a step; a larger one stops the run. Of the tokens of a sound
    run the worst reach 1e-4.
    bfloat16_mean_difference, bfloat16_p999_difference: with model.dtype bfloat16 these limits count instead, for the mean and the quantile
    0.999 over a step's tokens; both are about twice the measured values (docs/rl.md).
    recomputed_fraction: share of the samples whose log-probabilities the trainer computes before the update; the others keep the engine's.
    max_lag: policy versions by which a token may be older than the policy that is trained on it; above 0 engines and trainer work at the
    same time.
    schedule: when updates come, with max_lag: counted after fixed numbers of engine steps, free once a batch is whole. free writes batches
    to the disk before they are trained on, and removes them once checkpoints have their updates; recorded is free and keeps them all.
    last_tokens: that a response may still get during the last update before its step, after which it is cut off; None: until it ends.
    dispatch: equal hands each engine its share of the prompts at once; dynamic hands prompts out as engines become free, so that their
    batches, and with them rounding, depend on time; auto: dynamic on GPUs.
    take_turns: engines free their memory while the trainer works, and trainer ranks theirs while engines work; auto: where an engine and a
    rank share a GPU, except with max_lag.
    tensor_parallel_size: GPUs of one node that an engine's layers are divided over; gpus_per_engine is its share of each.
    prefix_caching: whether vLLM computes the common beginning of a group's samples, and of other prompts, once; auto: on GPUs, where groups
    have several samples and prompts may fill a block of the cache.
    enforce_eager: vLLM neither compiles the model nor captures CUDA graphs: a faster start, slower sampling; on CPUs always.
    weight_transfer: how engines get the policy's weights: gloo through the hosts' memory, ipc on the ranks' GPUs, nccl between GPUs; auto:
    ipc, else nccl, else gloo, whichever is possible.
    quantization: fp8: vLLM rounds the weights of its linear layers, and their inputs, to 8 bits, at its start and at each weight sync.
    send_changes: over gloo, in bfloat16, send the numbers that have changed since the last sync where these are less than all.
    """

    backend: RolloutBackend
    max_new_tokens: int = Field(gt=0)
    min_new_tokens: int = Field(default=0, ge=0)
    temperature: float = Field(gt=0)
    top_p: float = Field(gt=0, le=1)
    top_k: int | None = Field(gt=0)
    stop: StopStrings
    engines: int = Field(ge=1)
    gpus_per_engine: GpuShare
    gpu_memory_fraction: float = Field(gt=0, lt=1)
    kv_cache_gib: int = Field(gt=0)
    max_concurrent_sequences: int = Field(gt=0)
    max_logprob_difference: float = Field(default=1e-3, gt=0)
    bfloat16_mean_difference: float = Field(default=0.08, gt=0)
    bfloat16_p999_difference: float = Field(default=0.8, gt=0)
    recomputed_fraction: float = Field(gt=0, le=1)
    max_lag: int = Field(ge=0)
    schedule: Literal["counted", "free", "recorded"] = "counted"
    last_tokens: int | None = Field(default=None, gt=0)
    dispatch: Literal["auto", "equal", "dynamic"] = "auto"
    take_turns: Literal["auto"] | bool = "auto"
    tensor_parallel_size: int = Field(default=1, ge=1)
    prefix_caching: Literal["auto"] | bool = "auto"
    enforce_eager: bool = False
    weight_transfer: Literal["auto", "gloo", "ipc", "nccl"] = "auto"
    send_changes: bool = False
    quantization: Literal["fp8"] | None = None

    @property
    def is_journaled(self) -> bool:
        """Whether batches are written to the disk before they are trained on."""
        return self.schedule != "counted"

    @property
    def samples_freely(self) -> bool:
        """Whether engines sample for later steps until the trainer has finished, and not for a counted number of steps."""
        return self.is_journaled and self.max_lag > 0

    @property
    def samples_any_token(self) -> bool:
        """Whether neither top-p nor top-k excludes tokens."""
        return self.top_p == 1 and self.top_k is None

    @property
    def samples_whole_distribution(self) -> bool:
        """Whether the engine's log-probabilities are the policy's at every token."""
        return self.samples_any_token and self.min_new_tokens == 0

    def conflicts(self) -> Iterator[str]:
        yield from share_conflicts(
            "gpus_per_engine",
            self.gpus_per_engine,
            "raise engines instead, or tensor_parallel_size, of whose GPUs a rollout engine uses this part each",
        )
        if self.backend == "pytorch":
            only_vllm = {
                "tensor_parallel_size": (self.tensor_parallel_size > 1, self.tensor_parallel_size, "1"),
                "prefix_caching": (self.prefix_caching is True, "true", "auto or false"),
                "enforce_eager": (self.enforce_eager, "true", "false"),
                "quantization": (self.quantization is not None, self.quantization, "null"),
            }
            for key, (wrong, value, wanted) in only_vllm.items():
                if wrong:
                    yield f"{key}: expected {wanted} with backend pytorch, got {value}; change it or the backend, since only vllm has this"
        if self.recomputed_fraction < 1 and not self.samples_whole_distribution:
            yield (
                f"recomputed_fraction: expected 1 with top_p, top_k or min_new_tokens, got {self.recomputed_fraction}; "
                "set it to 1, because the engine then samples from another distribution than the policy's"
            )
        if self.dispatch == "dynamic" and self.max_lag:
            yield (
                f"dispatch: expected auto or equal with max_lag={self.max_lag}, got dynamic; change one, because the driver, which would "
                "hand out prompts, waits for the update at that time"
            )
        if self.take_turns is True and self.max_lag:
            yield (
                f"take_turns: expected auto or false with max_lag={self.max_lag}, got true; change one, because engines then work at the "
                "same time as the trainer"
            )
        if self.last_tokens is not None and self.max_lag < 2:
            yield (
                f"last_tokens: expected null with max_lag={self.max_lag}, got {self.last_tokens}; remove it or raise max_lag, because "
                "responses aren't in flight during several updates"
            )
        if self.weight_transfer in ("ipc", "nccl") and self.backend == "pytorch":
            yield f"weight_transfer: expected auto or gloo with backend pytorch, got {self.weight_transfer}; change one of them"
        if self.send_changes and self.weight_transfer in ("ipc", "nccl"):
            yield f"send_changes: expected false with weight_transfer {self.weight_transfer}, got true; only gloo has it, so change one"
        if self.weight_transfer == "ipc" and self.max_lag:
            yield (
                f"weight_transfer: expected auto, gloo or nccl with max_lag={self.max_lag}, got ipc; change one, because the weights for a "
                "replaced engine are kept on rank 0 only"
            )
        if self.min_new_tokens >= self.max_new_tokens:
            yield (
                f"min_new_tokens: expected less than max_new_tokens={self.max_new_tokens}, got {self.min_new_tokens}; lower it, "
                "because the check of the engines' weights needs tokens that may be the end token"
            )


class EnvironmentConfig(Section):
    """Episodes of several turns (docs/agents.md).

    path: `async def play(task, policy)`, as file.py:name. tools: without a `play`, functions that the model may call until it answers.
    command: words of a command that plays episodes in other processes, by requests to an OpenAI-compatible endpoint.
    processes: of the command at the same time. claims: episodes that a process claims at once, one after the other without end; null: each
    process plays one episode. agent_timeout: seconds in which a command must ask for its next reply, or end.
    max_turns: replies of an episode; a `play` and a command keep to it by themselves. tool_timeout: seconds of a tool's call.
    credit: what a reward of `chat.reward` belongs to: the whole episode, or the turn that it follows and those before.
    """

    path: str | None = None
    tools: list[str] = Field(default_factory=list)
    command: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    processes: int = Field(default=16, ge=1)
    claims: int | None = Field(default=None, ge=1)
    agent_timeout: float = Field(default=120.0, gt=0)
    max_turns: int = Field(default=8, ge=1)
    tool_timeout: float = Field(default=30.0, gt=0)
    credit: Literal["episode", "turn"] = "episode"

    @property
    def functions(self) -> dict[str, str]:
        """Key -> `file.py:name` or `package.module:name` of each function."""
        named = {"path": self.path} if self.path is not None else {}
        return named | {f"tools.{number}": path for number, path in enumerate(self.tools)}

    def files(self, folder: Path = Path()) -> dict[str, str]:
        """Key -> path of each word of the command that is a file, but for a program's absolute path."""
        words = [(number, word) for number, word in enumerate(self.command) if number or not Path(word).is_absolute()]
        return {f"command.{number}": word for number, word in words if (folder / word).is_file()}

    def on_files(self, function: Callable[[str], str], file: Callable[[str], str]) -> EnvironmentConfig:
        """Itself with other names of functions, and other paths of the command's files."""
        found = self.files()
        command = [file(word) if f"command.{number}" in found else word for number, word in enumerate(self.command)]
        tools = [function(tool) for tool in self.tools]
        return self.model_copy(update={"path": self.path and function(self.path), "tools": tools, "command": command})

    @property
    def scores(self) -> bool:
        """Whether a `play` or a command gives episodes a score."""
        return self.path is not None or bool(self.command)

    @property
    def at_once(self) -> int | None:
        """Episodes in play at the same time; None: all of a step."""
        return self.processes * (self.claims or 1) if self.command else None

    def conflicts(self) -> Iterator[str]:
        given = [name for name in ("path", "tools", "command") if getattr(self, name)]
        if len(given) != 1:
            got = " and ".join(given) or "none"
            yield f"path: expected one of path, tools and command, got {got}; keep one (a play gives its tools to policy.chat)"
        if not self.command:
            for name in ("processes", "claims", "agent_timeout"):
                if (value := getattr(self, name)) != type(self).model_fields[name].default:
                    yield f"{name}: expected no value without command, got {value:g}; remove it"


LimitAction = Literal["warn", "stop", "rollback"]


class LimitConfig(Section):
    """A limit for a column of plots/train_policy.csv, and what happens when the column is past it (docs/monitors.md).

    above, below: exactly one of these and fall. fall: the share of its highest value so far by which the column has fallen.
    window: steps over which the column is averaged. patience: steps in a row that must be past the limit.
    from_step: the first step that counts. action: rollback ends with the best policy by rl.evaluation.metric.
    """

    metric: str
    above: float | None = None
    below: float | None = None
    fall: float | None = Field(default=None, gt=0)
    window: int = Field(default=1, gt=0)
    patience: int = Field(default=1, gt=0)
    from_step: int = Field(default=1, gt=0)
    action: LimitAction

    def conflicts(self) -> Iterator[str]:
        given = {name: value for name in ("above", "below", "fall") if (value := getattr(self, name)) is not None}
        if len(given) != 1:
            yield f"limit: expected exactly one of above, below and fall, got {given or 'none'}; split it or add one"


# The limits of `rl.monitor`, which lays its own over them.
DEFAULT_LIMITS = {
    "kl": LimitConfig(metric="kl_token_mean", above=1.0, window=3, patience=2, action="stop"),
    "entropy": LimitConfig(metric="entropy", below=0.01, window=3, patience=2, action="stop"),
    "repetition": LimitConfig(metric="repetition", above=0.5, window=3, patience=2, action="stop"),
    "truncated": LimitConfig(metric="truncated_fraction", above=0.5, window=3, action="warn"),
    "variety": LimitConfig(metric="distinct_2", fall=0.8, window=3, patience=2, action="warn"),
    "length": LimitConfig(metric="reward_length_correlation", above=0.98, window=5, patience=3, action="warn"),
    "frontier": LimitConfig(metric="frontier_gap", above=1.0, window=5, patience=3, action="warn"),
    "clipping": LimitConfig(metric="clip_frac", above=0.5, window=3, patience=3, action="warn"),
    "ratio": LimitConfig(metric="policy_ratio_max", above=100.0, window=3, patience=2, action="warn"),
    "token_kl": LimitConfig(metric="kl_token_max", above=20.0, window=3, patience=2, action="warn"),
}


def completed_limits(monitor: dict[str, Any]) -> dict[str, Any]:
    """Return the default limits with those of `rl.monitor` laid over them.

    A limit that names its metric replaces the default of its name. One that doesn't changes only the keys that it writes. None switches a
    limit off.
    """
    completed: dict[str, Any] = {name: limit.model_dump(exclude_defaults=True) for name, limit in DEFAULT_LIMITS.items()}
    for name, given in monitor.items():
        changes_default = isinstance(given, dict) and "metric" not in given and name in DEFAULT_LIMITS
        completed[name] = completed[name] | given if changes_default else given
    return completed


def share_conflicts(key: str, share: float | str, todo: str) -> Iterator[str]:
    """The conflict of a GPU share above 1.

    todo: what the message says to do instead.
    """
    if share != "auto" and share > 1:
        yield f"{key}: expected auto or at most 1, got {share:g}; {todo}"


Role = Literal["policy", "critic", "reference", "reward_models", "teachers"]
ROLES: tuple[Role, ...] = get_args(Role)
PLACEMENTS: dict[str, tuple[tuple[Role, ...], ...]] = {
    "together": (ROLES,),
    "two_groups": (("policy", "reference"), ("critic", "reward_models", "teachers")),
    "apart": tuple((role,) for role in ROLES),
}


class RoleGroup(Section):
    """Models that share trainer ranks.

    ranks: None means trainer.ranks.
    """

    roles: list[Role] = Field(min_length=1)
    ranks: int | None = Field(default=None, ge=1)

    @property
    def name(self) -> str:
        """The group's name: its roles joined by +."""
        return "+".join(self.roles)

    @property
    def learns(self) -> bool:
        """Whether the group has a model that is trained."""
        return "policy" in self.roles or "critic" in self.roles


def named_placement(value: Any) -> Any:
    """Return the groups that a placement's name stands for; a list of groups is returned unchanged."""
    if not isinstance(value, str):
        return value
    if value not in PLACEMENTS:
        raise PydanticCustomError("placement", f"{', '.join(PLACEMENTS)} or a list of groups")
    return [{"roles": list(roles)} for roles in PLACEMENTS[value]]


class TrainerConfig(Section):
    """Settings of RL's trainer ranks.

    sequence_parallel: number of ranks that share each sequence. offload_frozen: reference, reward models and teachers keep their weights on
    the host while they compute nothing.
    """

    ranks: int = Field(ge=1)
    sequence_parallel: int = Field(default=1, ge=1)
    gpus_per_rank: GpuShare
    zero_stage: Literal[0, 1, 2, 3]
    offload_optimizer: bool
    offload_parameters: bool = False
    offload_frozen: bool = False
    gradient_checkpointing: bool = False
    microbatch_tokens: int = Field(gt=0)

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks, or of groups of ranks that share sequences, which take different rollouts."""
        return self.ranks // self.sequence_parallel

    def of_ranks(self, shares: Sequence[Any]) -> list[Any]:
        """Return a list with one share for each rank, from a list with one for each group that shares sequences."""
        return [share for share in shares for _ in range(self.sequence_parallel)]

    def of_groups(self, results: Sequence[Any]) -> list[Any]:
        """Return a list with one result for each group that shares sequences, from a list with one for each rank."""
        return list(results[:: self.sequence_parallel])

    def conflicts(self) -> Iterator[str]:
        yield from sequence_conflicts(self.ranks, self.sequence_parallel)
        yield from offload_conflicts(self.zero_stage, offload_optimizer=self.offload_optimizer, offload_parameters=self.offload_parameters)
        yield from share_conflicts("gpus_per_rank", self.gpus_per_rank, "raise ranks instead, because a rank uses one GPU only")


class DeadlineConfig(Section):
    """Seconds after which the start of an actor, or its work in one step, counts as failed."""

    start: float = Field(default=300.0, gt=0)
    step: float = Field(default=600.0, gt=0)
