"""Where a run's time went, by stage and phase. Never in what DVC tracks: no two runs take the same time."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

STAGES = ("train_sft", "train_reward", "train_policy")
_PREFIX = "seconds_"  # of a phase's column


@dataclass(frozen=True)
class StageTime:
    """seconds: of all steps. phases: name -> seconds; what no phase has measured is `other`. Empty where the stage has none."""

    steps: int
    seconds: float
    phases: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        return {name: seconds / self.seconds for name, seconds in self.phases.items()}


def read_times(workspace: Path) -> dict[str, StageTime]:
    """Of the stages whose curves in `workspace` are those that the timings there were taken with.

    DVC restores curves of earlier work and knows nothing of timings, so each file of timings has the hash of its curves beside it.
    """
    times = {}
    for stage in STAGES:
        timings, curves = workspace / f"reports/timings/{stage}.csv", workspace / f"plots/{stage}.csv"
        of = timings.with_suffix(".of")
        if timings.is_file() and curves.is_file() and of.is_file() and of.read_text(encoding="ascii") == sha256(curves):
            times[stage] = summarize(pd.read_csv(timings))
    return times


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def summarize(rows: pd.DataFrame) -> StageTime:
    """Args: rows: step, seconds and a column `seconds_<phase>` for each phase."""
    phases = {c.removeprefix(_PREFIX): float(rows[c].sum()) for c in rows.columns if c.startswith(_PREFIX)}
    total = float(rows["seconds"].sum())
    if phases:
        phases = dict(sorted(phases.items(), key=lambda phase: -phase[1])) | {"other": max(0.0, total - sum(phases.values()))}
    return StageTime(len(rows), total, phases)
