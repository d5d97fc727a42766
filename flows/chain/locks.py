"""Allows one flow at a time in a workspace: a second start is refused with the id of the running process."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from flows.chain.worktree import worktree_path
from rlhf_core.config import ConfigError
from rlhf_core.files import try_lock

LOOK_SECONDS = 0.2


@contextlib.contextmanager
def only_flow(root: Path, run: str | None) -> Iterator[None]:
    """Hold the lock of a run, from its preparation to the end of its flow. The kernel frees it however the process ends.

    Args:
        root: the checkout. run: the name of the run's worktree; None: the flow works in the checkout itself.
    Raises:
        ConfigError: the lock is held, or the name is invalid.
    """
    path = lock_path(root, run)
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path, "this folder" if run is None else f"run {run}") as file:
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def lock_path(root: Path, run: str | None) -> Path:
    return root / ".dvc/tmp/flow.lock" if run is None else worktree_path(root, run).with_name(f".{run}.lock")


def at_work(root: Path, run: str) -> str | None:
    """Return the id of the process whose flow works on a run, or None if no flow does."""
    try:
        with lock_path(root, run).open(encoding="utf-8") as file:
            if not try_lock(file, shared=True):
                return file.read().strip() or "unknown"
    except FileNotFoundError:
        pass
    return None


def _locked(path: Path, subject: str) -> TextIO:
    """Return the open lock file, locked. It is opened again if it was removed meanwhile, as `delete` does with a run's lock.

    Raises:
        ConfigError: the lock was held for LOOK_SECONDS, while `at_work` holds it for less.
    """
    until = time.monotonic() + LOOK_SECONDS
    while True:
        file = path.open("a+")
        if try_lock(file):
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        elif time.monotonic() > until:
            file.seek(0)
            other = file.read().strip() or "unknown"
            file.close()
            raise ConfigError(
                f"{subject}: expected no other flow at work on it, got one, process {other}; wait for it or stop it, or give this one "
                "another name"
            )
        file.close()
        time.sleep(0.02)
