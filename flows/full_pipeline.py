"""Runs the whole chain from the command line: python -m flows.full_pipeline [--set key=value] [--params recipe] [--run name] [--force
stage] [--until stage].

Invalid params are refused, and an up-to-date chain is reported, before the slow import of Prefect.
Exit codes: 0 done, 1 a stage failed, 2 params or workspace refused, 3 a gate rejected the model, 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flows.chain.command_line import add_override_arguments, exit_code_of, given_overrides, run_flow
from flows.chain.overrides import check
from flows.chain.prepare import PreparedRun, prepared
from flows.chain.stages import StageResult
from flows.chain.summary import report_line, stage_table, until_line
from flows.chain.worktree import derive_name
from flows.runs.record import note


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.full_pipeline", description="Run the chain of dvc.yaml from data to report.")
    add_override_arguments(parser)
    parser.add_argument(
        "--run", metavar="NAME", help="work in the worktree runs/NAME; with overrides and without a name, one is derived from them"
    )
    parser.add_argument("--update", action="store_true", help="change the params of a run that exists, which is refused otherwise")
    parser.add_argument("--force", metavar="STAGE", help="run this stage even if it is up to date, then the stages that its results change")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return exit_code_of(lambda: start(Path.cwd(), options))


def start(root: Path, options: argparse.Namespace) -> int:
    """Prepare the run, import Prefect and run the flow unless it has nothing to do, and return the exit code."""
    overrides = given_overrides(options)
    name = options.run
    if name is None and overrides:
        check(root / "params.yaml", overrides)
        name = derive_name(root, overrides, options.recipes)
    with prepared(root, name, overrides, update=options.update, force=options.force, until=options.until) as run:
        if not run.has_work:
            show_up_to_date(run)
            return 0

        def load() -> Any:
            from flows.chain.flow import prepared_flow, rlhf, run_prepared

            return prepared_flow(rlhf, partial(run_prepared, run))

        return run_flow(root, load, overrides, name, options.update, options.force, options.until)


def show_up_to_date(run: PreparedRun) -> None:
    """Record and print that a run has nothing to do."""
    outdated = len(run.up_to_date) < len(run.stages)  # results of stages after `until`
    note(run.workspace, outcome="done", message="", until=run.until if outdated else None)
    table = stage_table(run.workspace, run.stages, [StageResult(stage, "cached", 0.0) for stage in run.wanted])
    print(f"{table}\n\n{report_line(run.workspace) if run.until is None else until_line(run.until, run.workspace)}")


if __name__ == "__main__":
    sys.exit(main())
