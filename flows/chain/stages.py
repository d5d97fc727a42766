"""Runs stages through DVC: their order, whether they are up to date, and one stage as a subprocess that never outlives this process.

dvc.yaml is the only list of stages. DVC decides what is up to date; this module starts DVC, parses its output and ends it.
"""

from __future__ import annotations

import difflib
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import psutil

from flows.chain.children import Lines, stop_session
from rlhf_core import config
from rlhf_core.config import ConfigError, shown
from rlhf_core.environment import keep_visible, of_stage
from rlhf_core.files import lock_file
from rlhf_core.paths import RUNS
from rlhf_core.process import PROCESS_ENVIRONMENT, bypass_proxies, end_with_parent, module_command, without_git_places
from rlhf_core.progress import is_end, is_progress
from rlhf_core.provenance.inputs import read_inputs, read_recorded
from rlhf_core.stage.scratch import SHOWN, StageInputs

Stages = dict[str, dict[str, Any]]  # name -> its entry in dvc.yaml
Outcome = Literal["ran", "cached", "restored"]
LineHandler = Callable[[str], None]

STATUS_DEADLINE = 1800.0  # seconds; DVC hashes changed files, which may be large
LAST_WORDS = 12  # lines of a failed stage, which may give several reasons, one per line
LOCK_SECONDS = 60.0  # for DVC's own lock of its list of locks, which it holds for moments
BUSY_SECONDS = 3.0  # between two tries while another DVC works in the folder
HASH_INPUTS = "hash_inputs"
_ALWAYS = "always changed"  # DVC's message about a stage that runs every time
REFUSED = 1  # a stage's exit code for a refusal (params, data, gate); a crash has another one
_OUTCOMES = {
    "restored": re.compile(r"^Stage '(.+)' is cached - skipping run"),
    "cached": re.compile(r"^Stage '(.+)' didn't change, skipping"),
    "ran": re.compile(r"^Running stage '(.+)':"),
}
_BUSY = re.compile(r"is busy, it is being blocked by|Unable to acquire lock")
_EXITED = re.compile(r", exited with (-?\d+)")
_NOISE = re.compile(
    r"^(\s*$|(Generating|Updating) lock file|Use `dvc push`|To track the changes with git|To enable auto staging"
    r"|\s*git add |\s*dvc config core\.autostage )"
)


class StageFailed(RuntimeError):
    """A stage failed. `refused` is set if the stage itself refused (params, data, gate), so that a retry would fail too."""

    def __init__(self, stage: str, message: str, *, refused: bool):
        super().__init__(message)
        self.stage = stage
        self.refused = refused

    def __reduce__(self):
        return _restore_failure, (self.stage, str(self), self.refused)


def _restore_failure(stage: str, message: str, refused: bool) -> StageFailed:
    return StageFailed(stage, message, refused=refused)


@dataclass(frozen=True)
class StageResult:
    """The outcome of a stage.

    outcome: ran; cached (up to date); restored (from DVC's run cache, computed before with the same inputs).
    """

    stage: str
    outcome: Outcome
    seconds: float


def read_stages(workspace: Path, tree: dict[str, Any] | None = None) -> Stages:
    """Return the stages of dvc.yaml with the values of params.yaml filled in, in topological order, otherwise in the order of the file.

    Args:
        tree: content of params.yaml; None: it is read.
    Raises:
        ConfigError: dvc.yaml is missing, uses a key that params.yaml doesn't have, or has a cycle.
    """
    path = workspace / "dvc.yaml"
    if not path.is_file():
        raise ConfigError(f"{path.name}: expected in the current folder, got nothing; run from the folder of the project")
    stages = config.read_stages(path, config.read_yaml(workspace / "params.yaml") if tree is None else tree)
    return {name: stages[name] for name in _topological(stages)}


