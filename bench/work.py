"""The work that both sides do: a model folder, rows, steps, and a section of params.yaml that says how."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rlhf_core.config import Params, parse_params, read_yaml, set_key
from rlhf_core.data.batching import batch_indices

Method = Literal["sft", "reward", "dpo"]
DEFAULTS = Path(__file__).parents[1] / "params.yaml"
# A constant learning rate from the first step on, and nothing but optimizer steps.
PLAIN = {"warmup_fraction": 0.0, "min_learning_rate_fraction": 1.0, "checkpoint_every": 10**9, "eval_every": 10**9, "max_grad_norm": 1.0}


@dataclass(frozen=True)
class Work:
    """Optimizer steps of one method.

    model: folder of the language model, or of the reward model where the method is reward, with its tokenizer.
    rows: JSONL; messages and response, or messages, chosen and rejected. No conversation occurs twice, so that our reward trainer, which
        keeps a conversation's pairs together, sees single pairs as TRL does.
    overrides: of the method's section of params.yaml, on top of PLAIN.
    """

    method: Method
    model: str
    rows: str
    steps: int
    batch_size: int
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def params(self) -> Params:
        tree = read_yaml(DEFAULTS)
        for key, value in {**PLAIN, "batch_size": self.batch_size, **self.overrides}.items():
            set_key(tree, f"{self.method}.{key}", value)
        return parse_params(tree)

    def read_rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in Path(self.rows).read_text(encoding="utf-8").splitlines()]

    def drawn_rows(self) -> list[dict[str, Any]]:
        """The rows of all steps in the order in which our loop draws them."""
        rows = self.read_rows()
        seed = self.params.seed
        return [
            rows[i]
            for step in range(self.steps)
            for i in batch_indices(step, batch_size=self.batch_size, num_examples=len(rows), seed=seed)
        ]


@dataclass
class Run:
    """What came of a work: the loss of each optimizer step, and two clocks at its end, in seconds.

    ends: the time of day's clock, what a user waits for.
    cpu_ends: the process's computing time over all threads, which other processes on the machine hardly change.
    """

    losses: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    cpu_ends: list[float] = field(default_factory=list)

    def end_step(self) -> None:
        self.ends.append(time.perf_counter())
        self.cpu_ends.append(time.process_time())


Side = Callable[[Work, Path], Run]  # the folder is for what the side writes


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def works_to_json(works: list[Work]) -> str:
    return json.dumps([asdict(work) for work in works])


def works_from_json(text: str) -> list[Work]:
    return [Work(**work) for work in json.loads(text)]
