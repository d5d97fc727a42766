"""Runs rounds of iterative DPO from the command line: python -m flows.iterative_dpo [--rounds 3] [--series NAME] [--set key=value].

Invalid params are refused before Prefect is imported. Exit codes: 0 done, with or without better policies; 1 a stage failed; 2 params or
workspace refused; 3 the gate rejected the reward model; 4 a round's data was refused; 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from flows.chain.command_line import add_override_arguments, exit_code_of, given_overrides, run_flow
from flows.rounds.series import check_rounds, prepared_series


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flows.iterative_dpo", description="Rounds of iterative DPO, one after the other.")
    parser.add_argument("--rounds", type=int, default=1, help="number of rounds; an interrupted one counts (default: %(default)s)")
    parser.add_argument(
        "--series",
        default="iterative-dpo",
        metavar="NAME",
        help="worktree runs/NAME, continued if it exists (default: %(default)s)",
    )
    add_override_arguments(parser)
    parser.add_argument("--update", action="store_true", help="allow changed params in a series without a round")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    return exit_code_of(lambda: start(Path.cwd(), options))


def start(root: Path, options: argparse.Namespace) -> int:
    """Prepare the series, import Prefect, run the flow, and return the exit code."""
    check_rounds(options.rounds)
    overrides = given_overrides(options)
    with prepared_series(root, options.series, overrides, update=options.update) as run:

        def load() -> Any:
            from flows.chain.flow import prepared_flow
            from flows.rounds.flow import iterative_dpo, run_prepared

            return prepared_flow(iterative_dpo, partial(run_prepared, run, options.rounds))

        return run_flow(root, load, overrides, options.rounds, options.series, options.update)


if __name__ == "__main__":
    sys.exit(main())
