"""The flow `rlhf`: each stage of dvc.yaml as a Prefect task that runs it through DVC, unless DVC reports that it is up to date.

Prefect provides order, retries, states and artifacts. Only DVC decides what is up to date, so Prefect caches no task.
"""

from __future__ import annotations

import base64
import itertools
import logging
import shlex
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, runtime, task
from prefect.artifacts import create_image_artifact, create_link_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import TaskRunContext

from flows.chain.baselines import pin_baselines
from flows.chain.cache import run_checked
from flows.chain.console import tell, tell_end
from flows.chain.locks import only_flow
from flows.chain.overrides import Overrides
from flows.chain.pins import prepare_run
from flows.chain.reach import check_cluster
from flows.chain.settings import point_out
from flows.chain.stages import (
    StageFailed,
    StageResult,
    check_chosen,
    check_params,
    read_stages,
    stage_environment,
    stage_order,
    stages_until,
    tracked_params,
    unchanged,
)
from flows.chain.summary import read_metrics, report_line, report_of, stage_table, until_line
from flows.chain.updates import check_run
from flows.chain.worktree import commit_results, derive_name, run_within, slug
from flows.runs.record import GATE_REJECTED, REFUSED, note, recording
from flows.runs.results import input_paths, read_side, result_paths
from rlhf_core.config import ConfigError, FlowConfig, load_params, reordering_shown, with_recipes
from rlhf_core.progress import STATUS
from rlhf_core.report.sketch import sketch
from rlhf_core.report.texts import markdown_text


class LogThrottle:
    """Sends lines to Prefect's log, at most one record in two seconds, since each record is a slow request."""

    INTERVAL = 2.0  # seconds
    LINES = 40  # per record; the newest ones are kept

    def __init__(self, log: logging.Logger | logging.LoggerAdapter):
        self._log = log
        self._lines: list[str] = []
        self._dropped = 0
        self._sent = time.monotonic()

    def add(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) > self.LINES:
            self._lines.pop(0)
            self._dropped += 1
        if time.monotonic() - self._sent > self.INTERVAL:
            self.flush()

    def flush(self) -> None:
        if self._lines:
            head = [f"({self._dropped} earlier lines are on the terminal only)"] if self._dropped else []
            self._log.info("%s", "\n".join([*head, *self._lines]))
        self._lines, self._dropped, self._sent = [], 0, time.monotonic()


def _worth_a_retry(_task: Any, _run: TaskRun, state: State) -> bool:
    """Whether to retry: crashes, but not refusals (invalid data, a rejected gate, wrong params), which would recur."""
    return isinstance(state.data, StageFailed) and not state.data.refused


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_worth_a_retry)
def run_through_dvc(stage: str, workspace: str, timeout: float, grace: float, *, skip: bool, force: bool = False) -> StageResult:
    """Run one stage, with output on the terminal and, throttled, in Prefect's log.

    Args:
        skip: DVC reported that the stage is up to date.
        force: run it anyway.
    """
    throttle = LogThrottle(get_run_logger())

    def on_line(line: str) -> None:
        line = reordering_shown(line)
        tell(line)
        throttle.add(line)

    if (run := TaskRunContext.get()) is not None and run.task_run.run_count > 1:
        retry = f"retry {run.task_run.run_count - 1} of {run.task.retries} (flow.retries)"
        on_line(f"{stage}: {retry}; the stage resumes from its checkpoint, if it has one")
    try:
        if skip:
            on_line(f"Stage '{stage}' didn't change, skipping")
            return StageResult(stage, "cached", 0.0)
        return run_checked(stage, Path(workspace), timeout=timeout, grace=grace, on_line=on_line, force=force)
    finally:
        STATUS.clear()
        throttle.flush()


