"""Deleting a run: its worktree with scratch, models and results, and its branch."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from flows.locks import lock_path, only_flow
from flows.registry import ARTIFACTS, read_registry
from flows.run_state import RunState, read_runs
from flows.worktree import git
from rlhf_core.config import ConfigError, shown

# Beginnings of what a run itself commits; `{}` is its name.
OF_THE_RUN = ("Run {}: ", "Results of run {}", "Results of round ", "Begin round ", "Take back the beginning of round ")
FREE_CACHE = (
    "DVC's cache keeps their models and data. `dvc gc --workspace --all-branches --all-tags` frees what no commit of a branch or tag has "
    "(this folder's files stay, and registered versions); first let other runs commit their results."
)


def delete(root: Path, names: list[str], *, force: bool) -> str:
    """What was deleted, as text; nothing is, unless all of them can be.

    Raises:
        ConfigError: a flow works on one of them, or there is something in it that is nowhere else and `force` is not given.
    """
    with ExitStack() as held:
        states = read_runs(root, names)
        for name in names:
            held.enter_context(only_flow(root, name))
        if not force:
            problems = [f"run {state.name}: {problem}" for state in states for problem in _lost(root, state)]
            if problems:
                raise ConfigError(f"{'; '.join(problems)}; save it, or delete with --force")
        lines = [line for state in states for line in _delete(root, state)]
    return "\n".join([*lines, FREE_CACHE])


def _lost(root: Path, state: RunState) -> list[str]:
    """What would be lost beside the run's own params and results, or would be disturbed."""
    problems = []
    if state.folder is not None:
        if changed := git(root / state.folder, "status", "--porcelain").splitlines():
            names = ", ".join(line[3:] for line in changed[:5]) + (f" and {len(changed) - 5} more" if len(changed) > 5 else "")
            problems.append(f"expected all committed, got {shown(names)}")
        if users := _users(root / state.folder):
            problems.append(f"expected nobody at work in {state.folder}, got {', '.join(users)}")
    if own := _commits_of_the_users(root, state):
        problems.append(f"expected the run's own commits only, got {len(own)} that no other branch has: {shown('; '.join(own[:5]))}")
    return problems


def _commits_of_the_users(root: Path, state: RunState) -> list[str]:
    """Subjects of commits that only this run's branch has and the pipeline has not made."""
    if state.branch is None:
        return []
    elsewhere = ["--not", f"--exclude={state.branch}", "--branches", "--tags", "--remotes"]
    subjects = git(root, "log", "--format=%h %s", f"refs/heads/{state.branch}", *elsewhere).splitlines()
    ours = tuple(begin.format(state.name) for begin in OF_THE_RUN)
    return [line for line in subjects if not line.partition(" ")[2].startswith(ours)]


def _users(folder: Path) -> list[str]:
    """Processes that work there: DVC by hand, a stage, a shell."""
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
        lines.append(f"  {', '.join(kept)}: tags keep their commits, and the registry goes on with them")
    return lines


def versions_of(root: Path, state: RunState) -> list[str]:
    """Registered versions of this run's commits, as `policy v2.0.0`."""
    commits, found = set(git(root, "rev-list", state.commit).split()), []
    for artifact in ARTIFACTS:
        versions = read_registry(root, artifact).versions.values()
        found += [f"{artifact} {v.version}" for v in versions if v.lineage["run"] == f"run/{state.name}" and v.commit in commits]
    return found
