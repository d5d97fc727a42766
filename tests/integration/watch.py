"""What a run shows to others while it lasts: secrets on command lines, sockets that are open to other machines."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
from pathlib import Path

import psutil
from small_chain import NAMED, PLANTED, alive_processes, temporary

PERIOD = 2.0  # seconds


class Watch(threading.Thread):
    """Looks at the processes of a workspace until it is told to stop.

    Attributes:
        secrets: those that were planted in the environment, Prefect's password and the tokens of Ray's heads.
        shown: command lines with a secret in them.
        carried: command lines of processes with a planted secret in their environment.
        open: names of processes and addresses at which they listened, other than this machine's own.
    """

    def __init__(self, workspace: Path):
        super().__init__(daemon=True)
        self._workspace, self._end = workspace, threading.Event()
        self.secrets: set[str] = set(PLANTED.values())
        self.shown: set[str] = set()
        self.carried: set[str] = set()
        self.open: set[str] = set()

    def run(self) -> None:
        while not self._end.wait(PERIOD):
            self._look()

    def stop(self) -> None:
        self._end.set()
        self.join()

    def _look(self) -> None:
        files = [self._workspace / ".prefect/auth", *temporary(self._workspace).glob("rlhf-ray-*/token")]
        for path in files:
            with contextlib.suppress(OSError):
                self.secrets |= {path.read_text().strip()} - {""}
        for process in psutil.process_iter(["cmdline"]):
            line = " ".join(process.info["cmdline"] or [])
            if any(secret in line for secret in self.secrets):
                self.shown.add(line)
        for process in alive_processes(self._workspace):
            with contextlib.suppress(psutil.Error):
                if {*PLANTED.values(), *NAMED.values()} & set(process.environ().values()):
                    self.carried.add(" ".join(process.cmdline()))
            with contextlib.suppress(psutil.Error):
                for connection in process.net_connections(kind="inet"):
                    if connection.status == psutil.CONN_LISTEN and not _is_own(connection.laddr.ip):
                        self.open.add(f"{process.name()} at {connection.laddr.ip}: {' '.join(process.cmdline()[:4])[:150]}")


def _is_own(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
