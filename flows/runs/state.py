"""Reads the state of runs from their worktrees or, if those were removed, from their branches, without Prefect, DVC or torch, so it is
fast.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.chain.locks import at_work
from flows.chain.stages import HASH_INPUTS
from flows.chain.summary import KEY_FIGURES
from flows.chain.worktree import git
from flows.registry.objects import read_objects
from flows.runs.record import GATE_REJECTED, read_record
from rlhf_core.config import ConfigError
from rlhf_core.paths import EVALUATION_METRICS, GATE_METRICS, ROUNDS, RUNS

METRICS = (str(GATE_METRICS), str(EVALUATION_METRICS))
READ = ("params.yaml", "dvc.lock", *METRICS)
STAGES = [*KEY_FIGURES, "report"]
ORDER = [HASH_INPUTS, *STAGES]

Read = Callable[[str], str | None]  # a path inside the run -> its content; None: not there


@dataclass(frozen=True)
class RunState:
    """The state of a run.

    made: when the worktree was added; used: when a flow or DVC last wrote there, or a lone branch's last commit (UTC, ISO 8601).

    folder: None: only the branch is left. outcome: as in flows.runs.record, or killed, interrupted or not begun. until: as in
    flows.runs.record. process: id of the flow's process. metric: `judge`, or `score` without a judge: the reward model's mean score.
    before, after: the metric's value for the SFT model and the policy, sampled. size: bytes of the folder on disk.
    """

    name: str
    folder: str | None
    branch: str | None
    commit: str
    made: str | None
    used: str
    method: str
    outcome: str
    stage: str | None
    until: str | None
    message: str
    process: str | None
    gate_accuracy: float | None
    metric: str | None
    before: float | None
    after: float | None
    rounds: int
    size: int

    @property
    def outcome_text(self) -> str:
        """Outcome and stage as text, for a table."""
        if self.outcome == "done" and self.until is not None:
            return f"done up to {self.until}"
        if self.outcome in ("done", "not begun") or self.stage is None:
            return self.outcome
        if self.outcome == GATE_REJECTED:
            return "gate rejected"
        return f"{self.outcome} at {self.stage}"


def run_names(root: Path) -> list[str]:
    """Return the names of the worktrees in runs/ and of the branches run/*."""
    folders = {path.parent.name for path in (root / RUNS).glob("[!.]*/.git") if path.is_file()}
    return sorted(folders | set(_branches(root)))


def read_runs(root: Path, names: list[str], *, sizes: bool = True) -> list[RunState]:
    """Return the states of runs, in the order of `names`.

    Raises:
        ConfigError: there is no run of that name.
    """
    branches = _branches(root)
    alone = [name for name in names if name in branches and not (root / RUNS / name / ".git").is_file()]
    paths = [f"refs/heads/run/{name}:{path}" for name in alone for path in READ]
    found = dict(zip(paths, read_objects(root, paths), strict=True))
    states = []
    for name in names:
        folder = root / RUNS / name
        if name in alone:
            texts = {path: found[f"refs/heads/run/{name}:{path}"] for path in READ}
            known = {path: o.content.decode(errors="replace") for path, o in texts.items() if o is not None and o.content is not None}
            states.append(_state(root, name, known.get, *branches[name], branch=f"run/{name}", folder=None, sizes=sizes))
        elif (folder / ".git").is_file():
            commit, second = branches.get(name) or (git(folder, "rev-parse", "HEAD"), int((folder / ".git").stat().st_mtime))
            branch = f"run/{name}" if name in branches else None
            states.append(_state(root, name, _reader(folder), commit, second, branch=branch, folder=folder, sizes=sizes))
        else:
            raise ConfigError(f"{name}: expected a run, got none of that name; there are {', '.join(run_names(root)) or 'no runs'}")
    return states


def lock_of(root: Path, state: RunState) -> str | None:
    """Return the text of dvc.lock from the run's folder, or else from its branch; None if there is none yet."""
    if state.folder is not None:
        return _reader(root / state.folder)("dvc.lock")
    (found,) = read_objects(root, [f"{state.commit}:dvc.lock"])
    return None if found is None or found.content is None else found.content.decode(errors="replace")


def _branches(root: Path) -> dict[str, tuple[str, int]]:
    """Return the commit and the commit's Unix time of each run's branch, by the run's name."""
    listed = git(root, "for-each-ref", "--format=%(refname:lstrip=3) %(objectname) %(committerdate:unix)", "refs/heads/run/")
    return {name: (commit, int(second)) for name, commit, second in map(str.split, listed.splitlines())}


def _reader(folder: Path) -> Read:
    def read(path: str) -> str | None:
        with suppress(OSError):
            return (folder / path).read_text(encoding="utf-8", errors="replace")
        return None

    return read


