"""The memory of a Ray cluster's nodes, as the driver's preflight sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import json, sys
import ray
ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", _temp_dir=sys.argv[1])
from dataclasses import asdict
from rlhf_core.engines.ray.places import cluster_memory
from rlhf_core.planning.preflight import smallest
found = cluster_memory(60.0)
print(json.dumps([asdict(machine) for machine in [*found, smallest(found)]]))
"""


@pytest.mark.long
def test_every_node_tells_the_memory_that_processes_may_take(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="r") as sockets:  # whose names may have 107 characters
        command = [sys.executable, "-c", PROGRAM, sockets]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    node, all_of_them = json.loads(done.stdout.splitlines()[-1])
    seen = psutil.virtual_memory()
    assert 0 < node["host"] <= seen.total and node["host_total"] == pytest.approx(seen.total, rel=0.01)
    assert node["gpus"] == [] and all_of_them["host"] == node["host"]
