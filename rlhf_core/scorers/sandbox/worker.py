"""The process that runs programs in the sandbox, one after the other; `box.py` starts it and talks to it in JSON.

At its start it makes namespaces of its own and takes for its root a tmpfs with nothing but the interpreter and the libraries, read-only.
Each program gets new namespaces within, an empty /tmp, limits, no capabilities and a list of forbidden system calls. It is process 1 of its
process namespace: when it ends or is killed, the kernel ends everything else there. The worker never reads what a program wrote but its
standard output and error.

    python -m rlhf_core.scorers.sandbox.worker <descriptor of the connection>
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import resource
import select
import signal
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from rlhf_core.scorers.sandbox import kernel
from rlhf_core.scorers.sandbox.seccomp import seccomp_program

NOBODY = 65534  # takes root's place outside the sandbox, so that root's files and exemptions are out of reach
USER = 1000  # the program's user, inside
PACKAGES = ("lib/python3*/site-packages", "lib/python3*/dist-packages", "local/lib/python3*/dist-packages")  # beside an interpreter
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")
FOLDER = "/tmp"  # the only place where a program can write
FILE_BYTES = 16 << 20  # of a file, of all files together, and of the output
INODES = 1024
THREADS = 64
OPEN_FILES = 64
POLL = 0.05  # seconds between two looks at a program's time
SHOWN_ERROR = 2000  # last bytes of the standard error
# Sets have the same order in each run; memory set aside for each thread would fill the address space.
_ENVIRONMENT = {"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"}
_NAMESPACES = kernel.CLONE_NEWNS | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUTS


def interpreter() -> str:
    """Return the interpreter without its virtual environment: programs have the standard library."""
    return os.path.realpath(sys._base_executable)


def visible_paths() -> list[str]:
    """Return what programs can read: libraries and the interpreter's installation."""
    homes = [os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix, os.path.dirname(interpreter()))]
    roots = ["/usr", "/lib", "/lib64", "/etc/ld.so.cache"]
    for home in sorted(homes):
        if not any(home == root or home.startswith(f"{root}/") for root in roots):
            roots.append(home)
    return roots


def path_files() -> list[str]:
    """Return the files whose lines Python executes at each start, which may take several times as long as the start itself."""
    homes = {os.path.realpath(path) for path in (sys.base_prefix, sys.base_exec_prefix)}
    return sorted({file for home in homes for folder in PACKAGES for file in glob.glob(f"{home}/{folder}/*.pth")})


def enter() -> int:
    """Put this process into user and mount namespaces of its own, with the sandbox's root as its root.

    Returns:
        The folder /proc of before, which the new root lacks.
    Raises:
        OSError: the kernel forbids it.
        ValueError: the interpreter is closed to the sandbox's user.
    """
    proc = os.open("/proc", os.O_PATH)
    user, group = os.geteuid(), os.getegid()
    built = user == 0 and _build_as_root()
    if user == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        kernel.stay_dumpable()
        user = group = NOBODY
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWNS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{USER} {user} 1"), ("gid_map", f"{USER} {group} 1")):
        file = os.open(f"self/{name}", os.O_WRONLY, dir_fd=proc)
        os.write(file, text.encode())
        os.close(file)
    if not built:
        _build_root()
    return proc


def _build_as_root() -> bool:
    """Return whether the root could be built with root's rights, which reach interpreters in folders that are closed to others."""
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
    except PermissionError:
        return False
    _build_root()
    return True


