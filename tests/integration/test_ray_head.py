"""A Ray head of our own, started for real, while somebody else takes the port that was free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

from rlhf_core.engines.ray.cluster import HEAD_STARTS

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def seen() -> dict[int, dict]:
    """What a start saw whose dashboard's port was taken so many times. Ray notices after seconds, so both start at once."""
    probe = str(Path(__file__).with_name("ray_head_probe.py"))
    how = {"env": {**os.environ, "PYTHONPATH": str(ROOT)}, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    probes = {times: subprocess.Popen([sys.executable, probe, str(times)], **how) for times in (1, 99)}
    try:
        message = {times: started.communicate(timeout=250) for times, started in probes.items()}
    finally:
        for started in probes.values():
            started.kill()
    assert all(started.returncode == 0 for started in probes.values()), [error[-3000:] for _, error in message.values()]
    return {times: json.loads(printed.splitlines()[-1]) for times, (printed, _) in message.items()}


def test_a_port_that_was_taken_meanwhile_is_replaced(seen):
    taken, other = seen[1]["dashboards"]
    assert seen[1]["address"] == f"http://127.0.0.1:{other}" and taken != other
    assert seen[1]["error"] == "" and seen[1]["children"] == 0
    running = "\n".join(seen[1]["running"])
    assert "gcs_server" in running and "dashboard.py" in running
    assert "ray.util.client" not in running, "expected no server for Ray's client, which nobody connects by"


def test_metrics_are_refused_without_a_token(seen):
    assert seen[1]["metrics"] == []


def test_one_that_is_taken_again_and_again_is_an_error(seen):
    assert seen[99]["address"] is None and len(seen[99]["dashboards"]) == HEAD_STARTS
    assert seen[99]["error"].startswith("Ray head: expected it up within ") and "already" in seen[99]["error"]
    assert seen[99]["children"] == 0