def _topological(stages: Stages) -> list[str]:
    makes = {name: list(_paths(stage, "outs", "metrics", "plots")) for name, stage in stages.items()}
    needs = {
        name: {other for other, outs in makes.items() if other != name and any(_overlap(d, o) for d in _needed(stage) for o in outs)}
        for name, stage in stages.items()
    }
    order: list[str] = []
    while len(order) < len(stages):
        ready = next((n for n in stages if n not in order and needs[n] <= set(order)), None)
        if ready is None:
            left = ", ".join(n for n in stages if n not in order)
            raise ConfigError(f"dvc.yaml: expected stages without a cycle, got one among {left}; remove a dependency")
        order.append(ready)
    return order


def _paths(stage: dict[str, Any], *keys: str) -> Iterator[str]:
    for key in keys:
        for entry in stage.get(key) or []:
            yield entry if isinstance(entry, str) else next(iter(entry))


def _needed(stage: dict[str, Any]) -> Iterator[str]:
    """Yield a stage's dependencies: paths, and params files other than params.yaml, which stages may make."""
    yield from _paths(stage, "deps")
    yield from (file for entry in stage.get("params") or [] if isinstance(entry, dict) for file in entry)


def _overlap(one: str, other: str) -> bool:
    a, b = Path(one), Path(other)
    return a == b or a in b.parents or b in a.parents


def metrics_file(stage: dict[str, Any]) -> str | None:
    """Return the first metrics file of a stage's entry in dvc.yaml, or None."""
    return next(_paths(stage, "metrics"), None)


def stage_environment(workspace: Path, stage: str | None = None) -> dict[str, str]:
    """Return the environment of a stage: the list in rlhf_core/environment.py, the names in flow.environment, and keys that it uses.

    Args:
        stage: a stage of dvc.yaml, or DVC's address of another pipeline's stage; None: any stage.
    """
    everything = dvc_environment(workspace)
    more: set[str] = set()
    with suppress(ConfigError):  # the stage itself reports invalid params
        more = of_stage(config.load_params(workspace / "params.yaml"), stage, everything)
    kept = dict(everything)
    keep_visible(more, environment=kept)
    return kept


def check_chosen(order: list[str], *, force: str | None, until: str | None) -> None:
    """Check that the stages of --force and --until exist and that the run reaches the forced one.

    Raises:
        ConfigError: a stage doesn't exist or isn't reached; names the nearest stage.
    """
    for option, wanted in (("force", force), ("until", until)):
        if wanted is not None and wanted not in order:
            near = difflib.get_close_matches(wanted, order, n=1, cutoff=0.4)
            advice = f"write {near[0]}" if near else "take one of these"
            raise ConfigError(f"{option}: expected a stage, one of {', '.join(order)}, got {shown(wanted)}; {advice}")
    if force is not None and force not in stages_until(order, until):
        raise ConfigError(f"force: expected a stage up to {until}, the last one of this run, got {force}; choose another until, or none")


def stages_until(order: list[str], until: str | None) -> list[str]:
    """Return the stages up to and including `until`; None: all stages."""
    return order if until is None else order[: order.index(until) + 1]


def tracked_params(tree: dict[str, Any]) -> StageInputs:
    """Return the sections of params.yaml on which stages depend."""
    return StageInputs("", {section: values for section, values in tree.items() if section not in config.UNTRACKED_SECTIONS}, {})


def check_params(workspace: Path, stage: str, tree: dict[str, Any]) -> None:
    """Check before a stage that params.yaml is as it was when the run was prepared; otherwise the chain would mix two sets of params.

    Args:
        tree: content of params.yaml when the run was prepared.
    Raises:
        StageFailed: the file was edited.
    """
    try:
        changed = tracked_params(config.read_yaml(workspace / "params.yaml")).value_differences(tracked_params(tree))
    except ConfigError as error:
        changed = [str(error)]
    if changed:
        raise StageFailed(
            stage,
            f"{stage}: expected params.yaml as at the flow's start, got changes: {'; '.join(changed[:SHOWN])}; undo that and run it again, "
            "or only run it again, which repeats the stages that read these values",
            refused=True,
        )


