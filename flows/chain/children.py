"""Child processes of a flow: their output, and their end, which comes no later than this process's."""

from __future__ import annotations

import os
import queue
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import psutil

END_SECONDS = 25.0  # for a process to exit after its children
REST_SECONDS = 5.0


class Lines:
    """A child's output, read by a thread until all writers have closed it."""

    def __init__(self, child: subprocess.Popen[str]):
        self._child = child
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._ended = False
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self._child.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def until(self, deadline: float) -> Iterator[str]:
        """Yield lines until the child has exited and its output is read.

        Raises:
            TimeoutError: the deadline passed.
        """
        while True:
            with suppress(queue.Empty):
                line = self._lines.get(timeout=0.5)
                if line is None:
                    self._ended = True
                    break
                yield line
                continue
            if self._child.poll() is not None and not session_members(self._child.pid):
                break
            if time.monotonic() > deadline:
                raise TimeoutError
        self._child.wait(timeout=END_SECONDS)

    def rest(self) -> Iterator[str]:
        """Yield an exited child's remaining lines, up to REST_SECONDS after the last one: another process may hold the output open."""
        with suppress(queue.Empty):
            while not self._ended and (line := self._lines.get(timeout=REST_SECONDS)) is not None:
                yield line


def session_members(session: int) -> list[psutil.Process]:
    """Return the living processes of a session."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if os.getsid(pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
    return members


def stop_session(child: subprocess.Popen, grace: float) -> None:
    """End a child and its session: SIGTERM to the processes that it started, or to itself if there are none, and SIGKILL after the grace.

    The stage is signalled instead of DVC, so that DVC sees the stage end and releases its locks.
    """
    signalled: set[int] = set()
    until = time.monotonic() + grace
    while members := session_members(child.pid):
        if time.monotonic() > until:
            for process in members:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            break
        inner = [p for p in members if p.pid != child.pid]
        for process in _outermost(inner, child.pid) or members:
            if process.pid not in signalled:
                signalled.add(process.pid)
                with suppress(psutil.NoSuchProcess):
                    process.terminate()
        child.poll()
        time.sleep(0.05)
    child.wait(timeout=END_SECONDS)


def _outermost(processes: list[psutil.Process], root: int) -> list[psutil.Process]:
    """Return the processes whose parent isn't among them: the stage, not its workers."""
    pids = {p.pid for p in processes} - {root}
    outer = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.ppid() not in pids:
                outer.append(process)
    return outer
