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
        follow(starter)
        return wait_for(os.posix_spawnp(command[0], command, os.environ))
    except Stopped:
        return 128 + signal.SIGTERM
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end_descendants()


def stop(*_: object) -> None:
    raise Stopped


def follow(starter: int) -> None:
    """Ask the kernel for SIGTERM when the starter ends, and for orphaned descendants."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != starter:
        raise Stopped


def wait_for(command: int) -> int:
    """The exit code of the command, as a shell has it. Adopted orphans that end meanwhile are reaped."""
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
