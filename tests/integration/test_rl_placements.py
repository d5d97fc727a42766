"""RL jobs through Ray whose roles are on ranks of their own: the curves are those of all roles on the same ranks."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

pytestmark = pytest.mark.timeout(600)


ALL = ["together", "two_groups", "apart", "two_and_one"]


@pytest.mark.parametrize(
    ("only", "placements"),
    [
        pytest.param("ppo-two_and_one", ["together", "two_and_one"], id="two groups of which one has two ranks", marks=pytest.mark.long),
        pytest.param("gdpo", ["together", "two_groups"], id="rewards of two scorers", marks=pytest.mark.long),
        pytest.param("step_rewards", ["together", "two_groups"], id="rewards of steps", marks=pytest.mark.long),
        pytest.param("grpo_curriculum", ["together", "two_groups"], id="curriculum", marks=pytest.mark.long),
        pytest.param("ppo", ALL, id="all", marks=pytest.mark.long),
        pytest.param("sampled", ALL, id="teachers of sampled tokens", marks=pytest.mark.long),
        pytest.param("likeliest", ["together", "two_groups", "two_and_one"], id="teachers' likeliest tokens", marks=pytest.mark.long),
        pytest.param("jsd", ["together", "two_and_one"], id="teachers of whole distributions", marks=pytest.mark.long),
    ],
)
def test_placements_train_the_same_policy(tmp_path: Path, only: str, placements: list[str]):
    command = [sys.executable, "-m", "tools.placement_matrix", "--only", only, "zero0-1-pytorch", "--steps", "3", "--table"]
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
    assert [row["placement"] for row in rows if row["algorithm"] == only.partition("-")[0]] == placements
