"""RL jobs through Ray whose roles are on ranks of their own: the curves are those of all roles on the same ranks."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

pytestmark = pytest.mark.timeout(600)


def test_placements_train_the_same_policy(tmp_path: Path):
    """Together, in two groups, apart, and two groups of which one has two ranks."""
    command = [sys.executable, "-m", "tools.placement_matrix", "--only", "ppo", "zero0-1", "--steps", "3", "--table"]
    done = subprocess.run(
        [*command, str(tmp_path / "table.csv")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=560,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    with (tmp_path / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["placement"] for row in rows if row["algorithm"] == "ppo"] == ["together", "two_groups", "apart", "two_and_one"]
