"""A deployment's run through a real Prefect server and worker, as `make server` starts them."""

from __future__ import annotations

import json
import os
import signal
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
