"""What of Prefect's log the terminal shows, and how. In processes of their own, as Prefect's logging belongs to the whole of one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import logging, os, sys
os.environ["PREFECT_LOGGING_SETTINGS_PATH"] = "flows/logging.yml"
from prefect.logging.configuration import setup_logging
from prefect.exceptions import FailedRun
from flows.chain.stages import StageFailed
setup_logging(incremental=False)
log = logging.getLogger("prefect.engine")
for error in (RuntimeError("no room"), StageFailed("gate", "not good enough", refused=True), FailedRun("rejected")):
    try:
        raise error
    except Exception:
        log.error("Ended by %s", type(error).__name__, exc_info=True)
"""


def shown(**extra: str) -> list[str]:
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**inherited, "PYTHONPATH": str(ROOT), **extra},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stderr.splitlines()


@pytest.mark.parametrize(("extra", "begin"), [({}, ""), ({"PREFECT__FLOW_RUN_ID": "1f2e3d4c-0000"}, "1f2e3d4c | ")])
def test_a_crash_keeps_its_traceback_and_a_verdict_has_none(extra, begin):
    lines = shown(**extra)
    assert all(line.startswith(begin) for line in lines)
    *crash, verdict = lines  # the state of a flow isn't there: the flow has said it itself
    assert "Ended by RuntimeError" in crash[0] and "Traceback" in crash[1] and crash[-1].endswith("RuntimeError: no room")
    assert verdict.endswith("Ended by StageFailed") and sum("Traceback" in line for line in lines) == 1
