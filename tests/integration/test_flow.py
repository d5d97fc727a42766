"""The flow's mechanics on a small project: worktrees, retries, gate, signals and kills. Prefect, DVC and git are the real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flows.server import HOST, free_port, start, stop, wait_for

sys.path.insert(0, str(Path(__file__).parent))
from small_workspace import (
    ORDER,
    assert_resumed,
    dvc_process,
    environment,
    git,
    make_workspace,
    outcomes,
    processes_in,
    run_flow,
    steps_done,
    training_has_begun,
    wait_until,
)

pytestmark = pytest.mark.timeout(240)
SLOW_STEPS = 80  # four seconds of training: time to kill something in the middle


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """One Prefect server for all tests of this module; its address."""
    port = free_port()
    home = tmp_path_factory.mktemp("prefect")
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port), "--no-ui"]
    child = start(command, PREFECT_HOME=str(home), PREFECT_SERVER_LOGGING_LEVEL="ERROR", PREFECT_SERVER_ANALYTICS_ENABLED="false")
    url = f"http://{HOST}:{port}/api"
    try:
        wait_for(url, child)
        yield url
    finally:
        stop(child)


def ask(url: str, path: str, **body) -> list[dict]:
    request = urllib.request.Request(f"{url}/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def begin_flow(workspace: Path, url: str) -> subprocess.Popen:
    """The flow in the background, in a session of its own; its output goes to flow.log."""
    log = (workspace / ".." / f"{workspace.name}.log").open("w")
    return subprocess.Popen(
        [sys.executable, "-m", "flows.full_pipeline"],
        cwd=workspace,
        env=environment(PREFECT_API_URL=url),
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def test_a_second_run_does_nothing_and_needs_no_server(tmp_path):
    workspace = make_workspace(tmp_path / "project")
    first = run_flow(workspace)
    assert first.returncode == 0, first.stderr
    assert outcomes(first.stdout) == dict.fromkeys(ORDER, "ran")
    assert "held-out loss 0.333" in first.stdout and "sft 10" in first.stdout
    assert f"Report: {workspace / 'reports/report.html'}" in first.stdout
    assert processes_in(workspace) == []

    started = time.monotonic()
    second = run_flow(workspace, PREFECT_HOME="/proc/nowhere")  # a server could not even be started
    assert second.returncode == 0, second.stderr
    assert outcomes(second.stdout) == dict.fromkeys(ORDER, "cached")
    assert time.monotonic() - started < 10


def test_plain_dvc_does_the_same_work(tmp_path, server):
    by_flow, by_dvc = make_workspace(tmp_path / "flow"), make_workspace(tmp_path / "dvc")
    assert run_flow(by_flow, PREFECT_API_URL=server).returncode == 0
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=by_dvc, env=path_first(), check=True)
    assert (by_flow / "dvc.lock").read_text() == (by_dvc / "dvc.lock").read_text()


def path_first() -> dict[str, str]:
    return environment(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")


def test_an_override_runs_in_a_worktree_and_going_back_restores(tmp_path, server):
    workspace = make_workspace(tmp_path / "project")
    assert run_flow(workspace, PREFECT_API_URL=server).returncode == 0
    before = (workspace / "params.yaml").read_text()

    changed = run_flow(workspace, "--set", "gate.min_accuracy=0.8", "--run", "milder", PREFECT_API_URL=server)
    assert changed.returncode == 0, changed.stderr
    assert outcomes(changed.stdout) == {"prepare_data": "restored", "train_sft": "restored", "gate_reward": "ran", "report": "ran"}
    worktree = workspace / "runs/milder"
    assert git(worktree, "branch", "--show-current") == "run/milder"
    assert git(worktree, "status", "--porcelain") == ""
    assert {"dvc.lock", "metrics/gate.json", "params.yaml"} <= set(git(worktree, "ls-files").splitlines())
    assert (workspace / "params.yaml").read_text() == before
    assert git(workspace, "status", "--porcelain", "--untracked-files=no") == ""

    again = run_flow(workspace, "--set", "gate.min_accuracy=0.8", "--run", "milder", PREFECT_API_URL="http://127.0.0.1:9/api")
    assert outcomes(again.stdout) == dict.fromkeys(ORDER, "cached"), again.stderr


def test_the_same_overrides_find_their_worktree_again(tmp_path, server):
    workspace = make_workspace(tmp_path / "project")
    recipe = tmp_path / "quick.yaml"
    recipe.write_text("sft:\n  steps: 2\ngate:\n  min_accuracy: 0.5\n")
    for _ in range(2):
        done = run_flow(workspace, "--params", str(recipe), "--set", "sft.steps=1", PREFECT_API_URL=server)
        assert done.returncode == 0, done.stderr
    (worktree,) = (workspace / "runs").iterdir()
    assert re.fullmatch(r"quick-[0-9a-f]{6}", worktree.name)
    assert "held-out loss 1.000" in done.stdout  # --set wins over the recipe


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rl.algoritm=grpo"], "override rl.algoritm: expected a key of params.yaml, got 'algoritm'"),
        (["--set", "rl.algorithm=sarsa"], "override: rl.algorithm: expected 'ppo', 'grpo' or 'rloo', got 'sarsa'"),
        (["--set", "sft.steps=many"], "override: sft.steps: expected a valid integer, got 'many'"),
        (["--set", "rl.minibatch_size=100"], "samples_per_step: expected a multiple of minibatch_size=100, got 256"),
        (["--set", "sft.steps"], "--set sft.steps: expected key=value, got no ="),
        (["--params", "absent.yaml"], "absent.yaml: expected a readable parameter file, got No such file"),
        (["--run", "../out"], "run name: expected letters"),
    ],
)
def test_wrong_params_are_refused_before_anything_starts(tmp_path, arguments, message):
    workspace = make_workspace(tmp_path / "project")
    refused = run_flow(workspace, *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr and "Traceback" not in refused.stderr
    assert not (workspace / ".prefect").exists() and not (workspace / "runs").exists()


def test_a_crashed_stage_is_retried_once(tmp_path, server):
    workspace = make_workspace(tmp_path / "project")
    marker = tmp_path / "crash"
    marker.touch()
    done = run_flow(workspace, PREFECT_API_URL=server, CRASH_ONCE=str(marker))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("RuntimeError: the disk said no") == 1
    assert outcomes(done.stdout)["train_sft"] == "ran"


def test_without_retries_a_crash_ends_the_run(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", retries=0)
    marker = tmp_path / "crash"
    marker.touch()
    done = run_flow(workspace, PREFECT_API_URL=server, CRASH_ONCE=str(marker))
    assert done.returncode == 1
    assert "Failed: train_sft: exited with 70" in done.stderr
    assert outcomes(done.stdout) == {"prepare_data": "ran", "train_sft": "failed", "gate_reward": "not reached", "report": "not reached"}


def test_a_rejected_gate_has_a_state_of_its_own_and_no_retry(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", retries=3)
    done = run_flow(workspace, "--set", "gate.min_accuracy=0.95", "--run", "strict", PREFECT_API_URL=server)
    assert done.returncode == 3
    assert done.stderr.rstrip().endswith("GateRejected: accuracy 0.9 against 0.95")
    assert outcomes(done.stdout)["gate_reward"] == "failed" and outcomes(done.stdout)["report"] == "not reached"
    (run,) = ask(server, "flow_runs/filter", flow_runs={"state": {"name": {"any_": ["GateRejected"]}}})
    assert run["state"]["type"] == "FAILED" and run["state"]["message"] == "accuracy 0.9 against 0.95"
    tasks = ask(server, "task_runs/filter", task_runs={"flow_run_id": {"any_": [run["id"]]}})
    assert {t["name"]: t["run_count"] for t in tasks} == {"prepare_data": 1, "train_sft": 1, "gate_reward": 1}
    artifacts = ask(server, "artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    assert {a["key"] for a in artifacts} == {"gate-reward", "stages"}
    assert any("accuracy 0.9 against 0.95" in a["data"] for a in artifacts)


def test_a_stage_that_takes_too_long_is_stopped(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", steps=2000, retries=0)
    done = run_flow(workspace, "--set", "flow.stage_timeout=5", "--run", "hurry", PREFECT_API_URL=server)
    assert done.returncode == 1
    assert "train_sft: expected to end within flow.stage_timeout=5 s" in done.stderr
    assert processes_in(workspace) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_flow_that_is_stopped_leaves_nothing_behind_and_is_resumed(tmp_path, server, number):
    workspace = make_workspace(tmp_path / "project", steps=SLOW_STEPS)
    flow = begin_flow(workspace, server)
    wait_until(training_has_begun(workspace), 60, "training")
    flow.send_signal(number)
    assert flow.wait(timeout=60) != 0
    wait_until(lambda: not processes_in(workspace), 15, "the end of DVC and the stage")
    assert 3 <= len(steps_done(workspace)) < SLOW_STEPS

    again = run_flow(workspace, PREFECT_API_URL=server)
    assert again.returncode == 0, again.stderr
    assert_resumed(workspace, SLOW_STEPS)


def test_dvc_killed_alone_is_retried_without_a_second_trainer(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", steps=SLOW_STEPS)
    flow = begin_flow(workspace, server)
    wait_until(training_has_begun(workspace), 60, "training")
    dvc_process(workspace).kill()
    assert flow.wait(timeout=90) == 0, (tmp_path / "project.log").read_text()
    assert_resumed(workspace, SLOW_STEPS)


def test_the_stage_killed_alone_is_retried_from_its_checkpoint(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", steps=SLOW_STEPS)
    flow = begin_flow(workspace, server)
    wait_until(training_has_begun(workspace), 60, "training")
    os.kill(steps_done(workspace)[0][0], signal.SIGKILL)
    assert flow.wait(timeout=90) == 0, (tmp_path / "project.log").read_text()
    done = steps_done(workspace)
    # A kill can fall between a step and its checkpoint: that one step may be there twice, no other.
    assert sorted({step for _, step in done}) == list(range(SLOW_STEPS)) and len(done) <= SLOW_STEPS + 1
