"""Preference training of a tiny model: rows, sections of params.yaml, and what a stage passes to the trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_params

from rlhf_core.checkpoint.store import CheckpointStore
from rlhf_core.curves import MetricsLog
from rlhf_core.trainers.preference.train import COLUMNS, PreferenceRun, train_on_examples, train_on_pairs
from rlhf_core.trainers.supervised.loop import TrainLoop

QUESTIONS = ["Please sort 41.", "Quick, the largest of 309.", "Please sort 7.", "Quick, 9."]


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"id": str(i), "messages": [{"role": "user", "content": QUESTIONS[i % 4]}], "chosen": f"Certainly: {i}.", "rejected": f"{i}{i} no"}
        for i in range(count)
    ]


def run_of(folder: Path, scratch: Path, *, steps: int = 4, stop_after: int | None = None) -> PreferenceRun:
    seen = []

    def metrics_log(step: int) -> MetricsLog:
        return MetricsLog(scratch / "curves.csv", COLUMNS, timings=None, first_step=step)

    def stop_requested() -> bool:
        seen.append(1)
        return len(seen) == stop_after

    loop = TrainLoop(0, 100, 2, 0, lambda phase: CheckpointStore(scratch / phase), metrics_log, stop_requested)
    return PreferenceRun(folder, tiny_params().model, scratch, loop, steps)


def config(method: str, **changes: Any) -> Any:
    base = {"batch_size": 6, "learning_rate": 3e-3, "microbatch_tokens": 120}
    return getattr(tiny_params(**{f"{method}__{name}": value for name, value in {**base, **changes}.items()}), method)


TRAIN = {"dpo": train_on_pairs, "kto": train_on_examples}
