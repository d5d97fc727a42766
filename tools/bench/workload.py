"""Describes the work of both sides: a model folder, rows, steps, and a section of params.yaml."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config import DEFAULT_LIMITS, Params, parse_params, set_key
from rlhf_core.data.batching import batch_indices
from tools.clerk import clerk_tree

Method = Literal["sft", "reward", "dpo", "grpo", "rloo"]
ONLINE = ("grpo", "rloo")
# A constant learning rate; no checkpoints and no evaluation.
PLAIN: dict[str, Any] = {
    "warmup_fraction": 0.0,
    "min_learning_rate_fraction": 1.0,
    "checkpoint_every": 10**9,
    "eval_every": 10**9,
    "max_grad_norm": 1.0,
}
# Online: responses of equal length, one optimizer step per batch, no checkpoints.
RESPONSE_TOKENS = 24
REWARD = str(Path(__file__).parent / "variety.py")
PLAIN_ONLINE: dict[str, Any] = {
    "learning_rate": 1e-4,
    "warmup_steps": 0,
    "rollout.max_new_tokens": RESPONSE_TOKENS,
    "rollout.min_new_tokens": RESPONSE_TOKENS - 1,  # the last token may be the end token
    "kl.coef": 0.05,
    "reward.scorers": [{"name": "variety", "kind": "function", "path": f"{REWARD}:variety", "weight": 1.0, "normalization": "none"}],
    "reward.no_eos_penalty": 0.0,
    "checkpoint_every": 10**9,
}
# as in TRL
KL = {"grpo": {"kl.placement": "loss", "kl.estimator": "k3"}, "rloo": {"kl.placement": "reward", "kl.estimator": "k1"}}


@dataclass(frozen=True)
class Workload:
    """Optimizer steps of one method.

    model: folder of the language model (method reward: of the reward model) with its tokenizer.
    rows: JSONL with messages, and response, or chosen and rejected, or neither. No conversation occurs twice: the reward trainer here keeps
        a conversation's pairs together, and TRL doesn't.
    batch_size: demonstrations, pairs or responses per optimizer step.
    overrides: keys of the method's section of params.yaml, applied after PLAIN or PLAIN_ONLINE.
    of_model: keys of its section `model`.
    """

    method: Method
    model: str
    rows: str
    steps: int
    batch_size: int
    overrides: dict[str, Any] = field(default_factory=dict)
    of_model: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        tree = clerk_tree()
        if self.is_online:
            section, size = "rl", {"algorithm": self.method, "samples_per_step": self.batch_size, "minibatch_size": self.batch_size}
            settings = {**PLAIN_ONLINE, **KL[self.method], **size, "steps": self.steps}
            set_key(tree, "rl.monitor", dict.fromkeys(DEFAULT_LIMITS))
        else:
            section, settings = self.method, {**PLAIN, "batch_size": self.batch_size}
        for key, value in {**settings, **self.overrides}.items():
            set_key(tree, f"{section}.{key}", value)
        for key, value in self.of_model.items():
            set_key(tree, f"model.{key}", value)
        return parse_params(tree)

    @property
    def is_online(self) -> bool:
        """Whether responses are sampled; the losses of the sides then differ."""
        return self.method in ONLINE

    def read_rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(self.rows).read_text(encoding="utf-8").splitlines()]

    def drawn_rows(self) -> list[dict[str, Any]]:
        """The rows of all steps, in the order of this project's loop."""
        rows = self.read_rows()
        seed = self.params.seed
        return [
            rows[i]
            for step in range(self.steps)
            for i in batch_indices(step, batch_size=self.batch_size, num_examples=len(rows), seed=seed)
        ]


@dataclass
class Run:
    """The result of a work: the loss of each optimizer step (online: the mean reward), and two clocks at its end, in seconds.

    ends: wall clock.
    cpu_ends: CPU time of the process over all threads. Empty for an online method on this project's side, which has several processes.
    """

    losses: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)

    def end_step(self) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())


Side = Callable[[Workload, Path], Run]  # the folder is for the side's files


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def workloads_to_json(works: list[Workload]) -> str:
    return json.dumps([asdict(work) for work in works])


def workloads_from_json(text: str) -> list[Workload]:
    return [Workload(**work) for work in json.loads(text)]
