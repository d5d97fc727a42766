"""Processes that die while weights travel from a trainer rank to the rollout engines of an RL job."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

from tools.faults.transfer import unavailable

pytestmark = pytest.mark.timeout(400)
PROBE = Path(__file__).with_name("transfer_probe.py")


def test_an_engine_is_replaced_in_a_transfer_and_a_rank_is_named(tmp_path: Path):
    if (reason := unavailable()) is not None:
        pytest.skip(f"stacks of other processes: {reason}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, PROBE, tmp_path], env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    printed = done.stdout
    assert ": expected receive_weights to finish, got a dead process (rank " in printed
    assert "replaced (1 of at most rl.max_replacements=4)" in printed
    assert "it has policy version" not in printed  # a new engine gets the weights of the interrupted transfer, and no older ones
    assert "trainer rank 0: expected send_weights to finish, got a dead process" in printed and "expected exit code 0, got 75" in printed
