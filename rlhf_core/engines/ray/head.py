"""Keeps a Ray head: starts it, and ends all its processes on SIGTERM or when its stage is gone.

    python -m rlhf_core.engines.ray.head <folder> <pid of the stage> <command of the head>

It is a separate process because the stage may be killed at any time: Ray's processes, including the job's driver and the actors,
mustn't outlive the stage, and the keeper also removes the folder. File descriptors inherited by the keeper stay open until all processes
are gone, so the stage's lock prevents a second trainer until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

from rlhf_core.process import end_with_parent

POLL_SECONDS = 0.2
END_SECONDS = 10.0  # for killed processes to exit


def main() -> int:
    folder, stage, command = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    _follow_parent()
    code = 0
    if os.getppid() == stage:
        with (folder / "head.log").open("w") as output:
            head = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        while head.poll() is None and not stop.wait(POLL_SECONDS):
            pass
        code = head.returncode or 0
        _end_descendants()
    if stop.is_set() or os.getppid() != stage:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _follow_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies, and adopt orphaned descendants, so that this process can end them all."""
    end_with_parent()
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def _end_descendants() -> None:
    """Kill all descendants without a grace: the job has already written its checkpoint, or the stage was killed."""
    until = time.monotonic() + END_SECONDS
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=POLL_SECONDS)
        _reap()


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main())