@flow(name="rlhf", persist_result=False)
def rlhf(
    overrides: Overrides = {},  # noqa: B006 (Prefect shows the default in its form)
    run: str | None = None,
    update: bool = False,
    force: str | None = None,
    until: str | None = None,
    recipes: list[str] = [],  # noqa: B006
) -> State | None:
    """From preference data to an aligned, evaluated policy.

    Args:
        overrides: dotted keys of params.yaml and their values, such as {"rl.algorithm": "grpo"}.
        run: the name of the run's worktree, runs/<run>. Without overrides and name, a run from the command line works in
            the current folder, and a deployment's run in a worktree named after the flow run.
        update: change the params of a run that exists, which is refused otherwise.
        force: a stage to run even if it is up to date; later stages run if its results change.
        until: the stage after which the run ends.
        recipes: paths of recipes in the project's folder, each laid over those before it and over params.yaml; overrides win over all.
    """
    log, root = get_run_logger(), Path.cwd()
    try:
        overrides = with_recipes(recipes, overrides)
        name = _name(root, overrides, run)
        with only_flow(root, name):
            return _chain(root, overrides, name, log, update=update, force=force, until=until)
    except ConfigError as error:
        log.error("%s", error)
        return State(type=StateType.FAILED, name=REFUSED, message=str(error))


def _chain(
    root: Path,
    overrides: dict[str, Any],
    name: str | None,
    log: logging.Logger | logging.LoggerAdapter,
    *,
    update: bool,
    force: str | None,
    until: str | None,
) -> State | None:
    """Run the stages in order, up to `until`. Returns a state if one failed.

    Raises:
        ConfigError: params or workspace are refused.
    """
    check_chosen(stage_order(root), force=force, until=until)
    workspace = prepare_run(root, name, overrides, update=update)
    with recording(workspace):
        state = _stages(root, workspace, log, force=force, until=until)
        note(workspace, **outcome_of(state, None if until == stage_order(workspace)[-1] else until))
    if state is not None:
        tell_end(state.name, state.message)
    return state


def _stages(
    root: Path, workspace: Path, log: logging.Logger | logging.LoggerAdapter, *, force: str | None, until: str | None
) -> State | None:
    params = load_params(workspace / "params.yaml")
    order = stage_order(workspace)
    check_chosen(order, force=force, until=until)  # a run's worktree may have other stages
    pin_baselines(root, workspace)
    log.info("Workspace: %s", workspace)
    point_out(workspace, params)
    results: list[StageResult] = []
    forced = once_in_run(workspace, force)
    skipped = list(itertools.takewhile(lambda stage: stage != forced, unchanged(workspace, order)))
    check_cluster(root, params, [stage for stage in stages_until(order, until) if stage not in skipped])
    begun = tracked_params(workspace)
    try:
        for stage in stages_until(order, until):
            check_params(workspace, stage, begun)
            results.append(run_with_retries(stage, workspace, params.flow, skip=stage in skipped, force=stage == forced))
            if stage == forced:
                note_forced(workspace, stage)
            publish_gate(workspace, stage)
    except StageFailed as failure:
        publish_gate(workspace, failure.stage)
        if failure.stage != "report":
            write_stopped_report(workspace, failure, log)
        _finish(workspace, order, results, failed=failure.stage)
        return end_state(workspace, failure)
    _finish(workspace, order, results, until=None if until == order[-1] else until)
    return None


def outcome_of(state: State | None, until: str | None = None) -> dict[str, str | None]:
    """Write the run's record. until: the requested last stage, if others follow it."""
    if state is None:
        return {"outcome": "done", "message": "", "until": until}
    return {"outcome": state.name if state.name != "Failed" else "failed", "message": state.message or ""}


def once_in_run(workspace: Path, force: str | None) -> str | None:
    """The stage to force; None: none, or this flow run already ran it before a retry."""
    return None if force is None or _forced_note(workspace, force).exists() else force


