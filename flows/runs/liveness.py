"""Detects runs orphaned by a killed server, worker or command line.

Prefect shows such runs as Running, refuses to retry them, and counts them as the one run that a deployment may have at a time.

A run from the command line has a liveness file in PREFECT_HOME that its process keeps locked, named like a tag of the flow run. The kernel
frees the lock however the process ends. Only runs with such a file are set to Crashed, so runs of other machines aren't.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import psutil

from flows.database import NAME
from rlhf_core.files import try_lock

AT_WORK = ["RUNNING", "PENDING", "CANCELLING"]
REQUEST_SECONDS = 90.0  # a server on SQLite can block for a minute
BUSY = 503
MESSAGE = "Its process is gone and could not report its end; a retry resumes from the last checkpoint."
SAME_COMMAND = "Its process is gone and could not report its end; the same command resumes from the last checkpoint."
SIGNS = "alive"  # folder of PREFECT_HOME


def crash_orphaned_runs(url: str, secret: str, *, patience: float = 0.0) -> list[str]:
    """Set the runs of deployments on which no process works to Crashed, and return their names.

    Call it while no worker starts runs, and only with a server whose database no other machine uses.

    Args:
        url: address of Prefect's API.
        secret: user:password.
        patience: seconds to wait for processes that are ending, such as a stage that writes its checkpoint.
    Returns:
        The names of these runs.
    Raises:
        OSError: the server does not answer, or has been busy for REQUEST_SECONDS.
    """
    wanted = {"state": {"type": {"any_": AT_WORK}}, "deployment_id": {"is_null_": False}}
    until = time.monotonic() + patience
    ended: list[str] = []
    while True:
        runs = ask(url, secret, "flow_runs/filter", {"flow_runs": wanted})
        alive = _at_work() if runs else set()
        for run in runs:
            if run["id"] not in alive:
                _crash(url, secret, run["id"], MESSAGE)
                ended.append(run["name"])
        if time.monotonic() > until or not alive & {run["id"] for run in runs}:
            return ended
        time.sleep(0.5)


@contextmanager
def liveness_tag(home: Path, given_url: str | None) -> Iterator[str]:
    """Yield a tag for this process's flow run, with the liveness file locked inside the block.

    After an exception the file stays, and `crash_orphaned_command_lines` checks whether Prefect recorded the end.

    Args:
        home: PREFECT_HOME. given_url: server address that the user set; None: none.
    """
    tag = f"process:{secrets.token_hex(4)}"
    folder = home / SIGNS
    folder.mkdir(exist_ok=True)
    path, aside = folder / f"{tag}.json", folder / f".{tag}"
    with aside.open("w", encoding="utf-8") as file:
        try_lock(file)
        json.dump({"database": _database(home, given_url), **_machine()}, file)
        file.flush()
        aside.replace(path)  # already locked when it becomes visible
        yield tag
        path.unlink()


def crash_orphaned_command_lines(home: Path, url: str, secret: str | None, given_url: str | None) -> list[str]:
    """Set the runs of command lines whose process is gone to Crashed, and return their names.

    Unreadable liveness files, for example truncated by a full disk, are removed.

    Args:
        home, given_url: as for `liveness_tag`. url: address of Prefect's API. secret: user:password; None: the API needs none.
    Returns:
        The names of these runs.
    Raises:
        OSError: as for `crash_orphaned_runs`.
    """
    ended = []
    for path in sorted((home / SIGNS).glob("*.json")):
        with suppress(FileNotFoundError), path.open(encoding="utf-8") as file:
            if not try_lock(file):
                continue  # the process is alive
            sign = _read_sign(file)
            if sign is None:
                path.unlink()
                continue
            if sign["database"] != _database(home, given_url) or not _is_here(sign):
                continue
            wanted = {"state": {"type": {"any_": AT_WORK}}, "tags": {"all_": [path.stem]}}
            for run in ask(url, secret, "flow_runs/filter", {"flow_runs": wanted}):
                _crash(url, secret, run["id"], SAME_COMMAND)
                ended.append(run["name"])
            path.unlink()
    return ended


def _read_sign(file: IO[str]) -> dict[str, str] | None:
    """Return the content of a liveness file, or None if it is incomplete."""
    with suppress(ValueError):
        sign = json.load(file)
        if isinstance(sign, dict) and sign.keys() >= {"database", "host", "boot"}:
            return sign
    return None


def _database(home: Path, given_url: str | None) -> str:
    """Return a hash of the address of a run's server or database, since an address may contain a password."""
    return hashlib.sha256((given_url or os.environ.get(NAME) or str(home.resolve())).encode()).hexdigest()[:16]


def _machine() -> dict[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id")
    return {"host": os.uname().nodename, "boot": boot.read_text(encoding="utf-8").strip() if boot.exists() else ""}


def _is_here(sign: dict[str, str]) -> bool:
    """Return whether the process ran on this machine, so that a free lock proves its end.

    Other machines may share the disk of PREFECT_HOME, and not every shared disk supports locks.
    """
    here = _machine()
    return sign["host"] == here["host"] or (sign["boot"] == here["boot"] != "")


def _crash(url: str, secret: str | None, run: str, message: str) -> None:
    state = {"type": "CRASHED", "name": "Crashed", "message": message}
    tasks = {"flow_run_id": {"any_": [run]}, "state": {"type": {"any_": AT_WORK}}}
    for task in ask(url, secret, "task_runs/filter", {"task_runs": tasks}):
        ask(url, secret, f"task_runs/{task['id']}/set_state", {"state": state, "force": True})
    ask(url, secret, f"flow_runs/{run}/set_state", {"state": state, "force": True})


def _at_work() -> set[str]:
    """Return the ids of the flow runs in the environments of this user's processes."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
    return found


def ask(url: str, secret: str | None, path: str, body: dict[str, Any] | None = None, *, method: str = "POST") -> Any:
    """Return the answer of Prefect's API to a request, which is repeated while the server is busy; None if the answer is empty.

    Raises:
        OSError: the server does not answer, refuses, or has been busy for REQUEST_SECONDS.
    """
    headers = {"Content-Type": "application/json"}
    if secret is not None:
        headers["Authorization"] = f"Basic {base64.b64encode(secret.encode()).decode()}"
    elif "PREFECT_API_KEY" in os.environ:
        headers["Authorization"] = f"Bearer {os.environ['PREFECT_API_KEY']}"
    request = urllib.request.Request(f"{url}/{path}", None if body is None else json.dumps(body).encode(), headers, method=method)
    until = time.monotonic() + REQUEST_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:  # the server's own services may hold a SQLite database
            if error.code != BUSY or time.monotonic() > until:
                raise
            time.sleep(0.2)
