"""Stage report: write all measurements of the chain into one HTML file that opens offline.

    python -m tasks.report                                                  the stage: reports/report.html, for a whole chain
    python -m tasks.report --stopped-at gate_reward [--because MESSAGE]     reports/stopped.html, for one that ended there

The page of a stopped chain is no output of DVC; the flow or the user makes it. The next whole report deletes it.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_core.config import ConfigError, load_params
from rlhf_core.files import replace_text
from rlhf_core.paths import REPORT, STOPPED_REPORT, TIMINGS
from rlhf_core.report.files import FILES, check_recorded_params, read_inputs
from rlhf_core.report.inputs import Stopped, read_processes, read_times
from rlhf_core.report.page import render, render_times
from rlhf_core.stage.run import Stage, stage_arguments


def main() -> None:
    parser = stage_arguments(__doc__)
    parser.add_argument("--stopped-at", choices=list(FILES), metavar="STAGE", help="page of a chain that ended at this stage")
    parser.add_argument("--because", default="", metavar="MESSAGE", help="of the stage, for the page")
    arguments = parser.parse_args()
    if arguments.stopped_at is not None:
        return write_stopped(arguments.stopped_at, arguments.because)
    with Stage("report", resumable=False) as stage:
        if "DVC_STAGE" in os.environ:  # which has run the stages before this one
            check_recorded_params()
        replace_text(REPORT, render(read_inputs(stage.params, stage.fingerprint)))
        STOPPED_REPORT.unlink(missing_ok=True)
        times = read_times(Path())
        processes = read_processes(Path(), times, stage.params.alignment.method)
        replace_text(TIMINGS / "time.html", render_times(stage.params.report.title, times, processes))


def write_stopped(stage: str, because: str) -> None:
    """Write the page of a chain that ended early, from results up to `stage`, since later files are an earlier run's."""
    order = list(FILES)
    states = {name: "done" if i < order.index(stage) else "not reached" for i, name in enumerate(order)} | {stage: "stopped here"}
    try:
        params = load_params()
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    reached = order[: order.index(stage) + 1]
    replace_text(STOPPED_REPORT, render(read_inputs(params, "", Stopped(stage, because, states), reached=reached)))


if __name__ == "__main__":
    main()
