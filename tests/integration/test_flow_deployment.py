"""A deployment's run through a real Prefect server and worker, as `make server` starts them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from small_workspace import (
    ORDER,
    assert_resumed,
    dvc_process,
    flow_runs,
    git,
    make_workspace,
    outcomes,
    processes_in,
    serving,
    training_has_begun,
    wait_until,
)

from flows.lost_runs import end_lost_runs

STEPS = 80


@pytest.fixture
def served(tmp_path):
    """(workspace, prefect): a project with its server and worker, and Prefect's command line against them."""
    workspace = make_workspace(tmp_path / "project")
    with serving(workspace, tmp_path / "server.log") as prefect:
        yield workspace, prefect


def wait_for_state(prefect: Any, expected: str, seconds: float) -> dict:
    until = time.monotonic() + seconds
    while True:
        (run,) = flow_runs(prefect, "full-pipeline")
        if run["state"]["name"] == expected:
            return run
        assert time.monotonic() < until, f"expected state {expected}, got {run['state']['name']}: {run['state']['message']}"
        time.sleep(0.3)


@pytest.mark.timeout(420)
def test_a_deployments_run_refused_started_killed_and_retried(served):
    workspace, prefect = served
    for wrong in ({"rl.algoritm": "grpo"}, {"rl.algorithm": "sarsa"}, {"sft.steps": "many"}):
        refused = prefect("deployment", "run", "rlhf/full-pipeline", "--params", json.dumps({"overrides": wrong}))
        assert refused.returncode != 0 and next(iter(wrong)) in refused.stdout + refused.stderr
    assert flow_runs(prefect, "full-pipeline") == []

    asked = prefect("deployment", "run", "rlhf/full-pipeline", "--params", json.dumps({"overrides": {"sft.steps": STEPS}}))
    assert asked.returncode == 0, asked.stderr
    wait_until(lambda: (workspace / "runs").exists() and any((workspace / "runs").glob("[!.]*")), 90, "a worktree")
    (worktree,) = (workspace / "runs").glob("[!.]*")
    wait_until(training_has_begun(worktree), 60, "training")
    os.kill(dvc_process(worktree).ppid(), signal.SIGKILL)  # the flow's process
    crashed = wait_for_state(prefect, "Crashed", 60)
    wait_until(lambda: not processes_in(worktree), 15, "the end of DVC and the stage")

    retried = prefect("flow-run", "retry", crashed["id"])
    assert retried.returncode == 0, retried.stdout + retried.stderr
    completed = wait_for_state(prefect, "Completed", 120)
    assert (completed["id"], completed["run_count"]) == (crashed["id"], 2)
    assert worktree.name == f"{completed['name']}-{completed['id'][:4]}"
    assert list((workspace / "runs").glob("[!.]*")) == [worktree]
    assert_resumed(worktree, STEPS, processes=2)
    assert git(worktree, "status", "--porcelain") == "" and (worktree / "dvc.lock").exists()
    printed = (workspace.parent / "server.log").read_text()
    assert outcomes(printed) == {**dict.fromkeys(ORDER, "ran"), "prepare_data": "cached"}
    assert_only_lost_runs_are_ended(workspace, prefect, completed)


def assert_only_lost_runs_are_ended(workspace: Path, prefect: Any, completed: dict) -> None:
    """What `make server` does when it starts, to a run whose process is gone, one whose process is there and one that is done."""
    path = f"deployments/{completed['deployment_id']}/create_flow_run"
    lost, living = (prefect.ask(path, state={"type": "RUNNING"}) for _ in range(2))
    with subprocess.Popen(["sleep", "600"], env={"PREFECT__FLOW_RUN_ID": living["id"], "PATH": os.defpath}) as process:
        secret = (workspace / ".prefect/auth").read_text().strip()
        assert end_lost_runs(prefect.url, secret) == [lost["name"]] and end_lost_runs(prefect.url, secret) == []
        process.kill()
    states = {run["id"]: run["state"]["name"] for run in flow_runs(prefect, "full-pipeline")}
    assert states == {lost["id"]: "Crashed", living["id"]: "Running", completed["id"]: "Completed"}
