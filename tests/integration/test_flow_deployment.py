"""Runs of deployments through a real Prefect server and worker, as `make server` starts them: the chain's, and a promotion that waits for
a person's approval.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.error
from pathlib import Path
from typing import Any

import psutil
import pytest
from registry_tags import write_tag

sys.path.insert(0, str(Path(__file__).parent))
from registry_project import candidate, write_stages
from small_workspace import (
    ORDER,
    SERVER_SECONDS,
    ask_server,
    assert_resumed,
    command_line,
    dvc_process,
    environment,
    flow_runs,
    git,
    make_workspace,
    outcomes,
    processes_in,
    serving,
    training_has_begun,
    wait_until,
)

from flows.registry import versions
from flows.registry.state import read_registry
from flows.runs.liveness import crash_orphaned_runs
from flows.server import WORK_POOL, delete_former_deployments

pytestmark = [pytest.mark.timeout(420), pytest.mark.long]
STEPS = 80
NAME, PROMOTE = "reward-model", "promote-reward-model"


def states_on_disk(workspace: Path) -> dict[str, str]:
    """State of each flow run in the server's database, read without a server."""
    with sqlite3.connect(f"file:{workspace}/.prefect/prefect.db?mode=ro", uri=True) as database:
        return dict(database.execute("select id, state_name from flow_run"))


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """(workspace, prefect): a project with its server and worker, and Prefect's command line against them."""
    folder = tmp_path_factory.mktemp("served")
    workspace = make_workspace(folder / "project")
    with serving(workspace, folder / "server.log") as prefect:
        yield workspace, prefect


def wait_for_state(prefect: Any, expected: str, seconds: float) -> dict:
    until = time.monotonic() + seconds
    while True:
        (run,) = flow_runs(prefect, "full-pipeline")
        if run["state"]["name"] == expected:
            return run
        assert time.monotonic() < until, f"expected state {expected}, got {run['state']['name']}: {run['state']['message']}"
        time.sleep(0.3)


def test_a_deployments_run_refused_started_killed_and_retried(served):
    workspace, prefect = served
    for wrong in ({"rl.algoritm": "grpo"}, {"rl.algorithm": "sarsa"}, {"sft.steps": "many"}):
        refused = prefect("deployment", "run", "rlhf/full-pipeline", "--params", json.dumps({"overrides": wrong}))
        assert refused.returncode != 0 and next(iter(wrong)) in refused.stdout + refused.stderr
    assert flow_runs(prefect, "full-pipeline") == []

    created = prefect("deployment", "run", "rlhf/full-pipeline", "--params", json.dumps({"overrides": {"sft.steps": STEPS}}))
    assert created.returncode == 0, created.stderr
    wait_until(lambda: (workspace / "runs").exists() and any((workspace / "runs").glob("[!.]*")), 90, "a worktree")
    (worktree,) = (workspace / "runs").glob("[!.]*")
    wait_until(training_has_begun(worktree), 60, "training")
    os.kill(dvc_process(worktree).ppid(), signal.SIGKILL)  # the flow's process
    crashed = wait_for_state(prefect, "Crashed", 180)
    wait_until(lambda: not processes_in(worktree), 15, "the end of DVC and the stage")

    retried = prefect("flow-run", "retry", crashed["id"])
    assert retried.returncode == 0, retried.stdout + retried.stderr
    completed = wait_for_state(prefect, "Completed", 240)
    assert (completed["id"], completed["run_count"]) == (crashed["id"], 2)
    assert worktree.name == f"{completed['name']}-{completed['id'][:4]}"
    assert list((workspace / "runs").glob("[!.]*")) == [worktree]
    assert_resumed(worktree, STEPS, processes=2)
    assert git(worktree, "status", "--porcelain") == "" and (worktree / "dvc.lock").exists()
    printed = (workspace.parent / "server.log").read_text().replace(f"{completed['name']} | ", "")
    assert ": retry " not in printed  # it is the run that was retried
    assert outcomes(printed) == {**dict.fromkeys(ORDER, "ran"), "prepare_data": "cached"}
    assert_only_lost_runs_are_ended(workspace, prefect, completed)


