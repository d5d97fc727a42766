"""A prepared run's stages in order, in this process: what is run, recorded and committed. No server and no DVC; git is the real one."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from own_project import commit, make_project
from prefect.logging import disable_run_logger

from flows.chain.execute import run_chain
from flows.chain.flow import prepared_flow, rlhf
from flows.chain.prepare import PreparedRun, prepare
from flows.chain.stages import StageFailed, StageResult
from flows.chain.worktree import git
from flows.runs.record import GATE_REJECTED, REFUSED, read_record
from rlhf_core.config import ConfigError, apply_overrides

LOG = logging.getLogger("rlhf.tests")
WORK = """
import json, pathlib, re, sys

stage, *options = sys.argv[1:]
for folder in ("metrics", "reports"):
    pathlib.Path(folder).mkdir(exist_ok=True)
if stage == "prepare_data":
    pathlib.Path("metrics/prepare_data.json").write_text(json.dumps({"rows": {"sft": {"train": 7}}}))
if stage == "gate_reward":
    least = float(re.search(r"min_accuracy: ([\\d.]+)", pathlib.Path("params.yaml").read_text())[1])
    verdict = {"needed": True, "passed": least < 0.9, "message": "accuracy 0.9", "accuracy": 0.9, "low": 0.9, "threshold": least}
    pathlib.Path("metrics/gate.json").write_text(json.dumps(verdict))
    sys.exit(not verdict["passed"])
if stage == "report":
    pathlib.Path("reports/stopped.html" if options else "reports/report.html").write_text(" ".join(options))
"""
CHAIN = """
stages:
  prepare_data:
    cmd: exec python work.py prepare_data
    metrics: [metrics/prepare_data.json: {cache: false}]
  gate_reward:
    cmd: exec python work.py gate_reward
    deps: [metrics/prepare_data.json]
    metrics: [metrics/gate.json: {cache: false}]
  report:
    cmd: exec python work.py report
    deps: [metrics/gate.json]
    outs: [reports/report.html]
"""
ORDER = ["prepare_data", "gate_reward", "report"]


@pytest.fixture
def project(tmp_path, monkeypatch) -> Path:
    folder = make_project(tmp_path / "project")
    (folder / "dvc.yaml").write_text(CHAIN)
    (folder / "work.py").write_text(WORK)
    commit(folder, "A short chain")
    monkeypatch.chdir(folder)
    return folder


class Stages:
    """Runs a stage's command, and keeps what was asked for: (stage, skip, force)."""

    def __init__(self, run: PreparedRun):
        self.run = run
        self.asked: list[tuple[str, bool, bool]] = []

    def __call__(self, stage: str, *, skip: bool, force: bool) -> StageResult:
        self.asked.append((stage, skip, force))
        if skip:
            return StageResult(stage, "cached", 0.0)
        command = [sys.executable, *self.run.stages[stage]["cmd"].split()[2:]]
        if subprocess.run(command, cwd=self.run.workspace, check=False).returncode:
            raise StageFailed(stage, f"{stage}: refused", refused=True)
        return StageResult(stage, "ran", 1.0)


def test_a_run_ends_after_until_and_then_goes_on_to_its_report(project, capsys):
    run = prepare(project, "one", {"seed": 7}, until="prepare_data")
    assert (run.wanted, run.has_work, run.params.seed) == (["prepare_data"], True, 7)
    assert run_chain(run, Stages(run), LOG) is None
    assert read_record(run.workspace)["outcome"] == "done" and read_record(run.workspace)["until"] == "prepare_data"
    assert git(run.workspace, "log", "-1", "--format=%s") == "Results of run one, up to prepare_data"
    whole = prepare(project, "one", {}, until="report")
    assert whole.until is None and run_chain(whole, Stages(whole), LOG) is None
    assert read_record(run.workspace)["until"] is None and read_record(run.workspace)["stage"] == "report"
    printed = capsys.readouterr().out
    assert "Ended after prepare_data" in printed and f"Report: {run.workspace}/reports/report.html" in printed
    assert git(run.workspace, "status", "--porcelain") == ""


def test_a_rejected_gate_stops_the_chain_with_a_page_and_its_own_state(project, capsys):
    run = prepare(project, "strict", {"gate.min_accuracy": 0.95})
    stages = Stages(run)
    state = run_chain(run, stages, LOG)
    assert (state.name, state.message) == (GATE_REJECTED, "accuracy 0.9")
    assert [stage for stage, *_ in stages.asked] == ORDER[:2] and "report        " in capsys.readouterr().out
    record = read_record(run.workspace)
    assert (record["outcome"], record["stage"], record["message"]) == (GATE_REJECTED, "gate_reward", "accuracy 0.9")
    assert (run.workspace / "reports/stopped.html").read_text() == "--stopped-at gate_reward --because gate_reward: refused"
    assert git(run.workspace, "log", "-1", "--format=%s") == "Results of run strict, stopped at gate_reward"


def test_stages_before_the_forced_one_are_skipped_if_they_are_up_to_date(project):
    run = replace(prepare(project, "one", {}), up_to_date=tuple(ORDER))
    assert not run.has_work and not replace(run, up_to_date=tuple(ORDER[:2]), until="gate_reward").has_work
    forced = replace(run, force="gate_reward")
    stages = Stages(forced)
    assert forced.has_work and run_chain(forced, stages, LOG) is None
    assert stages.asked == [("prepare_data", True, False), ("gate_reward", False, True), ("report", False, False)]


def test_params_edited_between_two_stages_stop_the_run(project):
    run = prepare(project, "one", {})

    def edits(stage: str, **how: bool) -> StageResult:
        apply_overrides(run.workspace / "params.yaml", {"seed": 8})
        return Stages(run)(stage, **how)

    state = run_chain(run, edits, LOG)
    assert state.name == "Failed" and state.message.startswith(
        "gate_reward: expected params.yaml as at the flow's start, got changes: seed: 0"
    )
    assert read_record(run.workspace)["outcome"] == "failed"


def test_a_refused_stage_changes_no_run_and_makes_none(project):
    run = prepare(project, "one", {"seed": 7})
    for name, update in (("one", True), ("two", False)):
        with pytest.raises(
            ConfigError, match="until: expected a stage, one of prepare_data, gate_reward, report, got gate; write gate_reward"
        ):
            prepare(project, name, {"seed": 8}, update=update, until="gate")
    assert prepare(project, "one", {}).params == run.params and not (project / "runs/two").exists()


def test_a_refusal_after_the_worktree_is_made_removes_a_new_one_and_is_recorded_in_an_old_one(project):
    run = prepare(project, "old", {})
    (project / "baselines.json").write_text("{}")
    (run.workspace / "baselines.json").write_text("{}")
    commit(project, "Baselines")
    git(project, "tag", "policy@v1.0.0")  # no lineage: the registry can't be read
    git(project, "tag", "policy#prod#1")
    for name in ("old", "new"):
        with pytest.raises(ConfigError, match="tag policy"):
            prepare(project, name, {})
    record = read_record(run.workspace)
    assert record["outcome"] == REFUSED and "tag policy" in record["message"] and not (project / "runs/new").exists()


def test_a_flow_of_the_command_line_has_the_parameters_of_the_deployments_and_its_own_run():
    def refuses() -> None:
        raise ConfigError("seed: expected another")

    flow = prepared_flow(rlhf, refuses)
    assert flow.name == rlhf.name and flow.parameters == rlhf.parameters
    with disable_run_logger():
        state = flow.fn({"seed": 7}, "one", False, None, None)
    assert (state.name, state.message) == (REFUSED, "seed: expected another")
