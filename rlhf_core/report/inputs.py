"""What the report is made from, checked before anything is drawn. Reading the files is the stage's business."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from rlhf_core.report.differences import Results

Tree = Mapping[str, Any]

REQUIRED_COLUMNS: dict[str, tuple[str, ...]] = {
    "lengths": ("use", "column", "low", "high", "texts"),
    "sft_curves": ("step", "phase", "loss", "heldout_loss"),
    "reward_curves": ("step", "loss", "accuracy", "heldout_loss", "heldout_accuracy"),
    "heldout": ("source", "split", "chosen_score", "rejected_score"),
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


class ReportInputError(ValueError):
    """A file lacks something that the report can't do without."""


@dataclass(frozen=True)
class Stopped:
    """Where the chain ended early.

    because: what the stage said, or "".
    states: stage -> done, stopped here or not reached, in their order.
    """

    stage: str
    because: str
    states: Mapping[str, str]


@dataclass(frozen=True)
class ReportInputs:
    """Metrics as the stages wrote them, curves with one row per step, tables with one row per pair or sample.

    None is what a chain that stopped early has not made; without `stopped` nothing is.

    prompts: plots/evaluation.csv as it is (rlhf_core.report.differences).
    params: the sections of params.yaml that shaped the result, section -> values.
    written_params: the same as params.yaml has them, without what is left to defaults, as dvc.lock keeps those of other runs.
    files: path -> sha256 of every file that the report is made from.
    outs: path -> md5 of the data and models, as dvc.lock has them.
    packages: name -> version.
    baselines: previous, promoted -> the run that this one is held against, where there is one.
    fingerprint: sha256 over all of them, the params and the code that made the report.
    """

    title: str
    params: Tree
    written_params: Tree
    files: Mapping[str, str]
    outs: Mapping[str, str]
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
                    f"{name}: expected the columns {', '.join(columns)}, got none named {', '.join(missing)}; run the stage before again"
                )

    @property
    def method(self) -> str:
        """Which way led to the policy: rl, dpo and so on."""
        return need(self.params, "alignment", "method")


def need(tree: Tree, *path: str) -> Any:
    """The value at a path of keys.

    Raises:
        ReportInputError: a key of the path is absent.
    """
    node: Any = tree
    for i, key in enumerate(path):
        if not isinstance(node, Mapping) or key not in node:
            there = ", ".join(node) if isinstance(node, Mapping) else repr(node)
            raise ReportInputError(f"{'.'.join(path)}: expected the key {path[i]}, got {there}; run the stage that writes it again")
        node = node[key]
    return node