def _build_root() -> None:
    kernel.mount(None, "/", None, kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "size=1m,mode=755")
    old = f"{FOLDER}/old"
    os.mkdir(old)
    kernel.pivot_root(FOLDER, old)
    os.chdir("/")
    for path in visible_paths():
        _show(path, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV)
    for path in DEVICES:
        _show(path, kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NOEXEC)
    for path in path_files():
        kernel.mount("/dev/null", path, None, kernel.MS_BIND)
    if not os.access(interpreter(), os.X_OK):
        raise ValueError(f"{interpreter()} is closed to users other than root; install Python in a folder that is open to all")
    os.mkdir(FOLDER)
    kernel.unmount("/old")
    os.rmdir("/old")
    kernel.restrict_mount("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, recursive=False)


def _show(path: str, attributes: int) -> None:
    """Make a path of the old root, which is at /old, visible in the new one; a missing one is left out."""
    source = f"/old{path}"
    if not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if os.path.islink(source):  # /lib is usr/lib
        os.symlink(os.readlink(source), path)
        return
    if os.path.isdir(source):
        os.makedirs(path, exist_ok=True)
    else:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    kernel.mount(source, path, None, kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mount(path, attributes)


@dataclass(frozen=True)
class Job:
    """files: name in the working folder -> text. memory_mib: of address space.

    seconds, wall, most: of computing; until it is killed, without those that it waited for a core; until it is killed in any case.
    """

    files: dict[str, str]
    arguments: list[str]
    stdin: str
    seconds: float
    wall: float
    most: float
    memory_mib: int


class Worker:
    def __init__(self, connection: Connection, proc: int):
        self._connection, self._proc, self._filter, self._python = connection, proc, seccomp_program(), interpreter()

    def serve(self) -> None:
        while True:
            try:
                job = Job(**json.loads(self._connection.recv_bytes()))
                self._connection.send_bytes(json.dumps(self.run(job)).encode())
            except (EOFError, BrokenPipeError):
                return

    def run(self, job: Job) -> dict[str, Any]:
        """How the program ended, and what it wrote. `failure` is the sandbox's own; None: the program is to blame for the rest."""
        stdin, stdout, stderr = (os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING) for name in ("stdin", "stdout", "stderr"))
        ours, theirs = os.pipe()
        try:
            _fill(stdin, job.stdin)
            process = kernel.clone(_NAMESPACES)
            if process == 0:
                self._become(job, (stdin, stdout, stderr), theirs)
            os.close(theirs)
            theirs = -1
            ended = self._wait(process, job)
            failure = os.read(ours, SHOWN_ERROR).decode(errors="replace")
            size = os.fstat(stderr).st_size
            return {
                **ended,
                "failure": failure or ended["failure"],
                "stdout": os.pread(stdout, FILE_BYTES, 0).decode(errors="replace"),
                "stderr": os.pread(stderr, SHOWN_ERROR, max(0, size - SHOWN_ERROR)).decode(errors="replace"),
            }
        finally:
            for descriptor in (stdin, stdout, stderr, ours, theirs):
                if descriptor >= 0:
                    os.close(descriptor)

    def _wait(self, process: int, job: Job) -> dict[str, Any]:
        """Wait for the program's end, and kill it at its time.

        Raises:
            EOFError: this process's own parent ended.
        """
        watched = os.pidfd_open(process)
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.register(self._connection.fileno(), select.POLLIN)
        start, elapsed, left, ready = time.monotonic(), 0.0, min(job.wall, job.seconds), []
        while left > 0 and elapsed < job.most and not ready:
            ready = [descriptor for descriptor, _ in poll.poll(math.ceil(1000 * min(left, job.most - elapsed, POLL)))]
            elapsed = time.monotonic() - start
            left = min(job.wall + self._waited(process) - elapsed, job.seconds - _computed(process))
        ended = watched in ready
        if not ended:
            os.kill(process, signal.SIGKILL)
        os.close(watched)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if ready and not ended:
            raise EOFError
        failure = None
        if not ended and left > 0:
            failure = f"it was killed after {job.most:.3g} s, before it had its time: is the machine busy?"
        if ended and code == -signal.SIGKILL:  # which process 1 of a namespace gets only from outside
            failure = "it was killed from outside: has the machine enough memory?"
        return {"code": code, "timed_out": not ended, "failure": failure}

    def _waited(self, process: int) -> float:
        """Seconds that a process was ready to run and had no core; 0 where the kernel doesn't say."""
        try:
            file = os.open(f"{process}/schedstat", os.O_RDONLY, dir_fd=self._proc)
        except OSError:
            return 0.0
        with open(file, encoding="ascii") as opened:
            return int(opened.read().split()[1]) / 1e9

    def _become(self, job: Job, standard: tuple[int, int, int], report: int) -> None:
        """In the child: confine this process, and execute the program."""
        try:
            kernel.die_with_parent()
            os.setsid()
            flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
            kernel.mount("tmpfs", FOLDER, "tmpfs", flags, f"size={FILE_BYTES},nr_inodes={INODES},mode=700")
            os.chdir(FOLDER)
            for name, text in job.files.items():
                with open(name, "w", encoding="utf-8", errors="surrogatepass") as file:
                    file.write(text)
            for number, descriptor in enumerate(standard):
                os.dup2(descriptor, number)
            _limit(job)
            kernel.drop_capabilities()
            kernel.no_new_privileges()
            kernel.install_filter(self._filter)
            os.execve(self._python, [self._python, "-sPBXutf8", *job.arguments], _ENVIRONMENT)
        except BaseException as error:
            os.write(report, f"{type(error).__name__}: {error}"[:SHOWN_ERROR].encode())
        finally:
            os._exit(1)


def _computed(process: int) -> float:
    """Seconds of computing of a process and its threads, by its clock (clock_getcpuclockid(3)); limits of the kernel count in ticks."""
    return time.clock_gettime((~process << 3) | 2)


def _fill(descriptor: int, text: str) -> None:
    """Write a program's input, and seal it, so that the program can't write there."""
    data = text.encode(errors="surrogatepass")
    while data:
        data = data[os.write(descriptor, data) :]
    os.lseek(descriptor, 0, os.SEEK_SET)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE)


def _limit(job: Job) -> None:
    limits = {
        resource.RLIMIT_AS: job.memory_mib << 20,
        resource.RLIMIT_CPU: math.ceil(job.most) + 1,  # where this worker doesn't
        resource.RLIMIT_FSIZE: FILE_BYTES,
        resource.RLIMIT_NOFILE: OPEN_FILES,
        resource.RLIMIT_NPROC: THREADS,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: OPEN_FILES,
    }
    for limit, value in limits.items():
        _, most = resource.getrlimit(limit)
        allowed = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(limit, (allowed, allowed))


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    os.set_inheritable(connection.fileno(), False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the scorer handles Ctrl-C
    try:
        proc = enter()
    except (OSError, ValueError) as error:
        answer = {"ready": False, "failure": str(error), "forbidden": isinstance(error, OSError)}
        connection.send_bytes(json.dumps(answer).encode())
        return
    connection.send_bytes(json.dumps({"ready": True}).encode())
    Worker(connection, proc).serve()


if __name__ == "__main__":
    main()
