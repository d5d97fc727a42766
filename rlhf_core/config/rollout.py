"""How RL samples: the rollout engines, and episodes of several turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from rlhf_core.config.base import RolloutBackend, Section, StopStrings
from rlhf_core.config.placement import GpuShare, share_conflicts


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
    max_new_tokens: int = Field(gt=0)  # of a response, which is cut off there
    min_new_tokens: int = Field(default=0, ge=0)  # before an end token may be sampled
    temperature: float = Field(gt=0)  # of sampling; the trainer's log-probabilities have it too
    top_p: float = Field(gt=0, le=1)  # sample from the most likely tokens with this probability together
    top_k: int | None = Field(gt=0)  # sample from so many most likely tokens; null: from all
    stop: StopStrings
    engines: int = Field(ge=1)
    gpus_per_engine: GpuShare
    gpu_memory_fraction: float = Field(gt=0, lt=1)
    kv_cache_gib: int = Field(gt=0)
    max_concurrent_sequences: int = Field(gt=0)  # that an engine samples at the same time
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
