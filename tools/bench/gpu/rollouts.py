"""Rollouts by bare vLLM and by VllmEngine, alternating: python -m tools.bench.gpu.rollouts --out FILE.json [--rehearse]

Both engines exist at the same time, each with half of the memory, and work alternately, so that a ratio is of one run. Bare vLLM returns
tokens only; in cases "as for RL" it also has a seed per prompt and returns log-probabilities, as VllmEngine always does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from tools.bench.gpu.engines import GPU, Batch, Engine, EngineSettings, engines
from tools.bench.gpu.lively import lively_folder
from tools.bench.gpu.processes import Budget, begin, cores, noted
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import SHAPES, TINY, model_folder, models_folder, shape_name

BUDGET_SECONDS = 450.0
MEMORY = 0.42  # share of the GPU for each of two engines
WARMUP_TOKENS = 8


@dataclass(frozen=True)
class Plan:
    """Measurements of a shape.

    cases: (prompts at a time, tokens per response); without any only VllmEngine runs. rounds: per case.
    prompt: tokens of prompts, least and most, evenly spread. least: seconds that must be left to start.
    reloaded: (prompts, tokens) for the comparison of reloaded weights with transformers; None: no comparison.
    """

    shape: str
    dtype: Literal["bfloat16", "float32"]
    cases: tuple[tuple[int, int], ...]
    prompt: tuple[int, int]
    rounds: int
    least: float
    reloaded: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{shape_name(self.shape)}, {self.dtype}"

    def settings(self, model: Path, threads: int) -> EngineSettings:
        sampled = (*self.cases, *([self.reloaded] if self.reloaded else []))
        return EngineSettings(
            str(model),
            self.dtype,
            max_length=self.prompt[1] + max(response for _, response in sampled),
            sequences=max(count for count, _ in sampled),
            memory=MEMORY,
            threads=threads,
        )

    def prompts(self, count: int) -> list[list[int]]:
        """Token ids of different prompts."""
        draw = np.random.default_rng(count)
        lengths = np.linspace(*self.prompt, count).astype(int)
        return [draw.integers(SHAPES[self.shape].vocab, size=length).tolist() for length in lengths]


# The most useful first.
PLANS = [
    Plan("0.5B", "bfloat16", ((256, 128), (64, 128), (256, 1024), (64, 1024)), (128, 512), 2, 0.0, reloaded=(16, 256)),
    Plan("0.5B", "float32", (), (128, 512), 0, 60.0, reloaded=(16, 256)),
    Plan("1.5B", "bfloat16", ((256, 128), (64, 128), (256, 1024)), (128, 512), 2, 120.0),
    Plan("7B", "bfloat16", ((256, 128), (64, 128)), (128, 512), 2, 200.0),
]
REHEARSAL = [Plan(TINY, "float32", ((8, 16), (4, 8)), (6, 12), 2, 0.0, reloaded=(4, 16))]


def main() -> None:
    arguments = begin(__doc__)
    budget, record, failures = Budget(BUDGET_SECONDS), Record(arguments.out), []
    with models_folder(arguments.models) as models:
        for plan in REHEARSAL if arguments.rehearse else PLANS:
            if budget.left < plan.least:
                record.add(f"{plan.name}: rollouts", "1/s", [], f"left out: {budget.left:.0f} s were left, {plan.least:.0f} are wanted")
                continue
            with noted(record, f"{plan.name}: rollouts", failures):
                measure(plan, models, record, threads=cores(2 if arguments.rehearse else 8))
    sys.exit("\n".join(failures) or 0)


def measure(plan: Plan, models: Path, record: Record, *, threads: int) -> None:
    sides = ("vLLM", "ours") if plan.cases else ("ours",)
    model = (model_folder if plan.reloaded is None else lively_folder)(plan.shape, models)
    with engines(sides, plan.settings(model, threads)) as started:
        order = "one after the other" if GPU.exists() else "both at the same time"
        for engine in started:
            record.add(f"{plan.name}: start of {called(engine.side)}", "s", [engine.start_seconds], order)
        by_side = {engine.side: engine for engine in started}
        for count, response in plan.cases:
            compare(plan, by_side, count, response, record)
        if plan.reloaded is not None:
            reload(plan, by_side["ours"], record)


def called(side: str) -> str:
    return {"vLLM": "vLLM alone", "ours": "our engine"}[side]


def compare(plan: Plan, by_side: dict[str, Engine], count: int, response: int, record: Record) -> None:
    """Run a case on both sides alternately, in reverse order every second round, after a short warm-up batch."""
    prompts = plan.prompts(count)
    turns = {
        "vLLM alone": (by_side["vLLM"], Batch(prompts, response, plain=True)),
        "our engine": (by_side["ours"], Batch(prompts, response)),
        "vLLM alone as for RL": (by_side["vLLM"], Batch(prompts, response)),
    }
    speeds: dict[str, list[float]] = {name: [] for name in turns}
    for engine, batch in turns.values():
        engine.generate(replace(batch, response=WARMUP_TOKENS))
    for turn in range(plan.rounds):
        for name in sorted(turns, reverse=turn % 2 == 1):
            engine, batch = turns[name]
            seconds, tokens = engine.generate(batch)
            speeds[name].append(tokens / seconds)
    case = f"{plan.name}, {count} prompts of {plan.prompt[0]} to {plan.prompt[1]} tokens, responses of {response}"
    for name, values in speeds.items():
        record.add(f"{case}: generated tokens by {name}", "1/s", values)
    for name in ("vLLM alone", "vLLM alone as for RL"):
        ratios = [ours / theirs for ours, theirs in zip(speeds["our engine"], speeds[name], strict=True)]
        record.add(f"{case}: our engine's speed over that of {name}", "ratio", ratios, "of the same round")


def reload(plan: Plan, engine: Engine, record: Record) -> None:
    count, response = plan.reloaded
    found = engine.reload(plan.prompts(count), response)
    record.add(f"{plan.name}: load_weights", "s", found["seconds"], "from the CPU's memory; the first one may prepare things")
    record.add(f"{plan.name}: bytes of load_weights", "bytes", [found["bytes"]])
    for size, value in found["apart"].items():
        note = f"{count} responses of {response} tokens, random weights"
        record.add(f"{plan.name}: log-probabilities after load_weights beside transformers', {size}", "nats", [value], note)


if __name__ == "__main__":
    main()
