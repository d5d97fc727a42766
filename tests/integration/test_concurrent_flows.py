"""Concurrent flows and DVC commands in one project: each run has its own results, and a second start names the process at work."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from small_workspace import ROOT, environment, make_workspace, outcomes, steps_done, training_has_begun, wait_until

from flows.chain.stages import run_stage, stage_environment

pytestmark = [pytest.mark.timeout(240), pytest.mark.long]
STEPS, OTHER_STEPS = 60, 72  # of 50 ms


def begin_flow(workspace: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start a flow with its own Prefect server."""
    command = [sys.executable, "-m", "flows.full_pipeline", *arguments]
    return subprocess.Popen(
        command, cwd=workspace, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def begin_dvc(workspace: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    env = {**stage_environment(workspace), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=workspace, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def halted_trainers(*workspaces: Path) -> list[psutil.Process]:
    """Suspend each workspace's trainer when it starts, so that slower processes meet it at work."""
    found: dict[Path, psutil.Process] = {}

    def all_halted() -> bool:
        for workspace in workspaces:
            if workspace not in found and training_has_begun(workspace)():
                found[workspace] = psutil.Process(steps_done(workspace)[-1][0])
                found[workspace].suspend()
        return len(found) == len(workspaces)

    wait_until(all_halted, 90, "training", every=0.05)
    return list(found.values())


def test_two_runs_at_once_end_in_their_own_results_and_what_meets_them_is_refused(tmp_path):
    workspace = make_workspace(tmp_path / "project", steps=STEPS, laid_out=False)  # one of two servers creates it
    first = begin_flow(workspace)
    second = begin_flow(workspace, "--run", "other", "--set", f"sft.steps={OTHER_STEPS}")
    trainers: list[psutil.Process] = []
    try:
        trainers += halted_trainers(workspace, workspace / "runs/other")
        by_hand, again = begin_dvc(workspace), begin_flow(workspace)
        same_run = begin_flow(workspace, "--run", "other", "--set", "sft.steps=7")
        output, _ = by_hand.communicate(timeout=60)
        assert by_hand.returncode != 0 and "is busy, it is being blocked by" in output and "repro --single-item train_sft" in output
        assert "Running stage" not in output
        for refused, subject, met in ((again, "this folder", first), (same_run, "run other", second)):
            output, _ = refused.communicate(timeout=60)
            message = f"{subject}: expected no other flow at work on it, got one, process {met.pid}; wait for it or stop it"
            assert refused.returncode == 2 and message in output, output
        for trainer in trainers:
            trainer.resume()
        for flow in (first, second):
            output, _ = flow.communicate(timeout=120)
            assert flow.returncode == 0 and outcomes(output)["train_sft"] == "ran", output  # one may restore the other's results
    finally:
        for process in (first, second, *trainers):
            with suppress(psutil.NoSuchProcess):
                process.kill()
    assert (workspace / "models/sft/weights").read_text() == f"0 {STEPS}"
    assert (workspace / "runs/other/models/sft/weights").read_text() == f"0 {OTHER_STEPS}"


def test_a_flow_waits_for_a_stage_that_somebody_runs_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workspace = make_workspace(tmp_path / "project", steps=STEPS)
    by_hand = begin_dvc(workspace, "train_sft")
    try:
        (trainer,) = halted_trainers(workspace)
        printed: list[str] = []

        def on_line(line: str) -> None:
            printed.append(line)
            if "waiting for it" in line:
                trainer.resume()

        result = run_stage("train_sft", workspace, timeout=90, grace=25, on_line=on_line)
        assert by_hand.wait(30) == 0
    finally:
        by_hand.kill()
    assert result.outcome == "cached" and "train_sft: another DVC is at work in this folder; waiting for it" in printed
