"""Weights on their way from a trainer rank to the rollout engines of an RL job: processes that die meanwhile, and adapters alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_workspace import ROOT

from tools.faults.transfer import unavailable

pytestmark = [pytest.mark.timeout(400), pytest.mark.long]
PROBE = Path(__file__).with_name("transfer_probe.py")


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> str:
    if (reason := unavailable()) is not None:
        pytest.skip(f"stacks of other processes: {reason}")
    environment, folder = {**os.environ, "PYTHONPATH": str(ROOT)}, tmp_path_factory.mktemp("jobs")
    done = subprocess.run([sys.executable, PROBE, folder], env=environment, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_an_engine_is_replaced_in_a_transfer_and_a_rank_is_named(printed: str):
    assert ": expected receive_weights to finish, got a dead process (rank " in printed
    assert "replaced (1 of at most rl.max_replacements=4)" in printed
    assert "it has policy version" not in printed  # a new engine gets the weights of the interrupted transfer, and no older ones
    assert "trainer rank 0: expected send_weights to finish, got a dead process" in printed and "expected exit code 0, got 75" in printed


def test_a_job_with_adapters_sends_each_engine_their_bytes_and_no_more(printed: str):
    """Width 16, intermediate 32, 2 layers: q, k, v, o are 16 x 16, gate, up and down 16 x 32; rank 2, float32."""
    adapters = 4 * 2 * 2 * (4 * 32 + 3 * 48)
    assert f"sync_bytes {[str(2 * adapters)] * 3}" in printed
