"""Stage report: everything the chain has measured as one HTML file that opens anywhere, offline."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pandas as pd

from rlhf_core.config import STAGE_SECTIONS, Params
from rlhf_core.report.inputs import ReportInputs
from rlhf_core.report.page import render
from tasks.stage import EVALUATION_SAMPLES, METRICS, PLOTS, REPORT, REWARD_HELDOUT, Stage, read_json

METRICS_FILES = {
    "data": METRICS / "prepare_data.json",
    "validation": METRICS / "validation.json",
    "sft": METRICS / "train_sft.json",
    "reward": METRICS / "train_reward.json",
    "gate": METRICS / "gate.json",
    "policy": METRICS / "train_policy.json",
    "evaluation": METRICS / "evaluate.json",
}
CURVES = {"sft_curves": PLOTS / "train_sft.csv", "reward_curves": PLOTS / "train_reward.csv", "policy_curves": PLOTS / "train_policy.csv"}
TABLES = {"heldout": REWARD_HELDOUT, "samples": EVALUATION_SAMPLES}


def main() -> None:
    with Stage("report", resumable=False) as stage:
        page = render(read_inputs(stage.params, stage.fingerprint))
        aside = stage.scratch / "report.html"
        aside.write_text(page, encoding="utf-8", newline="\n")
        REPORT.parent.mkdir(parents=True, exist_ok=True)
        aside.replace(REPORT)


def read_inputs(params: Params, fingerprint: str) -> ReportInputs:
    """Raises ReportInputError when a file lacks what the report needs."""
    paths = [*METRICS_FILES.values(), *CURVES.values(), *TABLES.values()]
    return ReportInputs(
        title=params.report.title,
        params={s: v for s, v in params.model_dump().items() if s in STAGE_SECTIONS["report"]},
        files={path.as_posix(): sha256(path) for path in sorted(paths)},
        fingerprint=fingerprint,
        **{name: read_json(path) for name, path in METRICS_FILES.items()},
        **{name: pd.read_csv(path) for name, path in CURVES.items()},
        **{name: pd.read_parquet(path) for name, path in TABLES.items()},
    )


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


if __name__ == "__main__":
    main()
