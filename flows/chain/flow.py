"""The flow `rlhf`: each stage of dvc.yaml as a Prefect task that runs it through DVC, unless DVC has said that it has nothing to do.

Prefect gives order, retries, states and artifacts; what is up to date is DVC's business alone, so no task is cached here.
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

from flows.chain.baselines import pin_baselines
from flows.chain.cache import run_checked
from flows.chain.console import tell, tell_end
from flows.chain.locks import only_flow
from flows.chain.overrides import Overrides
from flows.chain.pins import prepare_run
from flows.chain.stages import StageFailed, StageResult, check_chosen, read_stages, stage_environment, stage_order, stages_until, unchanged
from flows.chain.summary import read_metrics, report_line, report_of, stage_table, until_line
from flows.chain.updates import check_run
from flows.chain.worktree import commit_results, derive_name, run_within, slug
from flows.runs.record import GATE_REJECTED, REFUSED, note, recording
from flows.runs.results import input_paths, read_side, result_paths
from rlhf_core.config import ConfigError, FlowConfig, load_params, reordering_shown
from rlhf_core.progress import STATUS
from rlhf_core.report.sketch import sketch
from rlhf_core.report.texts import markdown_text


class LogThrottle:
    """Passes lines on to Prefect's log as at most one record in two seconds: 20,000 records would take 20 s to send."""

    INTERVAL = 2.0  # seconds
    LINES = 40  # of a record; the newest ones are kept

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
            head = [f"({self._dropped} earlier lines were printed to the terminal only)"] if self._dropped else []
            self._log.info("%s", "\n".join([*head, *self._lines]))
        self._lines, self._dropped, self._sent = [], 0, time.monotonic()


def _worth_a_retry(_task: Any, _run: TaskRun, state: State) -> bool:
    """A crash is; a stage that says no (data that fails validation, a rejected gate, wrong params) would say it again."""
    return isinstance(state.data, StageFailed) and not state.data.refused


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_worth_a_retry)
def run_through_dvc(stage: str, workspace: str, timeout: float, grace: float, *, skip: bool, force: bool = False) -> StageResult:
    """One stage, its output in the terminal and, throttled, in Prefect's log.

    Args:
        skip: DVC has said that it has nothing to do.
        force: it runs all the same.
    """
    throttle = LogThrottle(get_run_logger())

    def on_line(line: str) -> None:
        line = reordering_shown(line)
        tell(line)
        throttle.add(line)

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
) -> State | None:
    """From preference data to an aligned, evaluated policy.

    Args:
        overrides: dotted keys of params.yaml and their values, such as {"rl.algorithm": "grpo"}.
        run: the name of the run's worktree, runs/<run>. Without overrides and name, a run from the command line works in
            the current folder, and a deployment's run in a worktree named after the flow run.
        update: change the params of a run that exists, which is refused otherwise.
        force: a stage that runs again though nothing has changed; those after it run where its results are other ones.
        until: the stage after which the run ends.
    """
    log, root = get_run_logger(), Path.cwd()
    try:
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
    """Every stage in its order, up to `until`; a state where one failed.

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
    check_chosen(order, force=force, until=until)  # the worktree of a run may have other ones
    pin_baselines(root, workspace)
    log.info("Workspace: %s", workspace)
    results: list[StageResult] = []
    forced = once_in_run(workspace, force)
    skipped = list(itertools.takewhile(lambda stage: stage != forced, unchanged(workspace, order)))
    try:
        for stage in stages_until(order, until):
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
    """For the run's record. until: the stage that was to be its last, where others follow it."""
    if state is None:
        return {"outcome": "done", "message": "", "until": until}
    return {"outcome": state.name if state.name != "Failed" else "failed", "message": state.message or ""}


def once_in_run(workspace: Path, force: str | None) -> str | None:
    """The stage to force; None: none, or this flow run has done it, and is retried because of a later stage."""
    return None if force is None or _forced_note(workspace, force).exists() else force


def note_forced(workspace: Path, stage: str) -> None:
    path = _forced_note(workspace, stage)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _forced_note(workspace: Path, stage: str) -> Path:
    return workspace / "scratch" / "forced" / f"{runtime.flow_run.id}-{stage}"


