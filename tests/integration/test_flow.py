"""The flow's mechanics on a small project: worktrees, retries, gate, signals and kills. Prefect, DVC and git are the real ones."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from flows.chain.stages import stage_environment
from flows.runs.liveness import crash_orphaned_command_lines, liveness_tag
from flows.runs.record import read_record

sys.path.insert(0, str(Path(__file__).parent))
from small_workspace import (
    ORDER,
    ROOT,
    ask_server,
    assert_resumed,
    dvc_process,
    environment,
    git,
    make_workspace,
    outcomes,
    processes_in,
    refuse_flow,
    run_flow,
    steps_done,
    training_has_begun,
    wait_until,
)

pytestmark = pytest.mark.timeout(400)
SLOW_STEPS = 140  # seven seconds of training: time to kill something in the middle on a busy machine too


def begin_flow(workspace: Path, url: str, **extra: str) -> subprocess.Popen:
    """The flow in the background, in a session of its own; its output is appended to <workspace>.log."""
    command = [sys.executable, "-m", "flows.full_pipeline"]
    with workspace.with_suffix(".log").open("a") as log:
        return subprocess.Popen(
            command,
            cwd=workspace,
            env=environment(PREFECT_API_URL=url, **extra),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def plain_environment(workspace: Path) -> dict[str, str]:
    """For DVC alone, with this checkout's code, wherever the installed one is."""
    return {**stage_environment(workspace), "PYTHONPATH": str(ROOT)}


@pytest.mark.long
def test_a_first_run_works_a_second_has_nothing_to_do_and_dvc_alone_does_the_same(tmp_path):
    workspace = make_workspace(tmp_path / "project")
    first = run_flow(workspace)  # with a server of its own
    assert first.returncode == 0, first.stderr
    assert outcomes(first.stdout) == dict.fromkeys(ORDER, "ran")
    assert "held-out loss 0.333" in first.stdout and "sft 10" in first.stdout
    assert f"Report: {workspace / 'reports/report.html'}" in first.stdout
    assert "Error" not in first.stderr and processes_in(workspace) == []

    started = time.monotonic()
    second = run_flow(workspace, PREFECT_HOME="/proc/nowhere")  # a server could not even be started
    assert second.returncode == 0, second.stderr
    assert outcomes(second.stdout) == dict.fromkeys(ORDER, "cached")
    assert time.monotonic() - started < 20

    by_dvc = make_workspace(tmp_path / "dvc")
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=by_dvc, env=plain_environment(by_dvc), check=True)
    assert (workspace / "dvc.lock").read_text() == (by_dvc / "dvc.lock").read_text()


@pytest.mark.long
def test_overrides_run_in_a_worktree_that_shares_the_run_cache_and_is_found_again(tmp_path, server):
    workspace = make_workspace(tmp_path / "project")
    subprocess.run([sys.executable, "-m", "dvc", "repro", "--quiet"], cwd=workspace, env=plain_environment(workspace), check=True)
    before = (workspace / "params.yaml").read_text()
    recipe = tmp_path / "milder.yaml"
    recipe.write_text("gate:\n  min_accuracy: 0.5\n")
    arguments = ("--params", str(recipe), "--set", "gate.min_accuracy=0.8")

    changed = run_flow(workspace, *arguments, PREFECT_API_URL=server)
    assert changed.returncode == 0, changed.stderr
    assert outcomes(changed.stdout) == {"prepare_data": "restored", "train_sft": "restored", "gate_reward": "ran", "report": "ran"}
    assert "needs 0.800" in changed.stdout  # --set wins over the recipe
    (worktree,) = (workspace / "runs").glob("[!.]*")
    assert re.fullmatch(r"milder-[0-9a-f]{6}", worktree.name)
    assert git(worktree, "branch", "--show-current") == f"run/{worktree.name}"
    assert git(worktree, "status", "--porcelain") == ""
    assert {"dvc.lock", "metrics/gate.json", "params.yaml"} <= set(git(worktree, "ls-files").splitlines())
    assert (workspace / "params.yaml").read_text() == before

    refused = run_flow(workspace, *arguments, PREFECT_API_URL="http://127.0.0.1:9/api")  # nobody answers there
    assert refused.returncode == 2 and "PREFECT_API_URL: expected a Prefect server at http://127.0.0.1:9/api" in refused.stderr
    again = run_flow(workspace, *arguments)
    assert outcomes(again.stdout) == dict.fromkeys(ORDER, "cached"), again.stderr
    assert list((workspace / "runs").glob("[!.]*")) == [worktree]


@pytest.fixture(scope="module")
def untouched(tmp_path_factory) -> Path:
    """A project in which nothing is ever started."""
    return make_workspace(tmp_path_factory.mktemp("refused") / "project", laid_out=False)


