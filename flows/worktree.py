"""One run, one git worktree: `runs/<name>` on branch `run/<name>`, with its overrides committed and DVC's cache shared.

Runs in worktrees don't meet, restore from one run cache, and are rebuilt by `git checkout run/<name> && dvc repro`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from flows.stages import dvc_environment
from rlhf_core.config import ConfigError, apply_overrides
from rlhf_core.quiet import quietly
from rlhf_core.registry import cache_folder

log = logging.getLogger("rlhf.flows")

FOLDER = "runs"
_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]{0,79}$")
IDENTITY = ("-c", "user.name=rlhf pipeline", "-c", "user.email=rlhf@localhost")


def prepare_worktree(root: Path, name: str, overrides: dict[str, Any]) -> Path:
    """Make the worktree of a run, or find it again, and put the overrides into its params.yaml.

    Args:
        root: the checkout that the run starts from; its last commit is what runs.
    Returns:
        The worktree's folder.
    Raises:
        ConfigError: the name can't be one, the folder is something else, or an override is refused.
    """
    path = worktree_path(root, name)
    if not path.exists():
        _add(root, path, name)
    elif Path(git(path, "rev-parse", "--show-toplevel")) != path.resolve():
        raise ConfigError(f"{FOLDER}/{name}: expected a worktree of git, got another folder; move it away or choose another name")
    share_cache(root, path)
    if overrides:
        apply_overrides(path / "params.yaml", overrides)
    commit(
        path, f"Run {name}: {json.dumps(overrides, sort_keys=True)}" if overrides else f"Run {name}: params as they were", ["params.yaml"]
    )
    _say_what_differs(root, path, name)
    return path


def worktree_path(root: Path, name: str) -> Path:
    if not _NAME.match(name) or name.endswith((".lock", ".")) or ".." in name:
        raise ConfigError(
            f"run name: expected at most 80 letters, digits, '.', '_' and '-', a letter or digit first, got {name!r}; choose another"
        )
    return root / FOLDER / name


def derive_name(root: Path, overrides: dict[str, Any], recipes: list[Path]) -> str:
    """A readable name that the same overrides of the same commit get again."""
    parts = [r.stem for r in recipes] or [f"{key.rsplit('.', 1)[-1]}-{value}" for key, value in sorted(overrides.items())]
    identity = json.dumps([overrides, git(root, "rev-parse", "HEAD")], sort_keys=True)
    return f"{slug('-'.join(parts))}-{hashlib.sha256(identity.encode()).hexdigest()[:6]}"


def slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-")[:40].strip("-") or "run"


def commit(path: Path, message: str, files: list[str] | None = None) -> bool:
    """Commit these files, or everything that git doesn't ignore, where something changed. Works without a git identity."""
    git(path, "add", "--all", "--", *(files or ["."]))
    if git(path, "status", "--porcelain", "--untracked-files=no", "--", *(files or ["."])) == "":
        return False
    identity = () if has_identity(path) else IDENTITY
    git(path, *identity, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "-m", message)
    return True


def _add(root: Path, path: Path, name: str) -> None:
    branch = f"run/{name}"
    git(root, "worktree", "prune")
    if git(root, "branch", "--list", branch):
        git(root, "worktree", "add", "--quiet", str(path), branch)
        return
    if git(root, "status", "--porcelain", "--untracked-files=no"):
        log.warning("%s: starts from the last commit; changes that aren't committed take no part", branch)
    git(root, "worktree", "add", "--quiet", "-b", branch, str(path), "HEAD")


def share_cache(root: Path, path: Path) -> None:
    """Local DVC settings as in the main checkout (remotes, credentials), with its cache."""
    local = path / ".dvc" / "config.local"
    if local.exists():
        return
    if (root / ".dvc" / "config.local").exists():
        shutil.copy2(root / ".dvc" / "config.local", local)
    cache = cache_folder(root).parents[1].resolve()
    _run(quietly("dvc", "cache", "dir", "--local", str(cache)), path)


def _say_what_differs(root: Path, path: Path, name: str) -> None:
    base = git(path, "merge-base", "HEAD", git(root, "rev-parse", "HEAD"))
    behind = git(root, "rev-list", "--count", f"{base}..HEAD")
    if behind != "0":
        log.warning(
            "run/%s: was made %s commits ago and keeps its code; choose another name for a fresh one, or remove this one with "
            "`git worktree remove --force %s/%s` and `git branch -D run/%s`",
            *(name, behind, FOLDER, name, name),
        )


def has_identity(path: Path) -> bool:
    return (
        subprocess.run(["git", "var", "GIT_COMMITTER_IDENT"], cwd=path, env=_git_environment(), capture_output=True, check=False).returncode
        == 0
    )


def _git_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}


def git(path: Path, *arguments: str) -> str:
    return _run(["git", *arguments], path, _git_environment())


def _run(command: list[str], folder: Path, environment: dict[str, str] | None = None) -> str:
    settings = {"cwd": folder, "env": environment or dvc_environment(folder), "check": False}
    done = subprocess.run(command, capture_output=True, encoding="utf-8", errors="backslashreplace", **settings)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ConfigError(f"{' '.join(command[:4])}: expected to succeed in this checkout, got: {said}")
    return done.stdout.strip()
