"""Sends branches and registry tags to a git remote, and fetches them; nothing there or here is overwritten."""

from __future__ import annotations

import subprocess
from pathlib import Path

from flows.chain.worktree import COMMAND_SECONDS, git, git_environment, run_within
from rlhf_core.config import ConfigError, shown

ORIGIN = "origin"


def registry_refs(artifact: str) -> list[str]:
    """Refs of a model's versions, and of the decisions and reviews about them, as patterns."""
    return [f"refs/tags/{artifact}@*", f"refs/tags/{artifact}#*", f"refs/tags/{artifact}-review-*"]


def push_branch(root: Path, remote: str, branch: str) -> None:
    """Send a branch.

    Raises:
        ConfigError: the remote can't be used, or its branch has commits that this one lacks.
    """
    done = _ask(root, remote, "push", "--porcelain", remote, f"refs/heads/{branch}:refs/heads/{branch}")
    if "[rejected]" in done.stdout:
        raise ConfigError(
            f"{branch} at {remote}: expected a branch that this one continues, got another; the run went on elsewhere: `rlhf pull` it, or "
            "give yours another name"
        )
    _check(done, remote, "push")


def push_tags(root: Path, remote: str, artifact: str) -> None:
    """Send the tags of a model's versions, decisions and reviews, all or none.

    Raises:
        ConfigError: the remote can't be used, or has another tag of the same name.
    """
    done = _ask(root, remote, "push", "--porcelain", "--atomic", remote, *registry_refs(artifact))
    if "[rejected]" in done.stdout:
        raise ConfigError(_clash(artifact, remote, done.stdout, "[rejected]"))
    _check(done, remote, "push")


def fetch_tags(root: Path, remote: str, artifact: str) -> None:
    """Fetch the tags of a model's versions, decisions and reviews.

    Raises:
        ConfigError: the remote can't be used, or has another tag of the same name.
    """
    refs = [f"{pattern}:{pattern}" for pattern in registry_refs(artifact)]
    done = _ask(root, remote, "fetch", "--no-tags", remote, *refs)
    if "would clobber" in done.stderr:
        raise ConfigError(_clash(artifact, remote, done.stderr, "would clobber"))
    _check(done, remote, "fetch")


def fetch_branch(root: Path, remote: str, branch: str) -> str:
    """Fetch a branch's commits, and return the newest; the branch here stays as it is.

    Raises:
        ConfigError: the remote can't be used, or doesn't have the branch.
    """
    done = _ask(root, remote, "fetch", "--no-tags", remote, f"refs/heads/{branch}")
    if "couldn't find remote ref" in done.stderr:
        listed = _ask(root, remote, "ls-remote", "--heads", remote, "run/*").stdout.split()[1::2]
        there = ", ".join(name.removeprefix("refs/heads/run/") for name in listed) or "none"
        raise ConfigError(
            f"{branch} at {remote}: expected the run's branch, got none (runs there: {shown(there, 500)}); `rlhf push` it where it is"
        )
    _check(done, remote, "fetch")
    return git(root, "rev-parse", "FETCH_HEAD")


def _ask(root: Path, remote: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run git, which asks for no password on a terminal."""
    if remote not in git(root, "remote").split():
        raise ConfigError(
            f"git remote {remote}: expected where to share commits and tags, got none; `git remote add {remote} ADDRESS` "
            "sets it, see docs/stores.md"
        )
    environment = {**git_environment(), "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    return run_within(COMMAND_SECONDS, ["git", *arguments], root, environment)


def _check(done: subprocess.CompletedProcess[str], remote: str, verb: str) -> None:
    if done.returncode:
        words = shown(" ".join((done.stderr or done.stdout).split()), 500)
        raise ConfigError(f"git {verb}: expected {remote} to accept it, got: {words}; check the address (`git remote -v`) and your access")


def _clash(artifact: str, remote: str, output: str, mark: str) -> str:
    line = next(line for line in output.splitlines() if mark in line)
    other = shown(" ".join(line.split()), 200)
    return (
        f"tags of {artifact} at {remote}: expected the same as here, got another ({other}); someone decided too: to keep theirs, delete "
        f"yours (`git tag -d`), `git fetch {remote} 'refs/tags/{artifact}*:refs/tags/{artifact}*'`, and decide again"
    )
