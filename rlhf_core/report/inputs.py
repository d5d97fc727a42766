"""The inputs of a report: the stages' results, checked before anything is drawn, and the timings of a run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_core.paths import TIMINGS, processes_file
from rlhf_core.report.differences import Results

Tree = Mapping[str, Any]

REQUIRED_COLUMNS: dict[str, tuple[str, ...]] = {
    "lengths": ("use", "column", "low", "high", "texts"),
    "sft_curves": ("step", "phase", "loss", "heldout_loss"),
    "reward_curves": ("step", "loss", "accuracy", "heldout_loss", "heldout_accuracy"),
    "heldout": ("source", "split"),
    "samples": (
        *("id", "source", "prompt", "mode", "sft_response", "policy_response"),
        *("sft_score", "policy_score", "sft_judge_ok", "policy_judge_ok"),
    ),
}

RL_COLUMNS = (  # of policy_curves, with method rl
    *("step", "score_mean", "score_std", "kl_mean", "entropy", "response_length"),
    *("truncated_fraction", "clip_frac", "approx_kl", "logprob_difference"),
)
OFFLINE_COLUMNS = ("step", "loss")  # of policy_curves, with every other method
TIMED_STAGES = ("train_sft", "train_reward", "train_policy")


class ReportInputError(ValueError):
    """A file lacks a table, column or key that the report needs."""


@dataclass(frozen=True)
class Stopped:
    """The point at which a chain ended early.

    because: the stage's message, or "".
    states: stage -> done, stopped here or not reached, in the order of the chain.
    """

    stage: str
    because: str
    states: Mapping[str, str]


@dataclass(frozen=True)
class ReportInputs:
    """Metrics as the stages wrote them, curves with one row per step, tables with one row per pair or sample.

    A field is None if the chain stopped before the stage that makes it. If `stopped` is None, no field is.

    prompts: plots/evaluation.csv as text (rlhf_core.report.differences).
    params: the sections of params.yaml that affect the result, section -> values.
    written_params: the same without defaults, as params.yaml and the dvc.lock of other runs have them.
    evaluation_scorers: scorers that scored the answers of the evaluation. method_scorers: those the policy was trained on.
    unusual: settings that wreck pretrained models, each with the usual range.
    files: path -> sha256 of every file that the report is made from.
    outs: path -> md5 of data and models, from dvc.lock.
    external: key in params, path, name or address, and sha256 or commit of data and models from outside the project, from dvc.lock.
    packages: name -> version.
    baselines: previous, promoted -> the run to compare with, if there is one.
    fingerprint: sha256 over all inputs, the params and the report's code.
    """

    title: str
    params: Tree
    written_params: Tree
    evaluation_scorers: Sequence[Tree]
    method_scorers: Sequence[Tree]
    unusual: Sequence[str]
    files: Mapping[str, str]
    outs: Mapping[str, str]
    external: Sequence[tuple[str, str, str]]
    packages: Mapping[str, str]
    fingerprint: str
    stopped: Stopped | None
    baselines: Mapping[str, Results]
    data: Tree | None
    validation: Tree | None
    model_check: Tree | None
    sft: Tree | None
    reward: Tree | None
    gate: Tree | None
    policy: Tree | None
    evaluation: Tree | None
    lengths: pd.DataFrame | None
    sft_curves: pd.DataFrame | None
    reward_curves: pd.DataFrame | None
    policy_curves: pd.DataFrame | None
    heldout: pd.DataFrame | None
    samples: pd.DataFrame | None
    prompts: str | None

    def __post_init__(self):
        of_policy = RL_COLUMNS if self.method == "rl" else OFFLINE_COLUMNS
        for name, columns in (REQUIRED_COLUMNS | {"policy_curves": of_policy}).items():
            table = getattr(self, name)
            missing = [] if table is None else [c for c in columns if c not in table.columns]
            if missing:
                raise ReportInputError(
                    f"{name}: expected the columns {', '.join(columns)}, got none named {', '.join(missing)}; rerun its stage"
                )

    @property
    def method(self) -> str:
        """The value of alignment.method, such as rl or dpo."""
        return need(self.params, "alignment", "method")


def need(tree: Tree, *path: str) -> Any:
    """Return the value at a path of keys in the metrics.

    Raises:
        ReportInputError: a key of the path is absent.
    """
    node: Any = tree
    for i, key in enumerate(path):
        if not isinstance(node, Mapping) or key not in node:
            there = ", ".join(node) if isinstance(node, Mapping) else repr(node)
            raise ReportInputError(f"{'.'.join(path)}: expected the key {path[i]}, got {there}; rerun the stage that writes it")
        node = node[key]
    return node


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage's steps in all and by phase.

    phases: empty for a stage without phases; `other` is the time outside of them.
    """

    steps: int
    seconds: float
    phases: Mapping[str, float]

    @property
    def shares(self) -> dict[str, float]:
        return {name: seconds / self.seconds for name, seconds in self.phases.items()}


@dataclass(frozen=True)
class Side:
    """One of two compared runs.

    curves: one row per step by stage. samples: as evaluate wrote them; None if they are missing.
    """

    results: Results
    curves: Mapping[str, pd.DataFrame]
    samples: pd.DataFrame | None
    times: Mapping[str, StageTime]


def read_times(workspace: Path) -> dict[str, StageTime]:
    """Timings of the stages whose curves in `workspace` come from the same run.

    DVC restores curves from its cache without their timings, so the file <stage>.of names the sha256 of the curves it belongs to.
    """
    times = {}
    for stage in TIMED_STAGES:
        timings, curves = workspace / f"reports/timings/{stage}.csv", workspace / f"plots/{stage}.csv"
        of = timings.with_suffix(".of")
        if timings.is_file() and curves.is_file() and of.is_file() and of.read_text(encoding="ascii") == sha256(curves):
            times[stage] = summarize(pd.read_csv(timings))
    return times


def read_processes(workspace: Path, times: Mapping[str, StageTime], method: str) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """Return the processes of the RL job to which `times` belong, by node: name, pid and GPUs of each; empty if they aren't known.

    These are the processes of the job's last start.

    Args:
        method: alignment.method; no other than rl writes the file, which may be an earlier run's.
    """
    path = processes_file(workspace / TIMINGS / "train_policy.csv")
    if method != "rl" or "train_policy" not in times or not path.is_file():
        return {}
    nodes: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for name, at in json.loads(path.read_text(encoding="utf-8")).items():
        nodes.setdefault(f"{at['host']} (node {at['node'][:8]})", []).append((name, at))
    return nodes


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def summarize(rows: pd.DataFrame) -> StageTime:
    """Sums the columns `seconds` and `seconds_<phase>` over the steps and orders the phases by time."""
    phases = {c.removeprefix("seconds_"): float(rows[c].sum()) for c in rows.columns if c.startswith("seconds_")}
    total = float(rows["seconds"].sum())
    if phases:
        phases = dict(sorted(phases.items(), key=lambda phase: -phase[1])) | {"other": max(0.0, total - sum(phases.values()))}
    return StageTime(len(rows), total, phases)
