"""A Ray head of our own, started for real, while somebody else takes the port that was free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

from rlhf_core.engines.ray_cluster import HEAD_STARTS

pytestmark = pytest.mark.timeout(300)


def start(times: int) -> dict:
    command = [sys.executable, str(Path(__file__).with_name("ray_head_probe.py")), str(times)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_port_that_was_taken_meanwhile_is_replaced():
    seen = start(1)
    taken, other = seen["dashboards"]
    assert seen["address"] == f"http://127.0.0.1:{other}" and taken != other
    assert seen["error"] == "" and seen["children"] == 0
    running = "\n".join(seen["running"])
    assert "gcs_server" in running and "dashboard.py" in running
    assert "ray.util.client" not in running, "expected no server for Ray's client, which nobody connects by"


def test_one_that_is_taken_again_and_again_is_an_error():
    seen = start(99)
    assert seen["address"] is None and len(seen["dashboards"]) == HEAD_STARTS
    assert seen["error"].startswith("Ray head: expected it up within ") and "already" in seen["error"]
    assert seen["children"] == 0
