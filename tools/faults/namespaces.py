"""Makes a Ray cluster whose nodes are network namespaces of this machine. It needs root, `ip` and `unshare`.

Nodes share a network and only the folder `<folder>/storage`. Each has its own /tmp and /dev/shm and doesn't see this checkout, and its
host's name is 127.0.1.1, as on a stock Debian. The first is the head.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = Path(sys.prefix).resolve()  # the environment; the checkout that is installed in it may lie around it
STARTED = "Ray runtime started"
START_SECONDS = 120.0
STORE = 100_000_000  # bytes of a node's object store
PORT, DASHBOARD = 6379, 8265
COMMANDS = ("ip", "unshare", "mount")


def unavailable() -> str | None:
    """The reason why this machine can't make such a cluster, or None."""
    if os.geteuid() != 0:
        return "needs root"
    if missing := [name for name in COMMANDS if shutil.which(name) is None]:
        return f"needs {missing[0]}"
    name = f"rl{secrets.token_hex(3)}"
    tries = (["ip", "link", "add", name, "type", "bridge"], ["ip", "netns", "add", name], ["unshare", "--mount", "--uts", "true"])
    try:
        for command in tries:
            if (done := subprocess.run(command, capture_output=True, text=True)).returncode:
                return f"{shlex.join(command[:3])}: {done.stderr.strip()}"
    finally:
        subprocess.run(["ip", "link", "del", name], capture_output=True)
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return None


