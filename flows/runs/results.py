"""Reads the results of a run from its folder or from a commit, for comparisons and for a report's baselines."""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Callable
from contextlib import suppress
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pandas as pd

from flows.chain.stages import read_stages
from rlhf_core.config import ConfigError, read_yaml_text, with_usual_rates
from rlhf_core.paths import (
    CURVES,
    EVALUATION_PROMPTS,
    EVALUATION_SAMPLES,
    METRICS,
    ROUNDS_FIGURE,
    ROUNDS_FILE,
    ROUNDS_PIPELINE,
    ROUNDS_TABLE,
    RUNS,
    STAGE_METRICS,
)
from rlhf_core.process import without_git_places
from rlhf_core.provenance.dvc_cache import cache_folder
from rlhf_core.report.differences import Results, changed_keys
from rlhf_core.report.inputs import Side, read_times
from rlhf_core.rounds.pins import read_round_stages, read_rounds

TRACKED = ("data/prepared", "models/")  # data and models; other outs are results

Read = Callable[[str], bytes | None]  # a path inside the run -> its content; None: not there


def read_side(root: Path, name: str) -> Side:
    """Return a run by its name in runs/, by a folder, or by a branch, tag or commit.

    Raises:
        ConfigError: there is no such run, or it has no results.
    """
    folder = next((f for f in (root / RUNS / name, root / name) if (f / "params.yaml").is_file()), None)
    if folder is not None:
        read = partial(content, folder)
        return _side(name, read, read(str(EVALUATION_SAMPLES)), times=read_times(folder))
    commit = find_commit(root, name)
    if commit is None:
        raise ConfigError(
            f"{name}: expected a run in {RUNS}/, a folder with params.yaml, or a branch, tag or commit, got none of these; "
            f"there are {', '.join(known_runs(root)) or 'no runs'}"
        )
    committed = partial(show, root, commit)
    return _side(name, committed, _from_cache(root, committed), times={})


def content(folder: Path, path: str) -> bytes | None:
    return (folder / path).read_bytes() if (folder / path).is_file() else None


def _side(name: str, read: Read, samples: bytes | None, *, times: dict) -> Side:
    results = read_results(name, read)
    curves = {stage: rows for stage, path in CURVES.items() if (rows := read(str(path))) is not None}
    return Side(
        results=results,
        curves={stage: pd.read_csv(io.BytesIO(rows)) for stage, rows in curves.items() if stage in results.metrics},
        samples=None if samples is None or "evaluate" not in results.metrics else pd.read_parquet(io.BytesIO(samples)),
        times=times,
    )


def read_results(name: str, read: Read) -> Results:
    """Return params, hashes of outs and metrics of a run.

    Raises:
        ConfigError: there is no params.yaml, or no stage has written metrics.
    """
    params, lock = read("params.yaml"), read("dvc.lock")
    if params is None:
        raise ConfigError(f"{name}: expected a run with params.yaml, got none there; name a run, a folder or a commit of this project")
    metrics = {stage: json.loads(text) for stage, path in STAGE_METRICS.items() if (text := read(str(path))) is not None}
    if not metrics:
        raise ConfigError(
            f"{name}: expected the results of a run, got no file of {METRICS}/; name a run, branch or commit that has them, or run it first"
        )
    stages = {} if lock is None else read_yaml_text(lock.decode(), f"dvc.lock of {name}")["stages"]
    outs = {out["path"]: out["md5"] for stage in stages.values() for out in stage.get("outs", [])}
    kept = {path: md5 for path, md5 in outs.items() if path.startswith(TRACKED)}
    prompts = read(str(EVALUATION_PROMPTS)) if "evaluate" in metrics else None
    written = read_yaml_text(params.decode(), f"params.yaml of {name}")
    stale = {stage: keys for stage in metrics if (keys := _unlike_lock(stages.get(stage, {}), written))}
    return Results(name, with_usual_rates(written), kept, metrics, None if prompts is None else prompts.decode(), stale)


def _unlike_lock(entry: dict[str, Any], params: dict[str, Any]) -> tuple[str, ...]:
    """Keys of params.yaml that don't have the values with which dvc.lock says that a stage ran."""
    locked = (entry.get("params") or {}).get("params.yaml") or {}
    return tuple(key for key, *_ in changed_keys(locked, {key: _value(params, key) for key in locked}))


def _value(params: dict[str, Any], key: str) -> Any:
    return reduce(lambda node, part: node.get(part) if isinstance(node, dict) else None, key.split("."), params)


def result_paths(workspace: Path) -> list[str]:
    """Return paths that a run commits: params, locks, and outs that DVC's cache doesn't keep. Other files are the user's."""
    stages = [*read_stages(workspace).values()]
    found = ["params.yaml", "dvc.lock", "baselines.json"]
    if rounds := read_rounds(workspace) if (workspace / ROUNDS_FILE).is_file() else {}:
        found += map(str, (ROUNDS_FILE, ROUNDS_PIPELINE.with_suffix(".lock"), ROUNDS_TABLE, ROUNDS_FIGURE))
        stages += [stage for number in rounds for stage in read_round_stages(number, workspace).values()]
    for stage in stages:
        entries = [entry for kind in ("outs", "metrics", "plots") for entry in stage.get(kind) or []]
        found += [path for entry in entries if isinstance(entry, dict) for path, how in entry.items() if how and how.get("cache") is False]
        # DVC lists its outs there, so that git ignores them.
        found += [str(Path(out).parent / ".gitignore") for entry in entries for out in ([entry] if isinstance(entry, str) else entry)]
    return sorted(set(found))


def input_paths(workspace: Path) -> list[str]:
    """Return paths inside the workspace on which stages depend."""
    stages = read_stages(workspace).values()
    return sorted({path for stage in stages for path in stage.get("deps") or [] if isinstance(path, str) and not Path(path).is_absolute()})


def find_commit(root: Path, name: str) -> str | None:
    """Return the commit of a run's branch, or of any other revision; None if there is none."""
    for revision in (f"refs/heads/run/{name}", name):
        done = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}")
        if done.returncode == 0:
            return done.stdout.decode().strip()
    return None


def known_runs(root: Path) -> list[str]:
    done = _git(root, "for-each-ref", "--sort=-committerdate", "--format=%(refname:lstrip=3)", "refs/heads/run/")
    return done.stdout.decode().split() if done.returncode == 0 else []


def show(root: Path, commit: str, path: str) -> bytes | None:
    done = _git(root, "show", f"{commit}:{path}")
    return done.stdout if done.returncode == 0 else None


def _from_cache(root: Path, read: Read) -> bytes | None:
    """Return the evaluation's samples from DVC's cache, since git doesn't have them; None if the cache lacks them."""
    lock: Any = read("dvc.lock")
    stages = {} if lock is None else read_yaml_text(lock.decode(), "dvc.lock")["stages"]
    md5 = next((out["md5"] for out in stages.get("evaluate", {}).get("outs", []) if out["path"] == str(EVALUATION_SAMPLES)), None)
    if md5 is None:
        return None
    with suppress(OSError):
        return (cache_folder(root) / md5[:2] / md5[2:]).read_bytes()
    return None


def _git(root: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=root, env=without_git_places(), capture_output=True, check=False)