def _state(
    root: Path, name: str, read: Read, commit: str, second: int, *, branch: str | None, folder: Path | None, sizes: bool
) -> RunState:
    record = read_record(folder) if folder else {}
    process = at_work(root, name) if folder else None
    lock = read("dvc.lock") or ""
    done = [stage for stage in STAGES if re.search(rf"^  {stage}:", lock, re.MULTILINE)]
    gate, evaluated = (_json(read(path)) for path in METRICS)
    outcome, stage, message = _outcome(record, process, done, gate)
    until = record.get("until") if outcome == "done" else None
    reached = _reached(outcome, stage, until)
    metric, before, after = _judge(evaluated) if "evaluate" in reached else (None, None, None)
    rounds = len(list(folder.glob(f"{ROUNDS}/[0-9]*/{EVALUATION_METRICS}"))) if folder else 0
    written = [second, *(int(p.stat().st_mtime) for p in ((folder / "dvc.lock", folder / ".git") if folder else ()) if p.exists())]
    return RunState(
        name=name,
        folder=f"{RUNS}/{name}" if folder else None,
        branch=branch,
        commit=commit,
        made=_time((folder / ".git").stat().st_mtime) if folder else None,
        used=max(record.get("at", ""), _time(max(written))),
        method=_method(read("params.yaml") or ""),
        outcome=outcome,
        stage=stage,
        until=until,
        message=message,
        process=process,
        gate_accuracy=_number(gate.get("accuracy")) if "gate_reward" in reached and gate.get("needed", True) else None,
        metric=metric,
        before=before,
        after=after,
        rounds=rounds,
        size=sum(_sizes(folder)) if folder and sizes else 0,
    )


def _outcome(record: dict[str, Any], process: str | None, done: list[str], gate: dict[str, Any]) -> tuple[str, str | None, str]:
    """Return outcome, stage and message from the record, or from the stages' results if DVC ran them without a flow."""
    outcome, stage, message = record.get("outcome"), record.get("stage"), str(record.get("message") or "")
    if process is not None:
        return "running", stage, ""
    if outcome == "running":
        return "killed", stage, "its process is gone; the same command resumes it"
    if outcome is not None:
        return str(outcome), stage, message
    if not done:
        return "not begun", None, ""
    if done[-1] == "report":
        return "done", "report", ""
    if gate.get("passed") is False and gate.get("needed") and not gate.get("override") and "gate_reward" not in done:
        return GATE_REJECTED, "gate_reward", str(gate.get("message", ""))
    return "interrupted", STAGES[STAGES.index(done[-1]) + 1], ""


def _reached(outcome: str, stage: str | None, until: str | None) -> set[str]:
    """Return the stages whose figures are this run's. Figures of later stages are from an earlier run.

    A gate that rejected the model has figures; a stage that was stopped has none.
    """
    if outcome == "done":
        return set(ORDER if until is None else ORDER[: ORDER.index(until) + 1] if until in ORDER else ())
    if stage is None:  # none was started
        return set()
    if stage not in ORDER:  # of a round, which comes after the chain
        return set(ORDER)
    return {*ORDER[: ORDER.index(stage)], *([stage] if outcome == GATE_REJECTED else ())}


def _judge(m: dict[str, Any]) -> tuple[str | None, float | None, float | None]:
    with suppress(KeyError, TypeError):
        sides = m["sampled"]
        metric, key = ("judge", "judge_ok") if "judge_ok" in sides["policy"] else ("score", "score_mean")
        return metric, _number(sides["sft"][key]), _number(sides["policy"][key])
    return None, None, None


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) else None


def _json(text: str | None) -> dict[str, Any]:
    with suppress(ValueError):
        found = json.loads(text or "{}")
        return found if isinstance(found, dict) else {}
    return {}


def _method(params: str) -> str:
    """Return alignment.method, for RL with the algorithm or distillation. It is matched in the text, since parsing YAML is slow for a
    list of many runs.
    """
    method = _value_in(params, "alignment", "method")
    algorithm = _value_in(params, "rl", "algorithm") if method == "rl" else None
    if algorithm and re.search(r"^  distillation: *(\{|$)", params, re.MULTILINE):
        algorithm = "distillation"
    return f"{method} {algorithm}" if algorithm else method or "?"


def _value_in(params: str, section: str, key: str) -> str | None:
    found = re.search(rf"^{section}:.*?(?=^[^\s#]|\Z)", params, re.MULTILINE | re.DOTALL)
    value = found and re.search(rf"(?:^  |[{{ ]){key}: *['\"]?(\w+)", found[0], re.MULTILINE)
    return value[1] if value else None


def _time(second: float) -> str:
    return datetime.fromtimestamp(second, UTC).isoformat(timespec="seconds")


def _sizes(folder: Path) -> Iterator[int]:
    """Yield the bytes on disk of each file; links aren't followed."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _sizes(Path(entry.path))
                else:
                    yield entry.stat(follow_symlinks=False).st_blocks * 512
