"""Processes that the server of this machine is made of."""

from __future__ import annotations

import signal
import sys

from flows.server import start


def test_a_child_hears_sigint_even_where_we_ignore_it():
    """As in a shell's background job; Prefect's worker ends itself by that signal."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        child = start([sys.executable, "-c", "import signal; signal.raise_signal(signal.SIGINT)"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert child.wait(timeout=30) in (-signal.SIGINT, 130)  # Python ends itself by the signal after its traceback
