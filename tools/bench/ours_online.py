"""Runs this project's side of the online methods: the RL job as the stage submits it, on its own Ray head."""

from __future__ import annotations

import contextlib
import csv
import json
import shlex
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params
from rlhf_core.data.schema import write_rows
from rlhf_core.engines.ray.cluster import local_head, python_path, run_job
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.submit import rl_job
from tools.bench.driver import CLOCK
from tools.bench.workload import Run, Workload

ROOT = Path(__file__).parents[2]


def train(work: Workload, folder: Path, *, threads: int) -> Run:
    timings(work, folder, threads=threads)
    return Run(losses=[row["score_mean"] for row in read_csv(folder / "curves.csv", "score_mean")], ends=read_clock(folder)["ends"])


def timings(work: Workload, folder: Path, *options: str, threads: int) -> list[dict[str, float]]:
    """Return the seconds of each step, and seconds_<phase> of its phases.

    options: options of tools.bench.driver.
    """
    job = describe(work.params, work.read_rows(), folder, model=work.model, name=work.method, threads=threads)
    rl_job(job, work.params, root=ROOT, work=Path(job.work)).write(folder / "job.pkl")
    (folder / "work.json").write_text(json.dumps(asdict(work)))
    driver = [sys.executable, "-m", "tools.bench.driver", str(folder / "job.pkl"), str(folder / "work.json"), *options]
    with submit(work, folder, driver, threads=threads):
        return read_csv(Path(job.timings), "seconds")


@contextlib.contextmanager
def submit(work: Workload, folder: Path, driver: list[str], *, threads: int) -> Iterator[None]:
    """Run a driver as the stage does, on its own Ray head, which lives as long as the context.

    Raises:
        RuntimeError: the driver's exit code isn't 0.
    """
    rl, cluster, output = work.params.rl, work.params.cluster, []
    with local_head(cpus=max(rl.trainer.ranks + rl.rollout.engines, threads), start_timeout=cluster.start_timeout) as address:
        code = run_job(
            address,
            shlex.join(driver),
            name=folder.name,
            environment={"PYTHONPATH": python_path(ROOT)},
            start_timeout=cluster.start_timeout,
            silence_timeout=cluster.silence_timeout,
            pulse=folder / "pulse",  # as in a job with this folder
            on_output=output.append,
            stop_requested=lambda: False,
        )
        if code:
            raise RuntimeError(f"RL job: expected exit code 0, got {code}:\n{''.join(output)[-3000:]}")
        yield


def describe(
    params: Params, rows: list[dict[str, Any]], folder: Path, *, model: str, name: str, threads: int, reward_model: str | None = None
) -> RlJob:
    """Return a job with the rows' conversations as prompts.

    model, reward_model: folders of the models. name: name of the run.
    """
    prepared = folder / "prepared"
    prompts = [
        {"id": str(i), "source": "bench", "split": "train", "messages": row["messages"], "label": None} for i, row in enumerate(rows)
    ]
    write_rows(prepared, "prompt", prompts)
    return RlJob(
        seed=params.seed,
        model=params.model,
        train_on=params.sft.train_on,
        train_on_thoughts=params.sft.train_on_thoughts,
        rl=params.rl,
        threads=threads,
        prepared=str(prepared),
        sft_model=model,
        reward_model=reward_model,
        scorer_models={} if reward_model is None else {"reward_model": reward_model},
        source_judges={},
        work=str(folder),
        checkpoints=StoreSettings(),
        output=str(folder / "policy"),
        timings=str(folder / "timings.csv"),
    )


def read_clock(folder: Path) -> dict[str, list[float]]:
    """The clock that tools.bench.driver wrote."""
    return json.loads((folder / CLOCK).read_text())


def read_csv(path: Path, *prefixes: str) -> list[dict[str, float]]:
    """Columns of a CSV file whose names have this prefix."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{name: float(value) for name, value in row.items() if name.startswith(prefixes)} for row in csv.DictReader(file)]