def assert_only_lost_runs_are_ended(workspace: Path, prefect: Any, completed: dict) -> None:
    """What `make server` does when it starts, to a run whose process is gone, one whose process is there and one that is done."""
    path = f"deployments/{completed['deployment_id']}/create_flow_run"
    lost, living = (prefect.ask(path, state={"type": "RUNNING"}, idempotency_key=name) for name in ("lost", "living"))
    with subprocess.Popen(["sleep", "600"], env={"PREFECT__FLOW_RUN_ID": living["id"], "PATH": os.defpath}) as process:
        wait_until(lambda: "PREFECT__FLOW_RUN_ID" in psutil.Process(process.pid).environ(), 10, "the child's environment")
        secret = (workspace / ".prefect/auth").read_text().strip()
        assert crash_orphaned_runs(prefect.url, secret) == [lost["name"]] and crash_orphaned_runs(prefect.url, secret) == []
        process.kill()
    states = {run["id"]: run["state"]["name"] for run in flow_runs(prefect, "full-pipeline")}
    assert states == {lost["id"]: "Crashed", living["id"]: "Running", completed["id"]: "Completed"}


def test_deployments_with_former_names_are_deleted_and_others_kept(served):
    workspace, prefect = served
    (own,) = prefect.ask("deployments/filter", deployments={"name": {"any_": ["run-nightly-round"]}})
    for name, entrypoint in (("scheduled", own["entrypoint"]), ("policy", "mine.py:policy")):
        new = {"flow_id": own["flow_id"], "work_pool_name": WORK_POOL}
        prefect.ask("deployments/", name=name, entrypoint=entrypoint, **new)
    delete_former_deployments(prefect.url, (workspace / ".prefect/auth").read_text().strip())
    names = {deployment["name"] for deployment in prefect.ask("deployments/filter")}
    assert names == {"full-pipeline", "run-nightly-round", "promote-reward-model", "promote-policy", "policy"}


def answer(prefect: Any, run: str, **fields: object) -> str:
    """Resume a run with what a person filled in; the server's verdict on that."""
    until = time.monotonic() + SERVER_SECONDS
    while True:
        try:
            return prefect.ask(f"flow_runs/{run}/resume", run_input=fields)["status"]
        except urllib.error.HTTPError as error:  # 503: its database was busy, and nothing was done
            if error.code != 503 or time.monotonic() > until:
                raise
            time.sleep(1)


