"""Runs RL jobs as the stage train_policy submits them, on a Ray head of this process, and reads their results."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config import DEFAULT_LIMITS, Params, parse_params, set_key
from rlhf_core.engines.ray.cluster import local_head, python_path, run_job
from rlhf_core.stage.job import pulse_file
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.submit import rl_job
from tools.bench.gpu.job import SEEN
from tools.bench.gpu.processes import HEAD, Budget, Peaks, actor_processes, watch_memory
from tools.bench.gpu.shapes import SHAPES, Lengths, model_folder, prompts, shape_name
from tools.bench.ours_online import ROOT, describe, read_csv
from tools.bench.workload import PLAIN_ONLINE
from tools.clerk import clerk_tree

# Trainer and engine share a GPU; the engine has this share of its memory, TRL's too.
ENGINE_MEMORY = 0.34
SHARED = {"rl.trainer.gpus_per_rank": 0.6, "rl.rollout.gpus_per_engine": 0.4, "rl.rollout.gpu_memory_fraction": ENGINE_MEMORY}
# Differences are reported here; the limits of params.yaml would end the job first.
UNLIMITED = dict.fromkeys(
    ("rl.rollout.max_logprob_difference", "rl.rollout.bfloat16_mean_difference", "rl.rollout.bfloat16_p999_difference"), 1e6
)
REWARD_MODEL = [{"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "none"}]
PHASES = ("generate", "score", "forward", "update", "sync")
TEMPLATE_TOKENS = 8  # tokens of a prompt besides its words
DEADLINES = {"start": 300.0, "step": 200.0}  # seconds
GONE_SECONDS = 30.0  # for a job's actors to end


@dataclass(frozen=True)
class Case:
    """The sizes of a job.

    prompts: prompts per step. group: responses per prompt. prompt: tokens of a prompt, least and most. response: tokens of a response.
    warmup: number of first steps that aren't timed. turns: whether trainer and engine take turns on the GPU.
    transfer: value of rl.rollout.weight_transfer; None: auto. tensor_parallel: number of GPUs of the engine. fp8: the engine computes in
    FP8, and the trainer corrects for it.
    """

    algorithm: Literal["grpo", "ppo"]
    shape: str
    dtype: Literal["bfloat16", "float32"]
    steps: int
    warmup: int
    prompts: int
    group: int
    prompt: tuple[int, int]
    response: int
    microbatch_tokens: int
    threads: int
    backend: Literal["vllm", "pytorch"] = "vllm"
    turns: bool = False
    transfer: Literal["gloo", "ipc", "nccl"] | None = None
    tensor_parallel: int = 1
    fp8: bool = False

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def name(self) -> str:
        how = ", by turns" * self.turns
        how += f", weights by {self.transfer}" if self.transfer else ""
        how += f", engine on {self.tensor_parallel} GPUs" if self.tensor_parallel > 1 else ""
        how += ", rollouts in FP8" * self.fp8
        size = f"{self.samples} samples a step of {self.response} tokens"
        return f"{self.algorithm.upper()}, {shape_name(self.shape)}, {self.dtype}, {size}{how}"

    @property
    def max_length(self) -> int:
        return self.prompt[1] + TEMPLATE_TOKENS + self.response

    @property
    def params(self) -> Params:
        tree = clerk_tree()
        rl = {
            **PLAIN_ONLINE,
            "algorithm": self.algorithm,
            f"{self.algorithm}.group_size": self.group,
            "samples_per_step": self.samples,
            "minibatch_size": self.samples,
            "steps": self.steps,
            "rollout.engines": 1,
            "rollout.backend": self.backend,
            "rollout.take_turns": self.turns,
            "rollout.max_new_tokens": self.response,
            "rollout.min_new_tokens": 0,
            "rollout.max_concurrent_sequences": self.samples,
            "trainer.microbatch_tokens": self.microbatch_tokens,
            "trainer.zero_stage": 2 if self.dtype == "bfloat16" else 0,  # as docs/gpu.md recommends
            "deadlines": DEADLINES,
            "monitor": dict.fromkeys(DEFAULT_LIMITS),
        }
        rl |= {} if self.transfer is None else {"rollout.weight_transfer": self.transfer}
        rl |= {} if self.tensor_parallel == 1 else {"rollout.tensor_parallel_size": self.tensor_parallel}
        rl |= {"rollout.quantization": "fp8", "correction.kind": "tis"} if self.fp8 else {}
        rl |= {"kl.placement": "loss", "kl.estimator": "k3"} if self.algorithm == "grpo" else {"reward.scorers": REWARD_MODEL}
        settings = {f"rl.{key}": value for key, value in rl.items()} | SHARED | UNLIMITED
        settings |= {"model.dtype": self.dtype, "model.max_length": self.max_length, "cluster.threads": self.threads}
        for key, value in settings.items():
            set_key(tree, key, value)
        return parse_params(tree)

    def rows(self) -> list[dict[str, Any]]:
        """Conversations for all steps, each of them once."""
        low, high = self.prompt
        return prompts(self.steps * self.prompts, Lengths((low, high), (1, 1)))


@dataclass(frozen=True)
class Outcome:
    """The results of a job. Lists have a value per step.

    start: seconds from the job's submission to its first step. seconds: seconds of each step, and of its phases as seconds_<phase>.
    memory: bytes that engine and trainer use on the GPU after each switch between them; empty unless they take turns.
    tokens: response tokens. entropy: the policy's entropy in nats per token. mismatch: as in tools.bench.gpu.job.
    """

    start: float
    seconds: list[dict[str, float]]
    tokens: list[float]
    entropy: list[float]
    mismatch: list[dict[str, float]]
    peaks: Peaks
    memory: list[dict[str, float]]

    def speeds(self, case: Case) -> list[float]:
        """Return the response tokens per second in each timed step."""
        steps = zip(self.tokens[case.warmup :], self.of("", warmup=case.warmup), strict=True)
        return [tokens / seconds for tokens, seconds in steps]

    def of(self, phase: str, *, warmup: int) -> list[float]:
        """Return the seconds of a phase, or of whole steps if the name is empty."""
        return [row[f"seconds_{phase}" if phase else "seconds"] for row in self.seconds[warmup:]]


@contextlib.contextmanager
def head(cpus: int) -> Iterator[str]:
    """Yield the address of the Ray head that the check's parts share, or of a new one."""
    if HEAD in os.environ:
        yield os.environ[HEAD]
        return
    with local_head(cpus=max(2, cpus), start_timeout=DEADLINES["start"]) as address:
        yield address


