"""The flow `rlhf`: each stage of dvc.yaml as a Prefect task that runs it through DVC, unless DVC reports that it is up to date.

Prefect provides order, retries, states and artifacts. Only DVC decides what is up to date, so Prefect caches no task.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prefect import Flow, flow, get_run_logger, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, StateType, TaskRun
from prefect.context import TaskRunContext

from flows.chain.cache import run_checked
from flows.chain.console import tell
from flows.chain.execute import run_chain
from flows.chain.overrides import Overrides
from flows.chain.prepare import PreparedRun, prepared
from flows.chain.stages import StageFailed, StageResult
from flows.chain.worktree import derive_name, slug
from flows.runs.record import REFUSED
from rlhf_core.config import ConfigError, FlowConfig, reordering_shown, with_recipes
from rlhf_core.progress import STATUS


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
    """Return whether to retry: crashes are retried; refusals (invalid data, a rejected gate, wrong params) would recur."""
    return isinstance(state.data, StageFailed) and not state.data.refused


@task(cache_policy=NO_CACHE, persist_result=False, retry_condition_fn=_worth_a_retry)
def run_through_dvc(stage: str, workspace: str, timeout: float, grace: float, *, skip: bool, force: bool = False) -> StageResult:
    """Run one stage with output on the terminal and, throttled, in Prefect's log.

    Args:
        skip: whether DVC reported that the stage is up to date.
        force: whether the stage runs although it is up to date.
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


def run_with_retries(stage: str, workspace: Path, config: FlowConfig, *, skip: bool = False, force: bool = False) -> StageResult:
    """Run a stage as a task of Prefect, and again after a crash. The arguments are those of `run_through_dvc`."""
    task = run_through_dvc.with_options(name=stage, task_run_name=stage, retries=config.retries, retry_delay_seconds=config.retry_delay)
    return task(stage, str(workspace), config.stage_timeout, config.stop_grace, skip=skip, force=force)


def refused_or(run: Callable[[], State | None]) -> State | None:
    """Return the final state of a flow run; a refusal has its own state."""
    try:
        return run()
    except ConfigError as error:
        get_run_logger().error("%s", error)
        return State(type=StateType.FAILED, name=REFUSED, message=str(error))


def prepared_flow(deployed: Flow, run: Callable[[], State | None]) -> Flow:
    """Return a flow with a deployment's name and parameters, for a run that the command line has prepared.

    Args:
        run: function that does the rest of the flow.
    """

    @flow(name=deployed.name, persist_result=False)
    @functools.wraps(deployed.fn)
    def flow_of_command_line(*_: Any, **__: Any) -> State | None:
        return refused_or(run)

    return flow_of_command_line


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

    def of_deployment() -> State | None:
        root, given = Path.cwd(), with_recipes(recipes, overrides)
        with prepared(root, _name(root, given, run), given, update=update, force=force, until=until) as ready:
            return run_prepared(ready)

    return refused_or(of_deployment)


def run_prepared(run: PreparedRun) -> State | None:
    """Run a prepared run's stages as tasks of the current flow run."""
    run_stage = functools.partial(run_with_retries, workspace=run.workspace, config=run.params.flow)
    return run_chain(run, run_stage, get_run_logger())


def _name(root: Path, overrides: dict[str, Any], run: str | None) -> str | None:
    """Return the name of the worktree to work in, or None for the current folder, as described for the flow."""
    if run is None and runtime.deployment.id is not None:
        # Prefect's name alone isn't unique: there are a few thousand.
        return f"{slug(runtime.flow_run.name)}-{runtime.flow_run.id[:4]}"
    return derive_name(root, overrides, []) if run is None and overrides else run
