"""One flow at a time in a workspace: the second start is refused and told whom it met."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from flows.worktree import worktree_path
from rlhf_core.config import ConfigError

_held: set[Path] = set()  # by this process: the command line holds one around the flow, which asks again


@contextlib.contextmanager
def only_flow(root: Path, run: str | None) -> Iterator[None]:
    """Held as long as a flow works on a run; the kernel frees it however the flow ends.

    Args:
        root: the checkout. run: the name of its worktree, or None: the flow works in the checkout itself.
    Raises:
        ConfigError: another process has it, or the name can't be one.
    """
    path = root / ".dvc/tmp/flow.lock" if run is None else worktree_path(root, run).with_name(f".{run}.lock")
    subject = "this folder" if run is None else f"run {run}"
    path = path.resolve()
    if path in _held:
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            other = file.read().strip() or "unknown"
            raise ConfigError(
                f"{subject}: expected no other flow at work on it, got one, process {other}; wait for it or stop it, or give this one "
                "another name"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        _held.add(path)
        try:
            yield
        finally:
            _held.discard(path)