def run(case: Case, models: Path, folder: Path, address: str, budget: Budget) -> Outcome:
    """Submit a case's job and follow it to its end.

    Args:
        folder: a new folder for the job's files.
    Raises:
        RuntimeError: the job failed, or the budget ran out.
    """
    reward_model = str(model_folder(case.shape, models, "reward")) if case.algorithm == "ppo" else None
    model = str(model_folder(case.shape, models))
    job = describe(case.params, case.rows(), folder, model=model, name=folder.name, threads=case.threads, reward_model=reward_model)
    cluster, output = case.params.cluster, []
    rl_job(job, case.params, root=ROOT, work=Path(job.work)).write(folder / "job.pkl")
    driver = [sys.executable, "-m", "tools.bench.gpu.job", str(folder / "job.pkl")]
    began = time.perf_counter()
    with watch_memory() as peaks:
        code = run_job(
            address,
            f"exec {shlex.join(driver)}",
            name=folder.name,
            environment={"PYTHONPATH": python_path(ROOT)},
            start_timeout=cluster.start_timeout,
            silence_timeout=cluster.silence_timeout,
            pulse=pulse_file(Path(job.work)),
            on_output=output.append,
            stop_requested=lambda: budget.left < 0,
        )
    wait_until_gone()
    if code or budget.left < 0:
        late = "; the part's time was used up" if budget.left < 0 else ""
        raise RuntimeError(f"{case.name}: expected the job to end with exit code 0, got {code}{late}:\n{''.join(output)[-4000:]}")
    return read(case, job, began, peaks)


def wait_until_gone() -> None:
    """Wait until the job's actors have freed their memory."""
    until = time.monotonic() + GONE_SECONDS
    while left := actor_processes():
        if time.monotonic() > until:
            raise RuntimeError(f"actors of an ended job: expected none after {GONE_SECONDS:.0f} s, got {left}")
        time.sleep(0.2)


def read(case: Case, job: RlJob, began: float, peaks: Peaks) -> Outcome:
    seconds = read_csv(Path(job.timings), "seconds")
    curves = read_csv(Path(job.work) / "curves.csv", "response_length", "entropy")
    seen = json.loads((Path(job.work) / SEEN).read_text())
    return Outcome(
        start=seen["ends"][0] - seconds[0]["seconds"] - began,  # on Linux one clock for all processes
        seconds=seconds,
        tokens=[row["response_length"] * case.samples for row in curves],
        entropy=[row["entropy"] for row in curves],
        mismatch=seen["mismatch"],
        peaks=peaks,
        memory=read_csv(Path(job.timings), "engine_", "trainer_"),
    )


def weight_bytes(case: Case) -> int:
    """Return the bytes of the policy's weights as they are sent to an engine, without biases."""
    return SHAPES[case.shape].parameters * {"bfloat16": 2, "float32": 4}[case.dtype]