def test_a_promotion_waits_for_a_persons_decision(served):
    project, prefect = served
    own_stages = git(project, "rev-parse", "HEAD")
    write_stages(project)  # the gate of the other tests judges nothing
    candidate(project, "first", seed=1)
    candidate(project, "second", seed=2)
    git(project, "reset", "--quiet", "--hard", own_stages)
    assert versions.register(project, NAME, "first").version == "v1.0.0"

    def state(run: str) -> dict:
        (found,) = [r["state"] for r in flow_runs(prefect, PROMOTE) if r["id"] == run]
        return found

    def becomes(run: str, *states: str) -> dict:
        wait_until(lambda: state(run)["type"] in ("COMPLETED", "FAILED", "CRASHED", *states), 240, f"the end of run {run}")
        return state(run)

    for _ in range(3):  # at once, so that the worker starts them together
        created = prefect("deployment", "run", f"promote/{PROMOTE}")
        assert created.returncode == 0, created.stderr
    moved, refused, approved = (r["id"] for r in flow_runs(prefect, PROMOTE))
    assert {becomes(run, "PAUSED")["name"] for run in (moved, refused, approved)} == {"Suspended"}
    # One that was answered right away was lost once: Prefect started it again, and it had no folder and no end.
    wait_until(lambda: not any("prefect.engine" in command_line(p) for p in processes_in(project)), 180, "the end of their processes")
    versions.register(project, NAME, "second")  # newer than the version that waits for approval

    for password in (None, "rlhf:guessed"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            ask_server(prefect.url, "flow_runs/filter", password=password)
    v1, v2 = read_registry(project, NAME).versions.values()
    created = prefect.ask("artifacts/filter", artifacts={"key": {"any_": [f"promote-{NAME}"]}})[0]["description"]
    assert v1.md5 in created and v1.sha256 in created and v1.commit in created and "its gate: passed" in created
    before = git(project, "rev-parse", f"refs/tags/{NAME}@v1.0.0")
    write_tag(project, f"{NAME}@v1.0.0", v2.lineage, v2.commit)  # the name that was asked about, another model
    assert answer(prefect, moved, approve=True, by="Ben", reason="read forty samples") == "ACCEPT"
    end = becomes(moved)
    assert end["name"] == "AnotherModel", end
    assert f"expected the model that was approved, md5 {v1.md5}, got md5 {v2.md5}: its tag was replaced" in end["message"]
    git(project, "update-ref", f"refs/tags/{NAME}@v1.0.0", before)

    assert answer(prefect, refused) == "REJECT"  # nothing is accepted unasked
    assert answer(prefect, refused, approve=False, by="Ann", reason="too curt") == "ACCEPT"
    assert answer(prefect, approved, approve=True, by="Ben", reason="read forty samples") == "ACCEPT"
    end = becomes(refused)
    assert (end["name"], end["message"]) == ("NotApproved", "reward-model v1.0.0: stated by Ann: too curt")
    assert becomes(approved)["name"] == "Completed", state(approved)["message"]
    (event,) = read_registry(project, NAME).events
    assert (event.action, event.version, event.by, event.reason) == ("promote", "v1.0.0", "Ben", "read forty samples")


def test_the_console_names_each_runs_lines_and_has_no_traceback_of_a_verdict(served):
    workspace, prefect = served
    (deployment,) = prefect.ask("deployments/filter", deployments={"name": {"any_": ["full-pipeline"]}})
    path, log = f"deployments/{deployment['id']}/create_flow_run", workspace.parent / "server.log"
    wait_until(lambda: "started!" in log.read_text(), 60, "a worker")
    begins = len(log.read_text())
    wanted = {"GateRejected": {"gate.min_accuracy": 0.95}, "Refused": {"rl.minibatch_size": 100}}
    created = {
        name: prefect.ask(path, state={"type": "SCHEDULED"}, parameters={"overrides": overrides}, idempotency_key=name)
        for name, overrides in wanted.items()
    }

    def ended() -> bool:
        states = {run["id"]: run["state"]["name"] for run in flow_runs(prefect, "full-pipeline")}
        return {name: states[run["id"]] for name, run in created.items()} == {name: name for name in created}

    wait_until(ended, 180, "the ends of both runs", every=0.5)
    rejected, refused = (created[name]["name"] for name in wanted)

    def processes_ended() -> bool:
        return all(f"Process for flow run '{name}' exited" in log.read_text() for name in (rejected, refused))

    wait_until(processes_ended, 60, "the ends of both processes")
    lines = log.read_text()[begins:].splitlines()  # an earlier run's process may end among them
    assert not [line for line in lines if not re.match(r"[\w-]+-[\w-]+ \|", line)], "\n".join(lines)
    assert not [line for line in lines if "Traceback" in line or "FailedRun" in line], "\n".join(lines)
    assert f"{rejected} | GateRejected: accuracy 0.9 against 0.95" in lines
    assert any(line.startswith(f"{refused} |") and "expected a multiple of minibatch_size=100" in line for line in lines)
    assert len(lines) < 60


def test_runs_whose_processes_are_killed_with_the_worker_are_crashed_before_the_server_ends(tmp_path):
    """And a command line's run that is killed while the server lives, within seconds. Nothing may be Running until a next start."""
    workspace = make_workspace(tmp_path / "project")
    with pytest.raises(AssertionError, match="ended with code"), serving(workspace, tmp_path / "server.log") as prefect:  # it says so
        command = [sys.executable, "-m", "flows.full_pipeline", "--run", "typed", "--set", f"sft.steps={STEPS * 50}"]
        typed = subprocess.Popen(command, cwd=workspace, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        created = prefect("deployment", "run", "rlhf/full-pipeline", "--params", json.dumps({"overrides": {"sft.steps": STEPS * 50}}))
        assert created.returncode == 0, created.stderr
        wait_until(lambda: len([*(workspace / "runs").glob("[!.]*")]) == 2, 120, "two worktrees")
        (worktree,) = (path for path in (workspace / "runs").glob("[!.]*") if path.name != "typed")
        for folder in (workspace / "runs/typed", worktree):
            wait_until(training_has_begun(folder), 120, "training")
        runs = {bool(run["deployment_id"]): run["id"] for run in prefect.ask("flow_runs/filter")}
        typed.kill()
        typed.wait()
        wait_until(lambda: states_on_disk(workspace)[runs[False]] == "Crashed", 60, "the typed run's end", every=0.5)
        assert states_on_disk(workspace)[runs[True]] == "Running"
        worker = next(p for p in processes_in(workspace) if "worker" in command_line(p))
        flow = psutil.Process(dvc_process(worktree).ppid())
        for process in (worker, flow):
            process.kill()
        wait_until(lambda: not (workspace / ".prefect/server.json").exists(), 60, "the end of the server")
    assert states_on_disk(workspace) == {runs[False]: "Crashed", runs[True]: "Crashed"}
