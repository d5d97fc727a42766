"""Keeps an agent's command: starts it, and ends all its processes when it ends, on SIGTERM, or when the process that started it is gone.

    python -I -S <this file> <pid of the starter> <command>

It is a process of its own because its starter may be killed at any time. It adopts orphans, so that processes in sessions of their own
end too. It imports little: there may be one for each episode.
"""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
END_SECONDS = 10.0  # for killed processes to exit
NOT_STARTED = 127  # a shell's exit code for a command that it can't start


class Stopped(Exception):
    """SIGTERM arrived."""


def main() -> int:
    starter, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, stop)
    try:
        follow(starter, signal.SIGTERM)
        adopt_orphans()
        return wait_for(begin(command))
    except Stopped:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()


def stop(*_: object) -> None:
    raise Stopped


def follow(parent: int, number: int) -> None:
    """Ask the kernel for a signal when the parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        raise Stopped


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def begin(command: list[str]) -> int:
    """Start the command, which is killed should this process be. Returns its process id."""
    keeper = os.getpid()
    if child := os.fork():
        return child
    try:
        follow(keeper, signal.SIGKILL)
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"{command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(NOT_STARTED)


def wait_for(command: int) -> int:
    """Return the exit code of the command, as a shell has it. Adopted orphans that end meanwhile are reaped."""
    while True:
        ended, status = os.waitpid(-1, 0)
        if ended == command:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


def end_descendants() -> None:
    """Kill children until none is left: the children of a killed one become this process's."""
    until = time.monotonic() + END_SECONDS
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < until:
            for child in children():
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(child, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.01)


def children() -> list[int]:
    """Processes whose parent is this one."""
    own, found = str(os.getpid()), []
    with suppress(OSError):  # without /proc the command is in this process's group, which its starter ends
        for name in filter(str.isdigit, os.listdir("/proc")):
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                if file.read().rpartition(")")[2].split()[1] == own:
                    found.append(int(name))
    return found


if __name__ == "__main__":
    sys.exit(main())
