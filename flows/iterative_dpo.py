"""Runs rounds of iterative DPO: rlhf rounds run, or python -m flows.iterative_dpo.

Invalid params are refused before Prefect is imported. Exit codes: 0 done, with or without better policies; 1 a stage failed; 2 params or
workspace refused; 3 the gate rejected the reward model; 4 a round's data was refused; 130 and 143 stopped by a signal.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

from flows.chain.command_line import flow_command, given_overrides, run_flow
from flows.rounds.series import check_rounds, prepared_series
from rlhf_core.commands import NONE_GIVEN, Overrides, run_module


@flow_command
def start(*, rounds: int = 1, series: str = "iterative-dpo", given: Overrides = NONE_GIVEN, update: bool = False) -> int:
    """Prepare the series, import Prefect, run the flow, and return the exit code.

    Args:
        rounds: number of rounds; an interrupted one counts.
        series: worktree runs/SERIES, continued if it exists.
        update: allow changed params in a series without a round.
    """
    check_rounds(rounds)
    root, overrides = Path.cwd(), given_overrides(given)
    with prepared_series(root, series, overrides, update=update) as run:

        def load() -> Any:
            from flows.chain.flow import prepared_flow
            from flows.rounds.flow import iterative_dpo, run_prepared

            return prepared_flow(iterative_dpo, partial(run_prepared, run, rounds))

        return run_flow(root, load, overrides, rounds, series, update)


main = partial(run_module, "rounds run")

if __name__ == "__main__":
    sys.exit(main())