def dvc_environment(workspace: Path) -> dict[str, str]:
    """Return the environment of DVC commands that run no stage.

    It keeps the credentials of DVC's remotes and drops Prefect's settings, including its password. This interpreter comes first on PATH,
    and the workspace's code comes first on PYTHONPATH, without the code of the checkout that a run's worktree belongs to.
    """
    inherited = {k: v for k, v in without_git_places().items() if k != "VIRTUAL_ENV" and not k.startswith("PREFECT_")}
    path = os.pathsep.join([str(Path(sys.executable).parent), inherited.get("PATH", os.defpath)])
    folder = workspace.resolve()
    checkout = folder.parents[1] if folder.parent.name == str(RUNS) else None
    entries = [entry for entry in inherited.get("PYTHONPATH", "").split(os.pathsep) if entry and Path(entry).resolve() != checkout]
    code = os.pathsep.join([str(folder), *entries])
    bypass_proxies(inherited)
    # DVC starts stages with SHELL, which may be no shell, as for service accounts, or another language.
    return {**PROCESS_ENVIRONMENT, **inherited, "PATH": path, "PYTHONPATH": code, "PYTHONUNBUFFERED": "1", "SHELL": "/bin/sh"}


def unchanged(workspace: Path, stages: list[str]) -> list[str]:
    """Return the leading stages that are up to date, found with one DVC call instead of one per stage.

    Args:
        stages: stages of dvc.yaml in topological order.
    """
    changed = _changed(workspace, stages) if (workspace / "dvc.lock").exists() else None
    return [] if changed is None else list(itertools.takewhile(lambda stage: stage not in changed, stages))


def _changed(workspace: Path, stages: list[str]) -> set[str] | None:
    """Return which of these stages are outdated or have changed external inputs; None if DVC failed or took too long."""
    command = module_command("dvc", "status", "--json", *stages)
    options = {"cwd": workspace, "env": dvc_environment(workspace), "timeout": STATUS_DEADLINE, "encoding": "utf-8"}
    with suppress(subprocess.TimeoutExpired, json.JSONDecodeError):
        done = subprocess.run(command, capture_output=True, check=False, **options)
        return set(with_something_to_do(workspace, json.loads(done.stdout))) if done.returncode == 0 else None
    return None


