"""Run a flow from the command line: with a server, a liveness file, and a final state in Prefect even after a signal."""

from __future__ import annotations

import os
import signal
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from flows.runs.liveness import liveness_tag
from flows.server import use_home, use_server
from rlhf_core.config import ConfigError, shown
from rlhf_core.process import configure_process

SERVER_SECONDS = 10.0


def run_flow(root: Path, load: Callable[[], Any], *arguments: Any) -> Any:
    """Run a flow and return its final state.

    SIGTERM and SIGHUP end the run as Crashed, as SIGINT does, and then the process with 128 + the signal's number.

    Args:
        load: imports the flow, and Prefect with it. arguments: of the flow.
    """
    given = os.environ.get("PREFECT_API_URL")
    end_by_signals()
    with use_server(root):
        flow = load()
    from prefect import tags
    from prefect.exceptions import TerminationSignal

    try:
        with liveness_tag(use_home(root), given) as tag, tags(tag):
            return flow(*arguments, return_state=True)
    except TerminationSignal as end:
        raise SystemExit(128 + end.signal) from None


def check_given_server() -> None:
    """
    Raises:
        ConfigError: nothing listens at PREFECT_API_URL. A server that answers late is waited for.
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
