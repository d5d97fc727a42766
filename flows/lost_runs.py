"""Runs that a killed server or worker has left behind: Prefect has them as running for ever, refuses to retry them, and counts them
as the one run that a deployment may have at a time.
"""

from __future__ import annotations

import base64
import json
import time
import urllib.error
import urllib.request
from contextlib import suppress
from typing import Any

import psutil

AT_WORK = ["RUNNING", "PENDING", "CANCELLING"]
REQUEST_SECONDS = 90.0  # on SQLite the server has stood still for sixty
BUSY = 503
MESSAGE = "Its process is gone, and nobody was there to hear of its end; a retry goes on from the last checkpoint."


def end_lost_runs(url: str, secret: str) -> list[str]:
    """Set the runs of deployments that no process works on to Crashed. To be called before a worker starts new ones, with a server whose
    database no other machine shares.

    Args:
        url: of Prefect's API.
        secret: user:password.
    Returns:
        Their names.
    Raises:
        OSError: the server does not answer, or has been busy for REQUEST_SECONDS.
    """
    wanted = {"state": {"type": {"any_": AT_WORK}}, "deployment_id": {"is_null_": False}}
    runs = _ask(url, secret, "flow_runs/filter", {"flow_runs": wanted})
    alive = _at_work() if runs else set()
    lost = [run for run in runs if run["id"] not in alive]
    for run in lost:
        state = {"type": "CRASHED", "name": "Crashed", "message": MESSAGE}
        _ask(url, secret, f"flow_runs/{run['id']}/set_state", {"state": state, "force": True})
    return [run["name"] for run in lost]


def _at_work() -> set[str]:
    """Ids of the flow runs that processes of this user work on, as Prefect gives them along."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            found.add(process.environ().get("PREFECT__FLOW_RUN_ID", ""))
    return found


def _ask(url: str, secret: str, path: str, body: dict[str, Any]) -> Any:
    password = base64.b64encode(secret.encode()).decode()
    headers = {"Content-Type": "application/json", "Authorization": f"Basic {password}"}
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), headers)
    until = time.monotonic() + REQUEST_SECONDS
    while True:
        try:
            with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:  # on SQLite the server's own services may have the database
            if error.code != BUSY or time.monotonic() > until:
                raise
            time.sleep(0.2)
