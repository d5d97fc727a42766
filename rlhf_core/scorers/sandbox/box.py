"""Runs untrusted Python programs, each in namespaces of its own (`worker.py`), from a process that keeps threads and models.

with Sandbox() as sandbox:
    outcome = sandbox.run({"main.py": text}, ["main.py"], stdin="3\\n", limits=Limits(seconds=2.0, memory_mib=256))
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

START_SECONDS = 60.0
PATIENCE = 10  # times the seconds that a program may sleep: its run on a busy machine
GRACE = 30.0  # seconds beyond a program's time, after which its worker is given up
# File of the kernel -> the content that forbids user namespaces, and what allows them.
_FORBIDDING = {
    "/proc/sys/kernel/unprivileged_userns_clone": ("0", "run `sysctl kernel.unprivileged_userns_clone=1`"),
    "/proc/sys/user/max_user_namespaces": ("0", "run `sysctl user.max_user_namespaces=10000`"),
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": (
        "1",
        "run `sysctl kernel.apparmor_restrict_unprivileged_userns=0`, or give this interpreter an AppArmor profile with `userns,`",
    ),
}
_UNCONFINED = (
    "start the container with a seccomp profile that allows clone, unshare, mount, mount_setattr, umount2 and pivot_root, such as "
    "`docker run --security-opt seccomp=unconfined --security-opt apparmor=unconfined`"
)


class SandboxFailure(RuntimeError):
    """The sandbox itself failed, which says nothing of the program."""


@dataclass(frozen=True)
class Limits:
    """seconds: of computing. memory_mib: address space of the program, with its interpreter."""

    seconds: float
    memory_mib: int

    @property
    def wall(self) -> float:
        """Seconds after which a program is killed that sleeps; those that it waits for a core of a busy machine don't count."""
        return 2 * self.seconds + 1

    @property
    def most(self) -> float:
        """Seconds after which a program is killed in any case."""
        return PATIENCE * self.wall


@dataclass(frozen=True)
class Outcome:
    """How a program ended. code: its exit code, negative for a signal. stderr: the end of it."""

    code: int
    timed_out: bool
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.code == 0 and not self.timed_out


class Sandbox:
    """One worker process, which runs one program at a time. A worker that failed is replaced at the next run.

    Raises:
        SandboxFailure: the kernel forbids the sandbox; the message says what to allow.
    """

    def __init__(self):
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the worker, and with it a program that is still running."""
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.wait()
            self._process = None

    def run(self, files: dict[str, str], arguments: list[str], *, limits: Limits, stdin: str = "", most: float = math.inf) -> Outcome:
        """Run the interpreter on `files` in an empty folder.

        Args:
            arguments: the program's file, and its arguments.
            most: seconds until the program is killed in any case, if less than `limits.most`.
        Raises:
            SandboxFailure: the program couldn't be run, or not to its end for a reason outside it.
        """
        if self._process is None:
            self._start()
        most = min(most, limits.most)
        job = {"files": files, "arguments": arguments, "stdin": stdin, "wall": limits.wall, "most": most, **vars(limits)}
        try:
            self._connection.send_bytes(json.dumps(job).encode())
            answer = self._receive(most + GRACE)
        except (OSError, EOFError) as error:
            self.close()
            raise SandboxFailure(f"the sandbox's process ended: {type(error).__name__}") from error
        if failure := answer.pop("failure"):
            raise SandboxFailure(f"the sandbox could not run a program to its end: {failure}")
        return Outcome(**answer)

    def _receive(self, seconds: float) -> dict[str, Any]:
        if not self._connection.poll(seconds):
            raise EOFError
        return json.loads(self._connection.recv_bytes())

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        command = [sys.executable, "-m", "rlhf_core.scorers.sandbox.worker", str(theirs.fileno())]
        environment = {"PYTHONPATH": str(Path(__file__).parents[3]), "PATH": os.defpath}
        with theirs:
            none = subprocess.DEVNULL
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=none, stdout=none)
        try:
            answer = self._receive(START_SECONDS)
        except (OSError, EOFError):
            answer = {"ready": False, "failure": "its process didn't start", "forbidden": True}
        if not answer["ready"]:
            self.close()
            advice = f"; {remedy()}" if answer["forbidden"] else ""
            raise SandboxFailure(f"expected namespaces for untrusted programs, got: {answer['failure']}{advice}")


def remedy() -> str:
    """Return what to allow, by what the kernel says that it forbids."""
    todo = [advice for path, (value, advice) in _FORBIDDING.items() if _content(path) == value]
    if "\nSeccomp:\t2\n" in _content("/proc/self/status", strip=False):
        todo.append(_UNCONFINED)
    return "; ".join(todo) or "allow user namespaces for this user (user_namespaces(7)), with Linux 5.12 or newer on x86-64 or aarch64"


def _content(path: str, *, strip: bool = True) -> str:
    with suppress(OSError):
        text = Path(path).read_text(encoding="utf-8")
        return text.strip() if strip else text
    return ""


def check_sandbox(subject: str, limits: Limits) -> None:
    """Run a program in the sandbox within the limits, to see whether this machine lets it and they leave room for the interpreter.

    Raises:
        ValueError: they don't; the message begins with the subject and says what to change.
    """
    try:
        with Sandbox() as sandbox:
            outcome = sandbox.run({"main.py": "import json\nprint(input())"}, ["main.py"], stdin="here", limits=limits)
    except SandboxFailure as failure:
        raise ValueError(f"{subject}: {failure}") from failure
    if outcome.stdout != "here\n":
        said = "no time" if outcome.timed_out else f"exit code {outcome.code} {outcome.stderr.strip()[-300:]}"
        raise ValueError(
            f"{subject}: expected Python to start within {limits.seconds:g} s of computing and {limits.memory_mib} MiB, got {said}; raise "
            "seconds or memory_mib"
        )
