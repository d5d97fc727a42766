"""A PostgreSQL server of a test: Debian's programs in a folder of their own, run by a user who isn't root."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhf_core.engines.ports import free_ports

USER, PASSWORD = "rlhf", "se/cr:et"
SECONDS = 60.0


def programs() -> Path:
    """The folder of PostgreSQL's newest programs; skips the test where there are none."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    on_path = shutil.which("initdb")
    if not found and on_path is None:
        pytest.skip("PostgreSQL isn't installed (Debian's package postgresql)")
    return found[-1].parent if found else Path(on_path).parent


def server_user() -> str | None:
    """The user who runs the server: None for this one, who must not be root."""
    return "postgres" if os.geteuid() == 0 else None


class Postgres:
    """folder: data and socket; port: on 127.0.0.1. The user rlhf needs its password."""

    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_ports(1)[0]
        self.programs = programs()
        self.process: subprocess.Popen | None = None
        (folder / "password").write_text(PASSWORD)
        if server_user():
            for path in (folder, folder / "password"):
                shutil.chown(path, server_user(), server_user())
        self.run("initdb", "-D", "data", "-U", USER, "--auth=scram-sha-256", "--pwfile=password", "--no-sync", "-E", "UTF8")

    def run(self, program: str, *arguments: str) -> str:
        environment = {"PATH": os.defpath, "PGPASSWORD": PASSWORD, "LC_ALL": "C.UTF-8"}
        options = {"cwd": self.folder, "user": server_user(), "env": environment, "timeout": SECONDS}
        done = subprocess.run([str(self.programs / program), *arguments], capture_output=True, text=True, check=False, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def sql(self, command: str, database: str = "postgres") -> str:
        return self.run("psql", "-h", "127.0.0.1", "-p", str(self.port), "-U", USER, "-d", database, "-Atc", command)

    def url(self, user: str = USER, database: str = "prefect") -> str:
        """The address without a password."""
        return f"postgresql://{user}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        command = [self.programs / "postgres", "-D", "data", "-k", str(self.folder), "-p", str(self.port), "-c", "fsync=off"]
        log = (self.folder / "log").open("a")
        options = {"cwd": self.folder, "user": server_user(), "stdout": log, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen([*map(str, command), "-c", "listen_addresses=127.0.0.1"], **options)
        log.close()
        until = time.monotonic() + SECONDS
        while "accepting" not in self.state():
            assert self.process.poll() is None and time.monotonic() < until, (self.folder / "log").read_text()
            time.sleep(0.1)

    def state(self) -> str:
        command = [str(self.programs / "pg_isready"), "-h", "127.0.0.1", "-p", str(self.port)]
        text = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SECONDS).stdout
        return text if "rejecting" not in text else ""

    def stop(self) -> None:
        """End it as a restart does: connections are cut."""
        if self.process is not None:
            self.run("pg_ctl", "stop", "-D", "data", "-m", "fast", "-w")
            self.process.wait(SECONDS)
            self.process = None


@contextmanager
def postgres() -> Iterator[Postgres]:
    """A running server with an empty database `prefect`, whose owner is rlhf."""
    programs()
    folder = Path(tempfile.mkdtemp(prefix="rlhf-postgres-"))  # a folder of pytest would be closed to another user
    server = Postgres(folder)
    try:
        server.start()
        server.sql("create database prefect")
        yield server
    finally:
        try:
            server.stop()
        finally:
            shutil.rmtree(folder)