def with_something_to_do(workspace: Path, status: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return `dvc status` without stage hash_inputs, which DVC always reports as changed, if the inputs match its record."""
    if status.get(HASH_INPUTS) != [_ALWAYS]:
        return status
    others = {stage: changes for stage, changes in status.items() if stage != HASH_INPUTS}
    return others if inputs_as_recorded(workspace) else {HASH_INPUTS: ["data, a model or a function has changed"], **others}


def inputs_as_recorded(workspace: Path) -> bool:
    """Return whether the external inputs match data/inputs.json; False if they can't be read, which the stage then reports."""
    with suppress(ConfigError, OSError, ValueError):
        return read_inputs(config.load_params(workspace / "params.yaml"), workspace) == read_recorded(workspace)
    return False


def run_stage(stage: str, workspace: Path, *, timeout: float, grace: float, on_line: LineHandler, force: bool = False) -> StageResult:
    """Run `dvc repro --single-item` for one stage, and pass its output on line by line.

    The subprocess has its own session. If this process is interrupted or the deadline passes, the stage gets SIGTERM, a grace for its
    checkpoint, and then SIGKILL. If this process is killed, the kernel sends SIGTERM to DVC, whose death ends the stage.

    Args:
        stage: a stage of dvc.yaml, or DVC's address of another pipeline's stage, such as rounds/dvc.yaml:sample_round@1.
        timeout: deadline in seconds.
        grace: seconds between SIGTERM and SIGKILL.
        force: whether to run the stage even if it is up to date, without the run cache.
    Raises:
        StageFailed: the stage exited with an error or exceeded the timeout.
    """
    started, waiting = time.monotonic(), False
    while True:
        output = _ReproOutput()
        arguments = [*["--force"] * force, stage]
        child = _repro(arguments, workspace, started + timeout, timeout, grace, output, on_line)
        if child.returncode == 0:
            return StageResult(stage, output.outcome, time.monotonic() - started)
        if not output.busy or time.monotonic() > started + timeout:
            raise output.failure(stage, child.returncode)
        if not waiting:
            on_line(f"{stage}: another DVC is at work in this folder; waiting for it")
        waiting = True
        time.sleep(BUSY_SECONDS)


def _repro(
    arguments: list[str], workspace: Path, deadline: float, timeout: float, grace: float, output: _ReproOutput, on_line: LineHandler
) -> subprocess.Popen[str]:
    """Run DVC until it exits, and return its process.

    Args:
        arguments: arguments of `dvc repro --single-item`, the stage last.
    Raises:
        StageFailed: the stage exceeded the timeout.
    """
    stage = arguments[-1]
    clear_locks(workspace)
    child = subprocess.Popen(
        module_command("dvc", "repro", "--single-item", *arguments),
        cwd=workspace,
        env=stage_environment(workspace, stage),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
        preexec_fn=partial(end_with_parent, os.getpid()),
    )
    lines = Lines(child)

    def tell(line: str) -> None:
        output.listen(line)
        if not _NOISE.match(line):
            on_line(line)

    try:
        for line in lines.until(deadline):
            tell(line)
    except TimeoutError:
        late = f"{stage}: expected to end within flow.stage_timeout={timeout:g} s, got no end; raise it or look at the log"
        on_line(late)  # logged too, since a successful retry hides the exception
        raise StageFailed(stage, late, refused=False) from None
    finally:
        stop_session(child, grace)
        for line in lines.rest():  # lines printed after SIGTERM
            tell(line)
    return child


def clear_locks(workspace: Path) -> None:
    """Remove a killed DVC's entries from .dvc/tmp/rwlock.

    DVC writes the file in place. A kill during the write leaves a truncated file, with which DVC refuses to start. A killed DVC's entry
    stays valid while any process has its id, which may be reused after a container restarts. DVC's own lock of the file is held meanwhile.
    """
    path = workspace / ".dvc" / "tmp" / "rwlock"
    if not path.exists():
        return
    with path.with_name("rwlock.lock").open("a+") as guard:
        try:
            lock_file(guard, LOCK_SECONDS)
        except TimeoutError:  # another DVC is at work; this one will say so
            return
        try:
            locks = json.loads(path.read_text(encoding="utf-8"))
            readers = {file: [e for e in entries if _is_dvc(e["pid"])] for file, entries in locks.get("read", {}).items()}
            writers = {file: entry for file, entry in locks.get("write", {}).items() if _is_dvc(entry["pid"])}
        except (ValueError, TypeError, KeyError, AttributeError):
            path.unlink()
            return
        held = {kind: kept for kind, files in (("read", readers), ("write", writers)) if (kept := {f: e for f, e in files.items() if e})}
        if held != locks:
            path.write_text(json.dumps(held), encoding="utf-8")


def _is_dvc(pid: int) -> bool:
    try:
        return any("dvc" in part for part in psutil.Process(int(pid)).cmdline())
    except psutil.AccessDenied:  # another user's process may be DVC
        return True
    except psutil.NoSuchProcess:
        return False


class _ReproOutput:
    """The result of a stage, parsed from DVC's output."""

    def __init__(self) -> None:
        self.outcome: Outcome = "ran"
        self.busy = False  # another DVC holds the workspace's lock
        self._exit_code: int | None = None
        self._last_words: list[str] = []

    def listen(self, line: str) -> None:
        for outcome, pattern in _OUTCOMES.items():
            if pattern.match(line):
                self.outcome = outcome  # type: ignore[assignment]
        self.busy = self.busy or _BUSY.search(line) is not None
        if found := _EXITED.search(line):
            self._exit_code = int(found[1])
        elif line.strip() and not (is_progress(line) or is_end(line)):  # progress lines aren't reasons
            self._last_words = [*self._last_words, line.rstrip()][-LAST_WORDS:]

    def failure(self, stage: str, dvc_code: int) -> StageFailed:
        code = self._exit_code if self._exit_code is not None else dvc_code
        last = self._last_words if code == REFUSED else self._last_words[-3:]  # a crash ends with its traceback
        own = [w for w in last if w.startswith(f"{stage.rpartition(':')[2]}:")]
        words = "\n".join(own or self._last_words[-1:]) or "no output"
        return StageFailed(stage, words if own else f"{stage}: exited with {code}: {words}", refused=self._exit_code == REFUSED)
