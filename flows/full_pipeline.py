"""The whole chain from the command line: python -m flows.full_pipeline [--set key=value] [--params recipe] [--run name] [--force stage]
[--until stage].

Invalid params are refused, and an up-to-date chain is reported, before the slow import of Prefect.
Exit codes: 0 done, 1 a stage failed, 2 params or workspace refused, 3 a gate rejected the model, 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any

from flows.chain.command_line import check_given_server, run_flow
from flows.chain.locks import only_flow
from flows.chain.overrides import check
from flows.chain.pins import prepare_run
from flows.chain.stages import StageResult, check_chosen, stage_order, stages_until, up_to_date
from flows.chain.summary import report_line, stage_table, until_line
from flows.chain.updates import check_run
from flows.chain.worktree import derive_name
from flows.runs import record
from rlhf_core.config import ConfigError, parse_assignment, with_recipes

FAILED, REFUSED, GATE_REJECTED, INTERRUPTED = 1, 2, 3, 130


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.full_pipeline", description="Run the chain of dvc.yaml from data to report.")
    parser.add_argument(
        "--set",
        dest="assignments",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of params.yaml, e.g. rl.algorithm=grpo",
    )
    parser.add_argument(
        "--params",
        dest="recipes",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="apply a recipe to params.yaml, e.g. recipes/gsm8k.yaml",
    )
    parser.add_argument(
        "--run", metavar="NAME", help="work in the worktree runs/NAME; with overrides and without a name, one is derived from them"
    )
    parser.add_argument("--update", action="store_true", help="change the params of a run that exists, which is refused otherwise")
    parser.add_argument("--force", metavar="STAGE", help="run this stage even if it is up to date, then the stages that its results change")
    parser.add_argument("--until", metavar="STAGE", help="end after this stage")
    return parser.parse_args(arguments)


def choose(root: Path, arguments: argparse.Namespace) -> tuple[dict[str, Any], str | None]:
    """The overrides, checked, and the name of the worktree to work in; None: the current folder.

    Raises:
        ConfigError: before anything is written or started.
    """
    overrides = with_recipes(arguments.recipes, dict(map(parse_assignment, arguments.assignments)))
    name = arguments.run
    if name is None and overrides:
        check(root / "params.yaml", overrides)
        name = derive_name(root, overrides, arguments.recipes)
    check_run(root, name, overrides)
    check_chosen(stage_order(root), force=arguments.force, until=arguments.until)
    return overrides, name


def run(root: Path, overrides: dict[str, Any], name: str | None, options: argparse.Namespace) -> int:
    """The flow, under a Prefect server. Imports Prefect."""

    def load() -> Any:
        from flows.chain.flow import rlhf

        return rlhf

    state = run_flow(root, load, overrides, name, options.update, options.force, options.until)
    if state.is_completed():
        return 0
    print(f"\n{state.name}: {state.message}", file=sys.stderr)
    return {record.GATE_REJECTED: GATE_REJECTED, record.REFUSED: REFUSED}.get(state.name, FAILED)


def main(arguments: list[str] | None = None) -> int:
    show_own_log()
    root, options = Path.cwd(), parse_arguments(arguments)
    try:
        check_given_server()
        overrides, name = choose(root, options)
        with only_flow(root, name):
            stages = stages_until(stage_order(root), options.until)
            workspace = prepare_run(root, name, overrides, update=options.update, stages=stages)
            order = stage_order(workspace)
            check_chosen(order, force=options.force, until=options.until)  # a run's worktree may have other stages
            wanted = stages_until(order, options.until)
            if options.force is None and up_to_date(workspace, *(wanted if options.until else ())):
                all_done = wanted == order or up_to_date(workspace, *order)  # otherwise later results are outdated
                record.note(workspace, outcome="done", message="", until=None if all_done else wanted[-1])
                last = report_line(workspace) if wanted == order else until_line(wanted[-1], workspace)
                print(f"{stage_table(workspace, order, [StageResult(s, 'cached', 0.0) for s in wanted])}\n\n{last}")
                return 0
            return run(root, overrides, name, options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


def show_own_log() -> None:
    """Show the log of this pipeline only: Prefect has its own handlers, and the root logger would show every HTTP request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    own = logging.getLogger("rlhf")
    own.addHandler(handler)
    own.setLevel(logging.INFO)


if __name__ == "__main__":
    sys.exit(main())
