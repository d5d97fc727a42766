"""A repository with this checkout's params and chain, for tests that create runs without running stages."""

from __future__ import annotations

import shutil
from pathlib import Path

from clerk_params import CLERK_PARAMS

from flows.chain.worktree import git

ROOT = Path(__file__).parents[1]
FILES = ("dvc.yaml", ".gitignore", "data/.gitignore", "rounds/rounds.yaml", "rounds/dvc.yaml")


def make_project(folder: Path) -> Path:
    (folder / ".dvc").mkdir(parents=True)
    (folder / ".dvc/config").write_text("")
    (folder / ".dvc/.gitignore").write_text("/config.local\n/tmp\n/cache\n")
    for name in FILES:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    shutil.copy(CLERK_PARAMS, folder)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    for name, value in (("user.name", "test"), ("user.email", "test@localhost")):
        git(folder, "config", name, value)
    commit(folder, "A project")
    return folder


def commit(folder: Path, message: str) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "-m", message)
