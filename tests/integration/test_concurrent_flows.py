"""Flows, and DVC by hand, at the same time in one project: each run ends in its own results, and who comes second is told whom it met."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT, environment, make_workspace, outcomes, training_has_begun, wait_until

from flows.stages import run_stage, stage_environment

pytestmark = pytest.mark.timeout(240)
STEPS, OTHER_STEPS = 200, 240  # of 50 ms


def begin_flow(workspace: Path, *arguments: str) -> subprocess.Popen[str]:
    """With a Prefect server of its own."""
    command = [sys.executable, "-m", "flows.full_pipeline", *arguments]
    return subprocess.Popen(
        command, cwd=workspace, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )


def begin_dvc(workspace: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "dvc", "repro", *arguments]
    env = {**stage_environment(workspace), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=workspace, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_two_runs_at_once_end_in_their_own_results_and_what_meets_them_is_refused(tmp_path):
    workspace = make_workspace(tmp_path / "project", steps=STEPS, laid_out=False)  # of two servers at once one lays it out
    first = begin_flow(workspace)
    second = begin_flow(workspace, "--run", "other", "--set", f"sft.steps={OTHER_STEPS}")
    try:
        wait_until(training_has_begun(workspace), 90, "training of the first run")
        by_hand, again = begin_dvc(workspace), begin_flow(workspace)
        same_run = begin_flow(workspace, "--run", "other", "--set", "sft.steps=7")
        said, _ = by_hand.communicate(timeout=60)
        assert by_hand.returncode != 0 and "is busy, it is being blocked by" in said and "repro --single-item train_sft" in said
        assert "Running stage" not in said
        for refused, subject, met in ((again, "this folder", first), (same_run, "run other", second)):
            said, _ = refused.communicate(timeout=60)
            message = f"{subject}: expected no other flow at work on it, got one, process {met.pid}; wait for it or stop it"
            assert refused.returncode == 2 and message in said, said
        for flow in (first, second):
            said, _ = flow.communicate(timeout=120)
            assert flow.returncode == 0 and outcomes(said)["train_sft"] == "ran", said  # of the rest one may restore what the other made
    finally:
        first.kill()
        second.kill()
    assert (workspace / "models/sft/weights").read_text() == f"0 {STEPS}"
    assert (workspace / "runs/other/models/sft/weights").read_text() == f"0 {OTHER_STEPS}"


def test_a_flow_waits_for_a_stage_that_somebody_runs_by_hand(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    workspace = make_workspace(tmp_path / "project", steps=100)
    by_hand = begin_dvc(workspace, "train_sft")
    try:
        wait_until(training_has_begun(workspace), 60, "training")
        printed: list[str] = []
        result = run_stage("train_sft", workspace, timeout=90, grace=25, on_line=printed.append)
        assert by_hand.wait(30) == 0
    finally:
        by_hand.kill()
    assert result.outcome == "cached" and "train_sft: another DVC is at work in this folder; waiting for it" in printed
