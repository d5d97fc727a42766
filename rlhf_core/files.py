"""Files that other processes read meanwhile: replaced as a whole, and locked."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

ASIDE = ".tmp"  # ending of a file that is being written


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file, which replaces `path` when the block ends: readers see the old content or the new. Folders are made.

    After an error `path` is as before, and the new file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name[:200]}.{secrets.token_hex(4)}{ASIDE}")
    try:
        yield aside
        aside.replace(path)
    except BaseException:  # a signal too
        aside.unlink(missing_ok=True)
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text in UTF-8, whose line ends stay, in place of a file; see `replacing`."""
    with replacing(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="")


def try_lock(file: IO[Any], *, shared: bool = False) -> bool:
    """Lock an open file, exclusively or with others that share it, unless another process holds a lock that excludes this one.

    The kernel frees the lock when the file is closed or the process ends.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(file: IO[Any], seconds: float, *, shared: bool = False) -> None:
    """Lock as `try_lock` does, and wait for another process that holds the lock.

    Raises:
        TimeoutError: another process still held the lock after `seconds`.
    """
    until = time.monotonic() + seconds
    while not try_lock(file, shared=shared):
        if time.monotonic() > until:
            raise TimeoutError(f"lock: expected it free within {seconds:.0f} s, got another process at work")
        time.sleep(0.05)