def note_forced(workspace: Path, stage: str) -> None:
    path = _forced_note(workspace, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _forced_note(workspace: Path, stage: str) -> Path:
    return workspace / "scratch" / "forced" / f"{runtime.flow_run.id}-{stage}"


def _name(root: Path, overrides: dict[str, Any], run: str | None) -> str | None:
    """Name of the worktree to work in; None: the current folder. See the flow."""
    check_run(root, run, overrides)
    if run is None and runtime.deployment.id is not None:
        # Prefect's name alone isn't unique: there are a few thousand.
        return f"{slug(runtime.flow_run.name)}-{runtime.flow_run.id[:4]}"
    return derive_name(root, overrides, []) if run is None and overrides else run


def run_with_retries(stage: str, workspace: Path, config: FlowConfig, *, skip: bool = False, force: bool = False) -> StageResult:
    note(workspace, stage=stage.rpartition(":")[2])  # a round's stage, without its pipeline's file
    task = run_through_dvc.with_options(name=stage, task_run_name=stage, retries=config.retries, retry_delay_seconds=config.retry_delay)
    return task(stage, str(workspace), config.stage_timeout, config.stop_grace, skip=skip, force=force)


def is_gate(stage: str) -> bool:
    """Show a gate's verdict. A stage gate_* writes `needed`, `passed` and `message` to its metrics, and fails if needed and not passed."""
    return stage.startswith("gate_")


def publish_gate(workspace: Path, stage: str) -> None:
    verdict = read_metrics(workspace, stage) if is_gate(stage) else None
    if verdict is not None:
        title = "passed" if verdict["passed"] else "rejected" if verdict["needed"] else "not needed"
        create_markdown_artifact(
            f"# {stage}: {title}\n\n{markdown_text(verdict['message'])}", key=stage.replace("_", "-"), description=f"Gate {title}"
        )


def end_state(workspace: Path, failure: StageFailed) -> State:
    """Final state of a run with a failed stage. A rejected gate has its own state, which automations can react to."""
    verdict = read_metrics(workspace, failure.stage) if is_gate(failure.stage) and failure.refused else None
    if verdict is not None and verdict["passed"] is False:
        return State(type=StateType.FAILED, name=GATE_REJECTED, message=reordering_shown(verdict["message"]))
    return State(type=StateType.FAILED, name="Failed", message=reordering_shown(str(failure)))


def write_stopped_report(workspace: Path, failure: StageFailed, log: logging.Logger | logging.LoggerAdapter) -> None:
    """Make the page of a chain that ended early, with the report stage's command. An error here must not hide why the chain failed."""
    _, python, *module = shlex.split(read_stages(workspace)["report"]["cmd"])
    command = [sys.executable if python == "python" else python, *module, "--stopped-at", failure.stage, "--because", str(failure)]
    seconds = load_params(workspace / "params.yaml").flow.stage_timeout
    try:
        done = run_within(seconds, command, workspace, stage_environment(workspace, "report"))
        problem = done.stderr.strip() if done.returncode else None
    except ConfigError as error:
        problem = str(error)
    if problem is not None:
        log.warning("The page of the stopped chain could not be made: %s", problem)


def publish_figures(workspace: Path, reached: set[str | None]) -> None:
    """One picture with the curves, score against KL and calibration of the stages that this run reached."""
    with suppress(ConfigError):  # a run that failed at its start has no figures
        side = read_side(workspace, ".")
        metrics, curves = ({s: v for s, v in tree.items() if s in reached} for tree in (side.results.metrics, side.curves))
        picture = sketch(metrics, curves)
        if picture is not None:
            url = f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
            create_image_artifact(url, key="figures", description="The figures of this run; the report has interactive ones")


def _finish(workspace: Path, order: list[str], results: list[StageResult], failed: str | None = None, until: str | None = None) -> None:
    """Print the table, make the report and, in a run's worktree, commit the results."""
    last = report_line(workspace, failed) if until is None or failed is not None else until_line(until, workspace)
    tell(f"\n{stage_table(workspace, order, results, failed)}\n\n{last}")
    create_markdown_artifact(
        stage_table(workspace, order, results, failed, style="github"), key="stages", description="The stages of this run"
    )
    publish_figures(workspace, {*(result.stage for result in results), failed})
    page = report_of(workspace, failed)
    if page is not None and (failed is not None or until is None):  # otherwise the report is an earlier run's
        create_link_artifact(page.resolve().as_uri(), link_text=page.name, key="report", description=str(page))
    if (workspace / ".git").is_file():
        # Also for a stopped run: dvc.lock has the finished stages, and a reward model rejected by the gate may be registered.
        message = f"Results of run {workspace.name}" + (f", stopped at {failed}" if failed else f", up to {until}" if until else "")
        commit_results(workspace, message, result_paths(workspace), input_paths(workspace))
