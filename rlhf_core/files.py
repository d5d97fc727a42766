"""Files that other processes read meanwhile: locked."""

from __future__ import annotations

import fcntl
import time
from typing import IO, Any


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
    """As `try_lock`, and wait for the other process.

    Raises:
        TimeoutError: another process still held the lock after `seconds`.
    """
    until = time.monotonic() + seconds
    while not try_lock(file, shared=shared):
        if time.monotonic() > until:
            raise TimeoutError(f"lock: expected it free within {seconds:.0f} s, got another process at work")
        time.sleep(0.05)
