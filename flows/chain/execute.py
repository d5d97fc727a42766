"""Runs the stages of a prepared run in order, and shows their results on Prefect's pages.

The function that runs one stage is an argument, and outside a flow run nothing is shown, so that this needs no server.
"""

from __future__ import annotations

import base64
import logging
import shlex
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from prefect import runtime
from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext

from flows.chain.console import tell, tell_end
from flows.chain.prepare import PreparedRun
from flows.chain.settings import warn_of_settings
from flows.chain.stages import StageFailed, StageResult, Stages, check_params, stage_environment
from flows.chain.summary import read_metrics, report_line, report_of, stage_table, until_line
from flows.chain.worktree import commit_results, run_within
from flows.runs.record import GATE_REJECTED, note, read_record, recording
from flows.runs.results import input_paths, read_side, result_paths
from flows.trackers.processes import tracked
from rlhf_core.config import ConfigError, reordering_shown
from rlhf_core.report.sketch import sketch
from rlhf_core.report.texts import markdown_text

RunStage = Callable[..., StageResult]  # (stage, *, skip: DVC reported that it is up to date, force: run it anyway)
Log = logging.Logger | logging.LoggerAdapter


def run_chain(run: PreparedRun, run_stage: RunStage, log: Log) -> State | None:
    """Run the stages of a prepared run in order, show and commit their results, and record the outcome.

    Returns:
        The final state if a stage failed, or None if all are done.
    Raises:
        ConfigError: the results can't be committed.
    """
    with tracked(run.workspace, run.params.tracking), recording(run.workspace):
        state = _run_stages(run, run_stage, log)
        note(run.workspace, **outcome_of(state, run.until))
    if state is not None:
        tell_end(state.name, state.message)
    return state


def _run_stages(run: PreparedRun, run_stage: RunStage, log: Log) -> State | None:
    log.info("Workspace: %s", run.workspace)
    warn_of_settings(run.workspace, run.params)
    run = replace(run, force=once_in_run(run.workspace, run.force))
    results: list[StageResult] = []
    try:
        for stage in run.wanted:
            check_params(run.workspace, stage, run.tree)
            note(run.workspace, stage=stage)
            results.append(run_stage(stage, skip=stage in run.skipped, force=stage == run.force))
            if stage == run.force:
                note_forced(run.workspace, stage)
            show_gate(run.workspace, run.stages, stage)
    except StageFailed as failure:
        show_gate(run.workspace, run.stages, failure.stage)
        if failure.stage != "report":
            write_stopped_report(run, failure, log)
        _finish(run, results, failed=failure.stage)
        return end_state(run.workspace, run.stages, failure)
    _finish(run, results)
    return None


def outcome_of(state: State | None, until: str | None = None) -> dict[str, str | None]:
    """Return the fields of the run's record for a final state (None: done). `until` is the last stage of the run, if others follow it."""
    if state is None:
        return {"outcome": "done", "message": "", "until": until}
    return {"outcome": state.name if state.name != "Failed" else "failed", "message": state.message or ""}


def once_in_run(workspace: Path, force: str | None) -> str | None:
    """Return the stage to force, or None if there is none or this flow run already ran it before a retry."""
    done = runtime.flow_run.id is not None and read_record(workspace).get("forced") == [runtime.flow_run.id, force]
    return None if done else force


def note_forced(workspace: Path, stage: str) -> None:
    """Record that this flow run has run the stage that it forces."""
    note(workspace, forced=[runtime.flow_run.id, stage])


def end_state(workspace: Path, stages: Stages, failure: StageFailed) -> State:
    """Return the final state of a run with a failed stage. A rejected gate has its own state, to which automations can react."""
    verdict = read_metrics(workspace, stages, failure.stage) if is_gate(failure.stage) and failure.refused else None
    if verdict is not None and verdict["passed"] is False:
        return State(type=StateType.FAILED, name=GATE_REJECTED, message=reordering_shown(verdict["message"]))
    return State(type=StateType.FAILED, name="Failed", message=reordering_shown(str(failure)))


def write_stopped_report(run: PreparedRun, failure: StageFailed, log: Log) -> None:
    """Write the page of a chain that ended early, with the report stage's command. An error here must not hide why the chain failed."""
    _, python, *module = shlex.split(run.stages["report"]["cmd"])
    command = [sys.executable if python == "python" else python, *module, "--stopped-at", failure.stage, "--because", str(failure)]
    try:
        done = run_within(run.params.flow.stage_timeout, command, run.workspace, stage_environment(run.workspace, "report"))
        problem = done.stderr.strip() if done.returncode else None
    except ConfigError as error:
        problem = str(error)
    if problem is not None:
        log.warning("The page of the stopped chain could not be made: %s", problem)


def _finish(run: PreparedRun, results: list[StageResult], failed: str | None = None) -> None:
    """Print the table of stages, show table, figures and report on Prefect's pages, and commit the results of a run's worktree."""
    until = run.until if failed is None else None
    last = report_line(run.workspace, failed) if until is None else until_line(until, run.workspace)
    tell(f"\n{stage_table(run.workspace, run.stages, results, failed)}\n\n{last}")
    show_text(stage_table(run.workspace, run.stages, results, failed, style="github"), key="stages", description="The stages of this run")
    show_figures(run.workspace, {*(result.stage for result in results), failed})
    page = report_of(run.workspace, failed)
    if page is not None and until is None:  # otherwise the report is an earlier run's
        show_file(page, key="report")
    if (run.workspace / ".git").is_file():
        # Also for a stopped run: dvc.lock has the finished stages, and a reward model rejected by the gate may be registered.
        message = f"Results of run {run.workspace.name}" + (f", stopped at {failed}" if failed else f", up to {until}" if until else "")
        commit_results(run.workspace, message, result_paths(run.workspace), input_paths(run.workspace))


def show_text(text: str, *, key: str, description: str) -> None:
    """Show a text in markdown."""
    if FlowRunContext.get() is not None:
        create_markdown_artifact(text, key=key, description=description)


def show_file(path: Path, *, key: str) -> None:
    """Show a link to a file."""
    if FlowRunContext.get() is not None:
        create_link_artifact(path.resolve().as_uri(), link_text=path.name, key=key, description=str(path))


def is_gate(stage: str) -> bool:
    """Return whether a stage is a gate: it writes `needed`, `passed` and `message` to its metrics, and fails if needed and not passed."""
    return stage.startswith("gate_")


def show_gate(workspace: Path, stages: Stages, stage: str) -> None:
    """Show a gate's verdict; do nothing for another stage."""
    verdict = read_metrics(workspace, stages, stage) if is_gate(stage) else None
    if verdict is not None:
        title = "passed" if verdict["passed"] else "rejected" if verdict["needed"] else "not needed"
        text = f"# {stage}: {title}\n\n{markdown_text(verdict['message'])}"
        show_text(text, key=stage.replace("_", "-"), description=f"Gate {title}")


def show_figures(workspace: Path, reached: set[str | None]) -> None:
    """Show one picture with the curves, score against KL and calibration of the stages that this run reached."""
    if FlowRunContext.get() is None:
        return
    with suppress(ConfigError):  # a run that failed at its start has no figures
        side = read_side(workspace, ".")
        metrics, curves = ({s: v for s, v in tree.items() if s in reached} for tree in (side.results.metrics, side.curves))
        picture = sketch(metrics, curves)
        if picture is not None:
            url = f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
            create_image_artifact(url, key="figures", description="The figures of this run; the report has interactive ones")
