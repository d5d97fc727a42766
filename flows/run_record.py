"""What became of a run, in its worktree: one small file that its flow keeps, and that a list of runs reads without Prefect."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RECORD = Path(".dvc/tmp/run.json")


def note(workspace: Path, **fields: Any) -> None:
    """Add fields to the record; `at`, when it was last written, comes by itself (UTC, seconds).

    outcome: running, done, failed, stopped (by a signal), refused, GateRejected or another state's name. stage: the last one that was
    begun. message: why it ended.
    """
    path, now = workspace / RECORD, datetime.now(UTC).isoformat(timespec="seconds")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.tmp")
    aside.write_text(json.dumps({**read_record(workspace), **fields, "at": now}, ensure_ascii=False), encoding="utf-8")
    aside.replace(path)


def read_record(workspace: Path) -> dict[str, Any]:
    """Empty where no flow has kept one."""
    with suppress(OSError, ValueError):
        found = json.loads((workspace / RECORD).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}
