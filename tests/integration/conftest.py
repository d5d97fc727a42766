"""The small chain, run once for all tests that look at it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from small_chain import make_chain, run


@dataclass(frozen=True)
class FinishedChain:
    """A workspace in which the flow ran to its end, and what it printed. Tests look, and copy it to change anything."""

    workspace: Path
    printed: str


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory) -> FinishedChain:
    workspace = make_chain(tmp_path_factory.mktemp("chain") / "flow")
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0, printed
    return FinishedChain(workspace, printed)
