"""Promotion through a real Prefect server and worker: a person says no to one run and yes to the next."""

from __future__ import annotations

import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from registry_project import candidate, make_project
from small_workspace import ask_server, flow_runs, lay_out_database, serving, wait_until

from flows import versions
from flows.registry import read_registry

NAME = "reward-model"


def answer(prefect: Any, run: str, **fields: object) -> str:
    """Resume a run with what a person filled in; the server's verdict on that."""
    until = time.monotonic() + 60
    while True:
        try:
            return prefect.ask(f"flow_runs/{run}/resume", run_input=fields)["status"]
        except urllib.error.HTTPError as error:  # 503: its database was busy, and nothing was done
            if error.code != 503 or time.monotonic() > until:
                raise
            time.sleep(1)


def test_a_run_waits_for_a_person_and_does_as_told(tmp_path):
    project = make_project(tmp_path / "project")
    lay_out_database(project / ".prefect")
    candidate(project, "first", seed=1)
    assert versions.register(project, NAME, "first").version == "v1.0.0"
    with serving(project, tmp_path / "server.log") as prefect:

        def state(number: int) -> dict:
            runs = sorted(flow_runs(prefect, NAME), key=lambda r: r["created"])
            return runs[number]

        def ask(number: int) -> str:
            """A run, once it is suspended."""
            asked = prefect("deployment", "run", f"promote/{NAME}")
            assert asked.returncode == 0, asked.stderr
            wait_until(lambda: state(number)["state"]["name"] in ("Suspended", "Refused", "Failed", "Crashed"), 120, "the question")
            assert state(number)["state"]["name"] == "Suspended", state(number)["state"]
            return state(number)["id"]

        for password in (None, "rlhf:guessed"):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                ask_server(prefect.url, "flow_runs/filter", password=password)
        run = ask(0)
        assert answer(prefect, run) == "REJECT"  # nothing is accepted unasked
        assert answer(prefect, run, approve=False, by="Ann", reason="too curt") == "ACCEPT"
        wait_until(lambda: state(0)["state_type"] == "FAILED", 120, "the end of the run that was not approved")
        assert (state(0)["state"]["name"], state(0)["state"]["message"]) == ("NotApproved", "reward-model v1.0.0: Ann: too curt")
        assert read_registry(project, NAME).events == []

        run = ask(1)
        candidate(project, "second", seed=2)
        versions.register(project, NAME, "second")  # newer than what the person is asked about
        assert answer(prefect, run, approve=True, by="Ben", reason="read forty samples") == "ACCEPT"
        wait_until(lambda: state(1)["state_type"] in ("COMPLETED", "FAILED", "CRASHED"), 120, "the end of the approved run")
        assert state(1)["state"]["name"] == "Completed", state(1)["state"]["message"]
    (event,) = read_registry(project, NAME).events
    assert (event.action, event.version, event.by, event.reason) == ("promote", "v1.0.0", "Ben", "read forty samples")
