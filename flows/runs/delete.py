"""Deletes a run: its worktree with scratch, models and results, and its branch."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from pathlib import Path, PurePath

import psutil

from flows.chain.locks import lock_path, only_flow
from flows.chain.stages import read_stages
from flows.chain.worktree import git
from flows.registry.state import ARTIFACTS, read_registry
from flows.runs.state import RunState, read_runs
from rlhf_core.config import ConfigError, read_yaml, shown
from rlhf_core.paths import CHECK_MODEL_FIGURES, DATA_DOCS, PROMOTED, ROUNDS_PIPELINE, SCRATCH, STATE_DIGESTS, STOPPED_REPORT, TIMINGS

# Prefixes of the subjects of a run's own commits; `{}` is its name.
RUN_COMMITS = ("Run {}: ", "Results of run {}", "Results of round ", "Begin round ", "Take back the beginning of round ")
# Ignored by git and not the user's, in addition to the outs of stages.
PIPELINE_FILES = (
    *(".dvc", ".prefect", "wandb", "compare.log"),
    *map(str, (SCRATCH, PROMOTED, STOPPED_REPORT, CHECK_MODEL_FIGURES, TIMINGS, STATE_DIGESTS, DATA_DOCS)),
)
CACHES = re.compile(r"(^|/)(__pycache__|\.venv|\.(pytest|ruff)_cache|\.hypothesis|\.ipynb_checkpoints|[^/]+\.egg-info)/")
FREE_CACHE = (
    "DVC's cache keeps their models and data. `dvc gc --workspace --all-branches --all-tags` frees what no commit of a branch or tag has "
    "(this folder's files stay, and registered versions); first let other runs commit their results."
)


def delete(root: Path, names: list[str], *, force: bool) -> str:
    """Delete runs, all or none, and return a message about what was deleted.

    Raises:
        ConfigError: a flow or another process is at work in one of them; or, without `force`, one has files or commits that exist nowhere
            else.
    """
    with ExitStack() as held:
        states = read_runs(root, names)
        for name in names:
            held.enter_context(only_flow(root, name))
        busy = [f"run {state.name}: {problem}" for state in states for problem in _at_work(root, state)]
        lost = [f"run {state.name}: {problem}" for state in states for problem in _lost(root, state, states)] if not force else []
        if busy or lost:
            advice = ["end it, or wait for it"] * bool(busy) + ["save what would be lost, or delete with --force"] * bool(lost)
            raise ConfigError("; ".join([*busy, *lost, *advice]))
        lines = [line for state in states for line in _delete(root, state)]
    return "\n".join([*lines, FREE_CACHE])


def _at_work(root: Path, state: RunState) -> list[str]:
    """Return the processes in the run's folder, as a problem."""
    users = _users(root / state.folder) if state.folder is not None else []
    return [f"expected no process at work in {state.folder}, got {', '.join(users)}"] if users else []


def _lost(root: Path, state: RunState, deleted: list[RunState]) -> list[str]:
    """Return files and commits of the user that exist nowhere else, as problems. `deleted` are all runs deleted together."""
    problems = []
    if state.folder is not None:
        folder = root / state.folder
        if changed := _changed_user_files(folder):
            problems.append(f"expected all committed, got {_named(changed)}")
        if ignored := _ignored_user_files(folder):
            problems.append(f"expected no ignored files but those of stages, got {_named(ignored)}")
    if own := _user_commits(root, state, deleted):
        problems.append(f"expected the run's own commits only, got {len(own)} that no other branch has: {shown('; '.join(own[:5]))}")
    return problems


def _named(names: list[str]) -> str:
    return shown(", ".join(names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _changed_user_files(folder: Path) -> list[str]:
    """Return changed and untracked files that are not results. A stopped run leaves its results uncommitted."""
    from flows.runs.results import result_paths  # imports pandas

    results: set[str] = set()
    with suppress(ConfigError):  # an unreadable file names no results, so they count as user files
        results = {*result_paths(folder)} - {"params.yaml"}
    listed = git(folder, "status", "--porcelain", "--no-renames", "--untracked-files=all", "-z").split("\0")
    paths = [PurePath(line.strip().partition(" ")[2].strip()) for line in listed if line]
    return [str(path) for path in paths if not any(path.is_relative_to(result) for result in results)]


def _ignored_user_files(folder: Path) -> list[str]:
    """Return files ignored by git that neither a stage nor a tool wrote."""
    ours = (*PIPELINE_FILES, *_outs(folder))
    listed = git(folder, "ls-files", "--others", "--ignored", "--exclude-standard", "-z").split("\0")
    paths = [PurePath(name) for name in listed if name and not CACHES.search(name)]
    return [str(path) for path in paths if not any(path.is_relative_to(own) for own in ours)]


def _outs(folder: Path) -> set[str]:
    """Return the outs of stages, from dvc.yaml and from the locks, which still name those of earlier params."""
    found: set[str] = set()
    with suppress(ConfigError):  # an unreadable file names no outs, so its outs count as user files
        entries = [entry for stage in read_stages(folder).values() for entry in stage.get("outs") or []]
        found |= {path for entry in entries for path in ([entry] if isinstance(entry, str) else entry)}
    for lock in (folder / "dvc.lock", folder / ROUNDS_PIPELINE.with_suffix(".lock")):
        with suppress(ConfigError):
            tree = read_yaml(lock) if lock.is_file() else {}
            found |= {out["path"] for stage in tree.get("stages", {}).values() for out in stage.get("outs", [])}
    return found


def _user_commits(root: Path, state: RunState, deleted: list[RunState]) -> list[str]:
    """Return commits, as `hash subject`, that no other branch or tag has and that the pipeline has not made."""
    tips = [f"refs/heads/{state.branch}"] * (state.branch is not None)
    if state.folder is not None:
        tips.append(git(root / state.folder, "rev-parse", "HEAD"))
    elsewhere = ["--not", *(f"--exclude={other.branch}" for other in deleted if other.branch), "--branches", "--tags", "--remotes"]
    subjects = git(root, "log", "--format=%h %s", *tips, *elsewhere).splitlines()
    ours = tuple(begin.format(other.name) for begin in RUN_COMMITS for other in deleted)
    return [line for line in subjects if not line.partition(" ")[2].startswith(ours)]


def _users(folder: Path) -> list[str]:
    """Return the processes whose working directory is in the folder, such as DVC, a stage or a shell."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if Path(process.cwd()).is_relative_to(folder.resolve()):
                found.append(f"process {process.pid} ({process.name()})")
    return found


def _delete(root: Path, state: RunState) -> list[str]:
    kept = versions_of(root, state)
    if state.folder is not None:
        git(root, "worktree", "remove", "--force", "--force", state.folder)
    if state.branch is not None:
        git(root, "branch", "--quiet", "-D", state.branch)
    lock_path(root, state.name).unlink(missing_ok=True)
    what = " and ".join(filter(None, (state.folder, state.branch)))
    lines = [f"Deleted run {state.name}: {what}, {state.size / 1e6:.1f} MB; it stood at {state.commit[:10]}"]
    if kept:
        lines.append(f"  {', '.join(kept)}: tags keep their commits, and the registry still has them")
    return lines


def versions_of(root: Path, state: RunState) -> list[str]:
    """Return the registered versions of this run's commits, as `policy v2.0.0`."""
    commits, found = set(git(root, "rev-list", state.commit).split()), []
    for artifact in ARTIFACTS:
        versions = read_registry(root, artifact).versions.values()
        found += [f"{artifact} {v.version}" for v in versions if v.lineage["run"] == f"run/{state.name}" and v.commit in commits]
    return found