@dataclass
class Nodes:
    """Nodes with CPUs for Ray's actors, by their number from 0.

    folder: folder of everything that they write.
    hidden: folders that they don't see. missing: folders that they find empty. gpus: number of GPUs of each, as far as Ray knows.
    """

    folder: Path
    cpus: Sequence[int]
    hidden: Sequence[Path] = ()
    missing: Sequence[Path] = ()
    gpus: Sequence[int] = ()
    environment: dict[str, str] = field(default_factory=dict)
    processes: list[subprocess.Popen] = field(default_factory=list)
    name: str = field(default_factory=lambda: f"rl{secrets.token_hex(3)}")
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    _starts: int = 0

    @property
    def storage(self) -> Path:
        return self.folder / "storage"

    @property
    def address(self) -> str:
        return f"http://{self._ip(0)}:{DASHBOARD}"

    def start(self) -> None:
        """Start the cluster.

        Raises:
            RuntimeError: a node doesn't start in time.
        """
        self.storage.mkdir(parents=True, exist_ok=True)
        token = self.folder / "token"
        token.write_text(self.token)
        token.chmod(0o600)
        _run("ip", "link", "add", self.name, "type", "bridge")
        _run("ip", "addr", "add", f"{self._network}.254/24", "dev", self.name)
        _run("ip", "link", "set", self.name, "up")
        for number in range(len(self.cpus)):
            self._connect(number)
            self.processes.append(self._start(number))
            if number == 0:
                self._wait(0)
        for number in range(1, len(self.cpus)):
            self._wait(number)

    def replace(self, number: int) -> None:
        """Start a lost node again, without anything that it had."""
        self._starts += 1
        _run("ip", "link", "set", self._link(number), "up")
        self.processes[number] = self._start(number)
        self._wait(number)

    def stop(self) -> None:
        for number, process in enumerate(self.processes):
            if process.poll() is None:
                self.lose(number)
        for number in range(len(self.processes)):
            subprocess.run(["ip", "netns", "del", f"{self.name}-{number}"], capture_output=True)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True)

    def lose(self, number: int) -> None:
        """Cut a node off and kill all its processes without notice to the other nodes, as after a power failure."""
        _run("ip", "link", "set", self._link(number), "down")
        for pid in self.pids(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.processes[number].kill()
        self.processes[number].wait(20)

    def pids(self, number: int) -> list[int]:
        """The process ids of a node."""
        listed = subprocess.run(["ip", "netns", "pids", f"{self.name}-{number}"], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def output(self, number: int) -> str:
        path = self.folder / f"node-{number}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    @property
    def _network(self) -> str:
        return f"10.{77 + int(self.name[2:4], 16) % 100}.{int(self.name[4:6], 16)}"

    def _ip(self, number: int) -> str:
        return f"{self._network}.{number + 1}"

    def _link(self, number: int) -> str:
        """Return the name of a node's cable at the other end."""
        return f"{self.name}v{number}"

    def _connect(self, number: int) -> None:
        space, end = f"{self.name}-{number}", self._link(number)
        _run("ip", "netns", "add", space)
        _run("ip", "link", "add", end, "type", "veth", "peer", "name", "eth0", "netns", space)
        _run("ip", "link", "set", end, "master", self.name, "up")
        for command in (
            ("addr", "add", f"{self._ip(number)}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _run("ip", "-n", space, *command)

    def _start(self, number: int) -> subprocess.Popen:
        own = self.folder / f"node-{number}-{self._starts}"
        (own / "tmp").mkdir(parents=True)
        host = f"node{number}"
        (own / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {host}\n")
        where = ["--head", f"--port={PORT}", "--include-dashboard=true", f"--dashboard-host={self._ip(0)}", f"--dashboard-port={DASHBOARD}"]
        if number:
            where = [f"--address={self._ip(0)}:{PORT}"]
        gpus = [f"--num-gpus={self.gpus[number]}"] if self.gpus else []
        ray = [str(PYTHON / "bin/python"), "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", *where, *gpus]
        ray += [f"--node-ip-address={self._ip(number)}", f"--num-cpus={self.cpus[number]}", f"--object-store-memory={STORE}"]
        script = "\n".join([*self._mounts(own), f"hostname {host}", f"cd / && exec {shlex.join(ray)}"])
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "PYTHON", "TMP"))}
        environment |= {"PATH": f"{PYTHON / 'bin'}:{os.environ['PATH']}", "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self.token}
        environment |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0", **self.environment}
        enter = [
            "ip",
            "netns",
            "exec",
            f"{self.name}-{number}",
            "unshare",
            "--mount",
            "--uts",
            "--propagation",
            "private",
            "sh",
            "-ec",
            script,
        ]
        with (self.folder / f"node-{number}.log").open("w") as log:
            return subprocess.Popen(
                [*enter, "sh", "-ec", script], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _mounts(self, own: Path) -> Iterator[str]:
        """Commands that give a node its own view of the file system, with Python's packages and the storage."""
        kept = {"python": PYTHON, "storage": self.storage.resolve()}
        for name, folder in kept.items():
            yield f"mkdir -p /run/kept/{name} && mount --bind {shlex.quote(str(folder))} /run/kept/{name}"
        yield f"mount --bind {shlex.quote(str(own / 'hosts'))} /etc/hosts"
        yield f"mkdir -p /run/kept/own && mount --bind {shlex.quote(str(own / 'tmp'))} /run/kept/own"
        hidden = {ROOT.resolve(), PYTHON.parent, self.folder.resolve(), *(path.resolve() for path in self.hidden)}
        for folder in sorted(path for path in hidden if not hidden & set(path.parents)):
            yield f"mount -t tmpfs none {shlex.quote(str(folder))}"
        yield "mount --move /run/kept/own /tmp"
        yield "mount -t tmpfs none /dev/shm"
        for name, folder in kept.items():
            yield f"mkdir -p {shlex.quote(str(folder))} && mount --bind /run/kept/{name} {shlex.quote(str(folder))}"
        for folder in self.missing:
            yield f"mount -t tmpfs none {shlex.quote(str(folder))}"

    def _wait(self, number: int) -> None:
        until = time.monotonic() + START_SECONDS
        while STARTED not in self.output(number):
            if time.monotonic() > until or self.processes[number].poll() is not None:
                raise RuntimeError(f"node {number}: expected Ray to start, got:\n{self.output(number)[-2000:]}")
            time.sleep(0.1)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)
