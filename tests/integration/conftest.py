"""The small chain, run once for all tests that look at it."""

from __future__ import annotations

import fcntl
from dataclasses import dataclass
from pathlib import Path

import pytest
from small_chain import log_of, make_chain, run, said


@dataclass(frozen=True)
class FinishedChain:
    """A workspace in which the flow ran to its end, and what it printed. Tests look, and copy it to change anything."""

    workspace: Path
    printed: str


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> FinishedChain:
    """Run by whichever worker comes first; the others wait for it. A run that failed is not tried again."""
    shared = tmp_path_factory.getbasetemp() if worker_id == "master" else tmp_path_factory.getbasetemp().parent
    workspace, outcome = shared / "chain" / "flow", shared / "chain" / "exit-code"
    workspace.parent.mkdir(exist_ok=True)
    with (shared / "chain" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not log_of(workspace).exists():
            code, printed = run(make_chain(workspace), "flows.full_pipeline")
            outcome.with_name("printed").write_text(printed)
            outcome.write_text(str(code))
    assert outcome.exists() and outcome.read_text() == "0", said(workspace)
    return FinishedChain(workspace, outcome.with_name("printed").read_text())