# One message of each source: an override, a file, a name; tests/unit/config has all of them.
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "rl.algoritm=grpo"], "override rl.algoritm: expected a key of params.yaml, got 'algoritm'"),
        (["--params", "absent.yaml"], "absent.yaml: expected a readable parameter file, got No such file"),
        (["--run", "../out"], "run name: expected at most 80 letters"),
        (["--run", "policy"], "run name: expected another than reward-model or policy"),
    ],
)
def test_wrong_params_are_refused_before_anything_starts(untouched, arguments, message):
    refused = refuse_flow(untouched, *arguments)
    assert refused.returncode == 2
    assert message in refused.stderr and "Traceback" not in refused.stderr
    assert not (untouched / ".prefect").exists() and not (untouched / "runs").exists()


@pytest.mark.long
def test_a_cluster_that_is_not_there_is_refused_before_a_stage_runs(tmp_path, server):
    workspace = make_workspace(tmp_path / "project")
    params = workspace / "params.yaml"
    tree = YAML(typ="safe", pure=True).load(params.read_text())
    tree["sft"]["ranks"], tree["cluster"]["address"] = 2, "ADDRESS"
    with params.open("w") as file:
        YAML(typ="safe", pure=True).dump(tree, file)
    params.write_text(params.read_text().replace("ADDRESS", '"http://127.0.0.1:9"'))  # nobody listens; DVC needs quotes around a colon
    refused = run_flow(workspace, PREFECT_API_URL=server)
    assert refused.returncode == 2, refused.stderr
    assert "Refused: cluster.address: expected Ray's dashboard at http://127.0.0.1:9, got no connection" in refused.stderr
    assert "Traceback" not in refused.stdout + refused.stderr and "Running stage" not in refused.stdout
    assert read_record(workspace)["outcome"] == "Refused"
    until = run_flow(workspace, "--until", "prepare_data", PREFECT_API_URL=server)  # which needs no cluster
    assert until.returncode == 0 and outcomes(until.stdout)["prepare_data"] == "ran", until.stderr


