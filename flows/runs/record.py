"""What became of a run, in its worktree: one small file that its flow keeps, and that a list of runs reads without Prefect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_core.config import ConfigError

RECORD = Path(".dvc/tmp/run.json")
# Names of states in which a flow says no; of Prefect's type FAILED.
GATE_REJECTED, ROUND_REFUSED, REFUSED = "GateRejected", "RoundRefused", "Refused"


def note(workspace: Path, **fields: Any) -> None:
    """Add fields to the record; `at`, when it was last written, comes by itself (UTC, seconds).

    outcome: running, done, stopped (by a signal), failed, or the name of the state in which the flow said no. stage: the one that was
    begun last. message: why the run ended. until: of a run that is done, the stage that it was to end after; None: it went through.
    """
    path, now = workspace / RECORD, datetime.now(UTC).isoformat(timespec="seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(json.dumps({**read_record(workspace), **fields, "at": now}, ensure_ascii=False), encoding="utf-8")
    aside.replace(path)


@contextmanager
def recording(workspace: Path) -> Iterator[None]:
    """The run is at work, and has been stopped or has failed where the block ends with an exception."""
    note(workspace, outcome="running", stage=None, message="", until=None)
    try:
        yield
    except Exception as error:
        note(workspace, outcome=REFUSED if isinstance(error, ConfigError) else "failed", message=str(error))
        raise
    except BaseException:
        note(workspace, outcome="stopped", message="stopped by a signal; the same command resumes it")
        raise


def read_record(workspace: Path) -> dict[str, Any]:
    """Empty where no flow has kept one."""
    with suppress(OSError, ValueError):
        found = json.loads((workspace / RECORD).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