def _name(root: Path, overrides: dict[str, Any], run: str | None) -> str | None:
    """Of the worktree to work in; None: the current folder. See the flow."""
    check_run(root, run, overrides)
    if run is None and runtime.deployment.id is not None:
        # The name alone is not unique: Prefect draws it from a few thousand.
        return f"{slug(runtime.flow_run.name)}-{runtime.flow_run.id[:4]}"
    return derive_name(root, overrides, []) if run is None and overrides else run


def run_with_retries(stage: str, workspace: Path, config: FlowConfig, *, skip: bool = False, force: bool = False) -> StageResult:
    note(workspace, stage=stage.rpartition(":")[2])  # of a round, without its pipeline
    task = run_through_dvc.with_options(name=stage, task_run_name=stage, retries=config.retries, retry_delay_seconds=config.retry_delay)
    return task(stage, str(workspace), config.stage_timeout, config.stop_grace, skip=skip, force=force)


def is_gate(stage: str) -> bool:
    """Stages named gate_* write `needed`, `passed` and `message` into their metrics, and exit with an error when needed and not passed."""
    return stage.startswith("gate_")


def publish_gate(workspace: Path, stage: str) -> None:
    verdict = read_metrics(workspace, stage) if is_gate(stage) else None
    if verdict is not None:
        title = "passed" if verdict["passed"] else "rejected" if verdict["needed"] else "not needed"
        create_markdown_artifact(
            f"# {stage}: {title}\n\n{markdown_text(verdict['message'])}", key=stage.replace("_", "-"), description=f"Gate {title}"
        )


def end_state(workspace: Path, failure: StageFailed) -> State:
    """The state in which a run with a failed stage ends. A rejected gate has one of its own, so that it can be seen and acted on."""
    verdict = read_metrics(workspace, failure.stage) if is_gate(failure.stage) and failure.refused else None
    if verdict is not None and verdict["passed"] is False:
        return State(type=StateType.FAILED, name=GATE_REJECTED, message=reordering_shown(verdict["message"]))
    return State(type=StateType.FAILED, name="Failed", message=reordering_shown(str(failure)))


def write_stopped_report(workspace: Path, failure: StageFailed, log: logging.Logger | logging.LoggerAdapter) -> None:
    """The page of a chain that ended early, by the command of stage report. That it can't be made must not hide why the chain failed."""
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
    """One picture of the curves, the score against KL and the reliability, of the stages that this run has reached."""
    with suppress(ConfigError):  # a run that failed at its start has left nothing
        side = read_side(workspace, ".")
        metrics, curves = ({s: v for s, v in tree.items() if s in reached} for tree in (side.results.metrics, side.curves))
        picture = sketch(metrics, curves)
        if picture is not None:
            url = f"data:image/svg+xml;base64,{base64.b64encode(picture.encode()).decode()}"
            create_image_artifact(url, key="figures", description="The figures of this run; the report has them with hover")


def _finish(workspace: Path, order: list[str], results: list[StageResult], failed: str | None = None, until: str | None = None) -> None:
    """Table, report and, in a run's worktree, the commit of what the run has shown."""
    last = report_line(workspace, failed) if until is None or failed is not None else until_line(until, workspace)
    tell(f"\n{stage_table(workspace, order, results, failed)}\n\n{last}")
    create_markdown_artifact(
        stage_table(workspace, order, results, failed, style="github"), key="stages", description="The stages of this run"
    )
    publish_figures(workspace, {*(result.stage for result in results), failed})
    page = report_of(workspace, failed)
    if page is not None and (failed is not None or until is None):  # else it is an earlier run's
        create_link_artifact(page.resolve().as_uri(), link_text=page.name, key="report", description=str(page))
    if (workspace / ".git").is_file():
        # Of a stopped run too: dvc.lock has the stages that ended well, and a reward model that its gate rejected may be registered.
        message = f"Results of run {workspace.name}" + (f", stopped at {failed}" if failed else f", up to {until}" if until else "")
        commit_results(workspace, message, result_paths(workspace), input_paths(workspace))