@pytest.mark.long
def test_without_retries_a_crash_ends_the_run(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", retries=0)
    marker = tmp_path / "crash"
    marker.touch()
    done = run_flow(workspace, PREFECT_API_URL=server, CRASH_ONCE=str(marker))
    assert done.returncode == 1
    assert "Failed: train_sft: exited with 70" in done.stderr
    assert outcomes(done.stdout) == {"prepare_data": "ran", "train_sft": "failed", "gate_reward": "not reached", "report": "not reached"}


@pytest.mark.long
def test_a_retry_after_a_crash_is_announced_between_both_tries(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", retries=2)
    marker = tmp_path / "crash"
    marker.touch()
    done = run_flow(workspace, PREFECT_API_URL=server, CRASH_ONCE=str(marker))
    assert done.returncode == 0, done.stderr
    told = [line for line in done.stdout.splitlines() if line.startswith(("train_sft: retry", "Running stage 'train_sft'"))]
    announced = "train_sft: retry 1 of 2 (flow.retries); the stage resumes from its checkpoint, if it has one"
    assert told == ["Running stage 'train_sft':", announced, "Running stage 'train_sft':"]


def test_a_rejected_gate_has_a_state_of_its_own_and_no_retry(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", retries=3)
    hostile = ("--set", 'gate.override=" ![x](https://host/p.png) \u202e"')
    done = run_flow(workspace, "--set", "gate.min_accuracy=0.95", *hostile, "--run", "strict", PREFECT_API_URL=server)
    assert done.returncode == 3
    assert done.stderr.rstrip().endswith("GateRejected: accuracy 0.9 against 0.95 ![x](https://host/p.png) ⟨U+202E⟩")
    assert "\u202e" not in done.stdout + done.stderr
    assert outcomes(done.stdout)["gate_reward"] == "failed" and outcomes(done.stdout)["report"] == "not reached"
    (run,) = ask_server(server, "flow_runs/filter", flow_runs={"state": {"name": {"any_": ["GateRejected"]}}})
    assert run["state"]["type"] == "FAILED" and run["state"]["message"] == "accuracy 0.9 against 0.95 ![x](https://host/p.png) ⟨U+202E⟩"
    tasks = ask_server(server, "task_runs/filter", task_runs={"flow_run_id": {"any_": [run["id"]]}})
    assert {t["name"]: t["run_count"] for t in tasks} == {"prepare_data": 1, "train_sft": 1, "gate_reward": 1}
    artifacts = ask_server(server, "artifacts/filter", artifacts={"flow_run_id": {"any_": [run["id"]]}})
    assert {a["key"] for a in artifacts} == {"gate-reward", "stages", "report"}
    assert any(r"accuracy 0.9 against 0.95 !\[x\](https:\//host/p.png) ⟨U+202E⟩" in a["data"] for a in artifacts)
    assert not any("\u202e" in a["data"] for a in artifacts)
    page = workspace / "runs/strict/reports/stopped.html"
    assert page.read_text() == "--stopped-at gate_reward --because gate_reward: accuracy 0.9 against 0.95 ![x](https://host/p.png) ⟨U+202E⟩"
    assert not page.with_name("report.html").exists() and f"{page.relative_to(workspace)} (stopped at gate_reward)" in done.stdout
    worktree = workspace / "runs/strict"  # a rejected model may be registered, for which all must be committed
    assert git(worktree, "status", "--porcelain") == ""
    assert git(worktree, "log", "-1", "--format=%s") == "Results of run strict, stopped at gate_reward"
    assert {"dvc.lock", "metrics/gate.json"} <= set(git(worktree, "ls-files").splitlines())


@pytest.mark.long
def test_crash_and_kills_of_dvc_and_stage_are_retried_from_the_checkpoint(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", steps=SLOW_STEPS, retries=3)
    marker = tmp_path / "crash"
    marker.touch()
    flow = begin_flow(workspace, server, CRASH_ONCE=str(marker))
    wait_until(training_has_begun(workspace), 60, "training after the crash")
    assert not marker.exists()
    dvc_process(workspace).kill()
    seen = steps_done(workspace)
    wait_until(lambda: steps_done(workspace)[-1][0] != seen[0][0], 60, "another trainer")
    os.kill(steps_done(workspace)[-1][0], signal.SIGKILL)
    assert flow.wait(timeout=90) == 0, (tmp_path / "project.log").read_text()
    # SIGKILL can fall between a step and its checkpoint: that one step may be there twice.
    assert_resumed(workspace, SLOW_STEPS, processes=3, repeated=1)


@pytest.mark.long
def test_a_flow_that_is_stopped_or_killed_leaves_nothing_behind_and_is_resumed(tmp_path, server):
    workspace = make_workspace(tmp_path / "project", steps=SLOW_STEPS)
    earlier, states = {run["id"] for run in all_flow_runs(server)}, ["Crashed", "Crashed", "Crashed", "Running"]
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129), (signal.SIGKILL, -signal.SIGKILL)):
        before = len(steps_done(workspace))
        flow = begin_flow(workspace, server)
        wait_until(training_has_begun(workspace, before + 3), 60, "training")
        flow.send_signal(number)
        assert flow.wait(timeout=60) == code
        wait_until(lambda: not processes_in(workspace), 15, "the end of DVC and the stage")
        assert before + 3 <= len(steps_done(workspace)) < SLOW_STEPS
        assert read_record(workspace)["outcome"] == ("running" if number == signal.SIGKILL else "stopped")
    runs = [run for run in all_flow_runs(server) if run["id"] not in earlier]
    assert [run["state"]["name"] for run in runs] == states, (tmp_path / "project.log").read_text()
    assert "termination signal" in runs[1]["state"]["message"]

    last = run_flow(workspace, PREFECT_API_URL=server)
    assert last.returncode == 0, last.stderr
    assert f"Run {runs[3]['name']}: its process is gone; it is now Crashed" in last.stderr
    after = {run["id"]: run["state"] for run in all_flow_runs(server)}
    assert after[runs[3]["id"]]["name"] == "Crashed" and list(after.values())[-1]["name"] == "Completed"
    tasks = ask_server(server, "task_runs/filter", task_runs={"flow_run_id": {"any_": [runs[3]["id"]]}})
    assert {t["name"]: t["state"]["type"] for t in tasks} == {"prepare_data": "COMPLETED", "train_sft": "CRASHED"}
    assert not list((workspace / ".prefect/alive").iterdir())
    assert read_record(workspace)["outcome"] == "done"
    assert_resumed(workspace, SLOW_STEPS, processes=5)


def all_flow_runs(server: str) -> list[dict]:
    return ask_server(server, "flow_runs/filter", sort="START_TIME_ASC")


DIE = "import os, pathlib, sys; from flows.runs.liveness import liveness_tag; print(liveness_tag(pathlib.Path(sys.argv[1]), sys.argv[2]).__enter__(), flush=True); os._exit(9)"  # noqa: E501


def test_only_a_run_of_the_command_line_whose_process_is_gone_is_ended(tmp_path, server):
    def begin(tag: str) -> str:
        flow = ask_server(server, "flows/", name="rlhf")["id"]
        return ask_server(server, "flow_runs/", flow_id=flow, tags=[tag], state={"type": "RUNNING"})["id"]

    def dead(given_url: str) -> str:
        command = [sys.executable, "-c", DIE, str(tmp_path), given_url]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    lost, elsewhere, another = dead(server), dead(server), dead("http://127.0.0.1:9/api")
    sign = tmp_path / "alive" / f"{elsewhere}.json"  # PREFECT_HOME on a disk that machines share
    sign.write_text(json.dumps(json.loads(sign.read_text()) | {"host": "another", "boot": "another"}))
    with liveness_tag(tmp_path, server) as living:
        ids = {tag: begin(tag) for tag in (lost, elsewhere, another, living, "process:unknown")}
        (name,) = crash_orphaned_command_lines(tmp_path, server, None, server)
        assert crash_orphaned_command_lines(tmp_path, server, None, server) == []
    states = {run["id"]: (run["name"], run["state"]["name"]) for run in all_flow_runs(server)}
    assert states[ids.pop(lost)] == (name, "Crashed")
    assert {states[i][1] for i in ids.values()} == {"Running"}
    assert sorted(p.stem for p in (tmp_path / "alive").iterdir()) == sorted([elsewhere, another])
