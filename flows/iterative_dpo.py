"""Rounds of iterative DPO from the command line: python -m flows.iterative_dpo [--rounds 3] [--series NAME] [--set key=value].

Invalid params are refused before Prefect is imported. Exit codes: 0 done, with or without better policies; 1 a stage failed; 2 params or
workspace refused; 3 the gate rejected the reward model; 4 a round's data was refused; 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from flows.chain.command_line import check_given_server, run_flow
from flows.chain.updates import check_run
from flows.chain.user_files import check_user_files
from flows.full_pipeline import FAILED, GATE_REJECTED, INTERRUPTED, REFUSED, show_own_log
from flows.runs import record
from rlhf_core.config import ConfigError, parse_assignment, with_recipes

ROUND_REFUSED = 4


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.iterative_dpo", description="Rounds of iterative DPO, one after the other.")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds; an interrupted one counts (default: %(default)s)")
    parser.add_argument(
        "--series",
        default="iterative-dpo",
        metavar="NAME",
        help="worktree runs/NAME, continued if it exists (default: %(default)s)",
    )
    parser.add_argument("--set", dest="assignments", action="append", default=[], metavar="KEY=VALUE", help="override a key of params.yaml")
    parser.add_argument(
        "--params", dest="recipes", action="append", default=[], type=Path, metavar="FILE", help="apply a recipe to params.yaml"
    )
    parser.add_argument("--update", action="store_true", help="allow changed params in a series without a round")
    return parser.parse_args(arguments)


def run(root: Path, overrides: dict[str, Any], rounds: int, series: str, *, update: bool) -> int:
    """The flow, under a Prefect server. Imports Prefect."""

    def load() -> Any:
        from flows.rounds.flow import iterative_dpo

        return iterative_dpo

    state = run_flow(root, load, overrides, rounds, series, update)
    if state.is_completed():
        return 0
    print(f"\n{state.name}: {state.message}", file=sys.stderr)
    codes = {record.GATE_REJECTED: GATE_REJECTED, record.ROUND_REFUSED: ROUND_REFUSED, record.REFUSED: REFUSED}
    return codes.get(state.name, FAILED)


def main(arguments: list[str] | None = None) -> int:
    show_own_log()
    root, options = Path.cwd(), parse_arguments(arguments)
    try:
        check_given_server()
        overrides = with_recipes(options.recipes, dict(map(parse_assignment, options.assignments)))
        params = check_run(root, options.series, overrides, rounds=True)
        check_user_files(root, options.series, params, rounds=True)  # the flow checks too, but only after Prefect is imported
        return run(root, overrides, options.rounds, options.series, update=options.update)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
