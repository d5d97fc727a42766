"""A Ray head of our own, started for real, while somebody else takes the port that was free."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

from rlhf_core.engines.ports import free_ports
from rlhf_core.engines.ray.cluster import HEAD_STARTS

pytestmark = [pytest.mark.timeout(300), pytest.mark.long]


def elsewhere(temporary: Path) -> dict[str, str]:
    """A user's environment that leads elsewhere: a dead proxy, also for this machine, another cluster, another repository."""
    (nobody,) = free_ports(1)
    proxy = f"http://127.0.0.1:{nobody}"
    own = {key: value for key, value in os.environ.items() if key.lower() != "no_proxy"}
    return own | {
        **{"PYTHONPATH": str(ROOT), "TMPDIR": str(temporary), "GIT_DIR": "/nowhere", "PYTHONSTARTUP": "/nowhere", "LC_ALL": "C"},
        **{"http_proxy": proxy, "HTTPS_PROXY": proxy, "all_proxy": proxy},
        **{"RAY_ADDRESS": f"127.0.0.1:{nobody}", "RAY_API_SERVER_ADDRESS": proxy, "RAY_NAMESPACE": "other"},
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[int, dict]:
    """What a start saw whose dashboard's port was taken so many times. Ray notices after seconds, so both start at once. The first one has
    the environment of `elsewhere`.
    """
    probe = str(Path(__file__).with_name("ray_head_probe.py"))
    folder = tmp_path_factory.mktemp("a long path of the temporary folder, in which no socket can be opened") / ("x" * 60)
    folder.mkdir()
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environments = {1: elsewhere(folder), 99: {**os.environ, "PYTHONPATH": str(ROOT)}}
    probes = {times: subprocess.Popen([sys.executable, probe, str(times)], env=env, **how) for times, env in environments.items()}
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


def test_a_job_runs_on_its_own_head_whatever_proxy_cluster_or_temporary_folder_the_environment_names(seen):
    assert seen[1]["job"].splitlines()[-1] == f"head 127.0.0.1:{seen[1]['ports'][-1]}"
    assert seen[1]["left"] == []


def test_metrics_are_refused_without_a_token(seen):
    assert seen[1]["metrics"] == []


def test_one_that_is_taken_again_and_again_is_an_error(seen):
    assert seen[99]["address"] is None and len(seen[99]["dashboards"]) == HEAD_STARTS
    assert seen[99]["error"].startswith("Ray head: expected it up within ") and "already" in seen[99]["error"]
    assert seen[99]["children"] == 0
