"""Runs a flow from the command line: with a server, a liveness file, and a final state in Prefect even after a signal."""

from __future__ import annotations

import os
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import FrameType
from typing import Any

from flows.runs import record
from flows.runs.liveness import liveness_tag
from flows.server import use_home, use_server
from rlhf_core.commands import INTERRUPTED, REFUSED, Overrides, show_own_log
from rlhf_core.config import ConfigError, parse_assignment, shown, with_recipes
from rlhf_core.process import configure_process

SERVER_SECONDS = 10.0
FAILED, GATE_REJECTED, ROUND_REFUSED = 1, 3, 4  # exit codes
EXIT_CODES = {record.REFUSED: REFUSED, record.GATE_REJECTED: GATE_REJECTED, record.ROUND_REFUSED: ROUND_REFUSED}  # of final states


def given_overrides(given: Overrides) -> dict[str, Any]:
    """Return the overrides of the recipes, each laid over those before it, and of --set, which wins over all."""
    return with_recipes(given.recipes, dict(map(parse_assignment, given.assignments)))


def flow_command(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command of a flow with refusals printed, and a signal's exit code."""

    @wraps(command)
    def run(*arguments: Any, **options: Any) -> int:
        show_own_log()
        try:
            check_given_server()
            return command(*arguments, **options)
        except ConfigError as error:
            print(error, file=sys.stderr)
            return REFUSED
        except KeyboardInterrupt:
            return INTERRUPTED

    return run


def run_flow(root: Path, load: Callable[[], Any], *arguments: Any) -> int:
    """Run a flow under a Prefect server and return the exit code for its final state, which is printed if the flow failed.

    SIGTERM and SIGHUP end the run as Crashed, as SIGINT does, and then the process with 128 + the signal's number.

    Args:
        load: function that imports the flow, and Prefect with it, and returns the flow. arguments: arguments of the flow.
    """
    given = os.environ.get("PREFECT_API_URL")
    end_by_signals()
    with use_server(root):
        flow = load()
    from prefect import tags
    from prefect.exceptions import TerminationSignal

    try:
        with liveness_tag(use_home(root), given) as tag, tags(tag):
            state = flow(*arguments, return_state=True)
    except TerminationSignal as end:
        raise SystemExit(128 + end.signal) from None
    if state.is_completed():
        return 0
    print(f"\n{state.name}: {state.message}", file=sys.stderr)
    return EXIT_CODES.get(state.name, FAILED)


def check_given_server() -> None:
    """Check that something listens at PREFECT_API_URL. A server that answers late is waited for.

    Raises:
        ConfigError: nothing listens there.
    """
    url = os.environ.get("PREFECT_API_URL")
    if not url:
        return
    configure_process()
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=SERVER_SECONDS):
            return
    except (urllib.error.HTTPError, TimeoutError):
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if not isinstance(reason, TimeoutError | ssl.SSLError):  # Prefect has settings of its own for certificates
            raise ConfigError(
                f"PREFECT_API_URL: expected a Prefect server at {shown(url)}, got {shown(str(reason))}; start it, correct the address, or "
                "unset the variable, so that the run starts a server of its own"
            ) from error


def end_by_signals() -> None:
    """Make SIGTERM and SIGHUP raise an exception, unless they are ignored.

    While a flow runs Prefect installs its own handler, which restores this one and sends the signal again before it sets the run's state.
    With the default handler the process would end there and the run would stay Running.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, _end)


def _end(number: int, _: FrameType | None) -> None:
    if getattr(sys.exc_info()[1], "signal", None) == number:  # Prefect's TerminationSignal is already being raised
        return
    raise SystemExit(128 + number)
