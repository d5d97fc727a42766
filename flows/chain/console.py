"""What runs show on a terminal: under `make server`, where several share one, each line behind its flow run's name; and a verdict (a
rejected gate, refused params, a stage that says why it failed) without a traceback, which only a crash has.
"""

from __future__ import annotations

import logging
import os

from prefect.exceptions import FailedRun
from prefect.logging.formatters import PrefectFormatter

from flows.chain.stages import StageFailed
from rlhf_core.progress import STATUS

_FLOW_RUN_ID = "PREFECT__FLOW_RUN_ID"  # in the environment of a process that a worker has started for a flow run
_names: dict[str, str] = {}  # id of this process's flow run -> its name, once known


def tell(text: str) -> None:
    """Print, for whoever looks at the terminal. To be called within a flow run."""
    if _FLOW_RUN_ID in os.environ:
        from prefect import runtime  # Prefect itself imports this module, before it has that one

        _names.setdefault(os.environ[_FLOW_RUN_ID], runtime.flow_run.name)
    STATUS.tell(_named(text, _own_name()))


def tell_end(name: str | None, message: str | None) -> None:
    """The state that a flow has ended in, where a worker runs it; a command line says so itself."""
    if _FLOW_RUN_ID in os.environ:
        tell(f"{name}: {message}")


def _own_name() -> str | None:
    """Of the flow run that a worker has started this process for; None: a command line's process, or the worker's."""
    run = os.environ.get(_FLOW_RUN_ID)
    return _names.get(run, run[:8]) if run else None


def _named(text: str, name: str | None) -> str:
    return text if name is None else "\n".join(f"{name} | {line}".rstrip() for line in text.split("\n"))


class RunFormatter(PrefectFormatter):
    """Prefect's, with the run's name before each line under `make server`, and no traceback of a stage that says why it failed."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(_error(record), StageFailed):
            record = logging.makeLogRecord({**record.__dict__, "exc_info": None, "exc_text": None})
        name = getattr(record, "flow_run_name", None)
        if name and (run := os.environ.get(_FLOW_RUN_ID)):
            _names[run] = name
        served = _FLOW_RUN_ID in os.environ or record.name.startswith("prefect.flow_runs.")  # of the worker about a run: .runner, .worker
        return _named(super().format(record), (name or _own_name()) if served else None)


class NotTold(logging.Filter):
    """Leaves out what is on the terminal already: the exception that Prefect makes of a state in which a flow has ended by itself, and
    lines of ours, where they have a handler of their own.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        ours = record.name.split(".")[0] == "rlhf" and bool(logging.getLogger("rlhf").handlers)
        return not ours and not isinstance(_error(record), FailedRun)


def _error(record: logging.LogRecord) -> BaseException | None:
    return record.exc_info[1] if isinstance(record.exc_info, tuple) else None
