"""What is said when a cluster isn't there in time. tests/integration/test_slurm.py waits for real nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from rlhf_core.engines.ports import free_ports

ROOT = Path(__file__).parents[3]


def test_a_cluster_that_does_not_answer_is_named_with_what_was_expected():
    address = f"http://127.0.0.1:{free_ports(1)[0]}"
    command = [sys.executable, "-m", "rlhf_core.engines.ray.wait", address, "4", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"cluster at {address}: expected 4 nodes within 1 s, got ") and "Failed to connect" in done.stderr
