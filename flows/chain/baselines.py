"""Baselines of a run's report (the previous run and the promoted one), which are written to baselines.json when the run starts.

The file has the baselines' metrics and not only their names, and is committed with the run, so a report that is made again is the same.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from flows.registry.objects import read_objects
from flows.registry.state import read_promoted
from flows.registry.tags import Version
from flows.runs.results import Read, content, find_commit, known_runs, read_results, show
from rlhf_core.config import ConfigError, parse_json, read_yaml_text, shown, with_usual_rates
from rlhf_core.paths import METRICS, PLOTS
from rlhf_core.report.differences import Results

BASELINES = Path("baselines.json")
FIGURES = ("train_sft", "gate_reward", "evaluate")  # stages whose metrics a comparison shows
MAX_RUN_FILE = 64 << 20  # bytes of a committed file of a run, such as curves
GATE_FIGURES = ("accuracy", "low", "high")

Baseline = dict[str, Any]


def pin_baselines(root: Path, workspace: Path, *, up_to_date: bool) -> bool:
    """Write the baselines of a run before its first stage. A finished run in `workspace` becomes the previous run.

    A run resumed after a failure keeps its baselines. The first run in a worktree is compared with the run that finished last.

    Args:
        up_to_date: whether the workspace has the results of its params; the baselines then stay.
    Returns:
        Whether the baselines have changed.
    Raises:
        ConfigError: a run's results or the registry can't be read, or a tag contradicts its commit.
    """
    path = workspace / BASELINES
    if up_to_date or not path.is_file():  # runs of older versions have no baselines
        return False
    pinned = json.loads(path.read_text(encoding="utf-8"))
    own = whole_run("the run before, in this folder", partial(content, workspace))
    if own is None and any(pinned.values()):
        return False
    others = _other_runs(root, workspace.name) if workspace.resolve() != root.resolve() else iter(())
    found = {"previous": own or next(others, None), "promoted": _promoted(root)}
    text = json.dumps(found, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    changed = text != path.read_text(encoding="utf-8")
    if changed:
        path.write_text(text, encoding="utf-8")
    return changed


def _promoted(root: Path) -> Baseline | None:
    """Return the run of the promoted policy, or else of the promoted reward model."""
    for artifact in ("policy", "reward-model"):
        current = read_promoted(root, artifact)
        if current is not None:
            return _of_version(root, current)
    return None


def _of_version(root: Path, version: Version) -> Baseline | None:
    """Return the run of a version. Its commit is untrusted.

    Raises:
        ConfigError: a file isn't a valid result of a run.
    """
    name = f"{version.artifact} {version.version}"
    try:
        return whole_run(name, partial(_show_within_limits, root, version.commit))
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{name}: expected the files of a finished run in commit {version.commit[:10]}, got {shown(repr(error))}"
        ) from error


def _show_within_limits(root: Path, commit: str, path: str) -> bytes | None:
    """Read a file of a commit, within the limits of size and depth of a run's files."""
    (found,) = read_objects(root, [f"{commit}:{path}"], MAX_RUN_FILE)
    if found is None or found.kind != "blob":
        return None
    subject = f"{path} of commit {commit[:10]}"
    if found.content is None:
        raise ConfigError(f"{subject}: expected at most {MAX_RUN_FILE} bytes, got {found.size}; don't use that commit")
    if path.endswith(".json"):
        tree = parse_json(found.content.decode("utf-8"), subject)
        if not isinstance(tree, dict):
            raise ConfigError(f"{subject}: expected a mapping of names to figures, got {type(tree).__name__}; don't use that commit")
    return found.content


def _other_runs(root: Path, name: str) -> Iterator[Baseline]:
    """Yield other finished runs, newest first."""
    for run in known_runs(root):
        commit = find_commit(root, run) if run != name else None
        found = commit and whole_run(f"run/{run} ({commit[:9]})", partial(show, root, commit))
        if found:
            yield found


def whole_run(name: str, read: Read) -> Baseline | None:
    """Return the results of a finished run; None if it has no report, or files changed after the report was made.

    The params come from dvc.lock, since params.yaml may have changed later.
    """
    lock = read("dvc.lock")
    stages = {} if lock is None else read_yaml_text(lock.decode(), f"dvc.lock of {name}")["stages"]
    used = [d for d in stages.get("report", {}).get("deps", []) if Path(d["path"]).parts[0] in (str(METRICS), str(PLOTS))]
    if not used or any(_md5(read(d["path"])) != d["md5"] for d in used):
        return None
    return _trimmed(read_results(name, read), with_usual_rates(stages["report"]["params"]["params.yaml"]))


def _trimmed(results: Results, params: dict[str, Any]) -> Baseline:
    metrics = {stage: tree for stage, tree in results.metrics.items() if stage in FIGURES}
    gate = metrics["gate_reward"]
    metrics["gate_reward"] = {key: gate[key] for key in GATE_FIGURES} | {"n_effective": gate.get("n_effective")}  # older runs lack it
    return {"name": results.name, "params": params, "outs": dict(results.outs), "metrics": metrics, "prompts": results.prompts}


def _md5(found: bytes | None) -> str | None:
    return None if found is None else hashlib.md5(found, usedforsecurity=False).hexdigest()
