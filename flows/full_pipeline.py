"""Runs the whole chain: rlhf run, or python -m flows.full_pipeline.

Invalid params are refused, and an up-to-date chain is reported, before the slow import of Prefect.
Exit codes: 0 done, 1 a stage failed, 2 params or workspace refused, 3 a gate rejected the model, 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from flows.chain.command_line import flow_command, given_overrides, run_flow
from flows.chain.overrides import check
from flows.chain.prepare import PreparedRun, prepared
from flows.chain.stages import StageResult
from flows.chain.summary import report_line, stage_table, until_line
from flows.chain.worktree import derive_name
from flows.runs.record import note
from rlhf_core.commands import NONE_GIVEN, Overrides, run_module


@flow_command
def start(
    *,
    given: Overrides = NONE_GIVEN,
    name: Annotated[str | None, Parameter("--run")] = None,
    update: bool = False,
    force: str | None = None,
    until: str | None = None,
) -> int:
    """Prepare the run, import Prefect and run the flow unless it has nothing to do, and return the exit code.

    Args:
        name: work in the worktree runs/RUN; with overrides and without a name, one is derived from them.
        update: change the params of a run that exists, which is refused otherwise.
        force: run this stage even if it is up to date, then the stages that its results change.
        until: end after this stage.
    """
    root, overrides = Path.cwd(), given_overrides(given)
    if name is None and overrides:
        check(root / "params.yaml", overrides)
        name = derive_name(root, overrides, given.recipes)
    with prepared(root, name, overrides, update=update, force=force, until=until) as run:
        if not run.has_work:
            show_up_to_date(run)
            return 0

        def load() -> Any:
            from flows.chain.flow import prepared_flow, rlhf, run_prepared

            return prepared_flow(rlhf, partial(run_prepared, run))

        return run_flow(root, load, overrides, name, update, force, until)


def show_up_to_date(run: PreparedRun) -> None:
    """Record and print that a run has nothing to do."""
    outdated = len(run.up_to_date) < len(run.stages)  # results of stages after `until`
    note(run.workspace, outcome="done", message="", until=run.until if outdated else None)
    table = stage_table(run.workspace, run.stages, [StageResult(stage, "cached", 0.0) for stage in run.wanted])
    print(f"{table}\n\n{report_line(run.workspace) if run.until is None else until_line(run.until, run.workspace)}")


main = partial(run_module, "run")

if __name__ == "__main__":
    sys.exit(main())
