"""The record of a run: a small file in its worktree with the run's outcome, written by the flow and read without Prefect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_core.config import ConfigError
from rlhf_core.files import replace_text

RECORD = Path(".dvc/tmp/run.json")
# Names of Prefect states of type FAILED for refusals.
GATE_REJECTED, ROUND_REFUSED, REFUSED = "GateRejected", "RoundRefused", "Refused"


def note(workspace: Path, **fields: Any) -> None:
    """Add fields to the record, and `at`, the time of writing (UTC, ISO 8601).

    outcome: running, done, stopped (by a signal), failed, or the name of a refusal's state. stage: the last stage that was started.
    message: why the run ended. until: requested last stage of a finished run; None: the chain's own last stage.
    warnings: settings that wreck pretrained models. forced: id of the last flow run that forced a stage, and the stage.
    """
    path, now = workspace / RECORD, datetime.now(UTC).isoformat(timespec="seconds")
    replace_text(path, json.dumps({**read_record(workspace), **fields, "at": now}, ensure_ascii=False))


@contextmanager
def recording(workspace: Path) -> Iterator[None]:
    """Record the run as running, and as stopped, refused or failed if the block raises."""
    note(workspace, outcome="running", stage=None, message="", until=None)
    try:
        yield
    except Exception as error:  # recorded and raised again
        note(workspace, outcome=REFUSED if isinstance(error, ConfigError) else "failed", message=str(error))
        raise
    except BaseException:  # a signal
        note(workspace, outcome="stopped", message="stopped by a signal; the same command resumes it")
        raise


def read_record(workspace: Path) -> dict[str, Any]:
    """Return the record of a workspace; empty if there is none."""
    with suppress(OSError, ValueError):
        found = json.loads((workspace / RECORD).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
