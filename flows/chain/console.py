"""Prints the terminal output of runs.

Under `make server` runs share a terminal, so each line starts with the flow run's name. Only a crash shows a traceback; a rejected gate,
refused params and a failed stage's reason are shown as messages.
"""

from __future__ import annotations

import logging
import os

from prefect.exceptions import FailedRun
from prefect.logging.formatters import PrefectFormatter

from flows.chain.stages import StageFailed
from rlhf_core.progress import STATUS

_FLOW_RUN_ID = "PREFECT__FLOW_RUN_ID"  # set in the environment of a process that a worker starts for a flow run
_names: dict[str, str] = {}  # id of this process's flow run -> its name, once known


def tell(text: str) -> None:
    """Print to the terminal. Call it within a flow run."""
    if _FLOW_RUN_ID in os.environ:
        from prefect import runtime  # imported here: Prefect imports this module before its own run context

        _names.setdefault(os.environ[_FLOW_RUN_ID], runtime.flow_run.name)
    STATUS.tell(_named(text, _own_name()))


def tell_end(name: str | None, message: str | None) -> None:
    """Print the final state of a flow run that a worker started. A command line prints it elsewhere."""
    if _FLOW_RUN_ID in os.environ:
        tell(f"{name}: {message}")


def _own_name() -> str | None:
    """Return the name of the flow run that a worker started this process for; None in a command line's process and in the worker itself."""
    run = os.environ.get(_FLOW_RUN_ID)
    return _names.get(run, run[:8]) if run else None


def _named(text: str, name: str | None) -> str:
    return text if name is None else "\n".join(f"{name} | {line}".rstrip() for line in text.split("\n"))


class RunFormatter(PrefectFormatter):
    """Prefect's formatter, with the run's name before each line under `make server` and without tracebacks of failed stages."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(_error(record), StageFailed):
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        name = getattr(record, "flow_run_name", None)
        if name and (run := os.environ.get(_FLOW_RUN_ID)):
            _names[run] = name
        served = _FLOW_RUN_ID in os.environ or record.name.startswith(
            "prefect.flow_runs."
        )  # the worker's messages about a run: .runner, .worker
        return _named(super().format(record), (name or _own_name()) if served else None)


class NotPrinted(logging.Filter):
    """Drops records that the terminal already shows.

    These are the exception that Prefect makes of a final state returned by the flow, and lines of this pipeline that another handler
    prints.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name.split(".")[0] == "rlhf" and bool(logging.getLogger("rlhf").handlers)
        return not ours and not isinstance(_error(record), FailedRun)


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if isinstance(record.exc_info, tuple) else None
