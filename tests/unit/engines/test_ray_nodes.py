"""What a node of a Ray cluster must have before an actor starts on it."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
import ray
from rlhf_core.engines.ray.places import check_nodes
from rlhf_core.storage.node import JobFiles

ray.init(address="local", num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _temp_dir=sys.argv[1])
for url in sys.argv[2:]:
    files = JobFiles(url=url, work="w", inputs="", packages={}, attempt="", node_folder=None, node_bytes=1, timeout=20.0)
    try:
        check_nodes(files, None, timeout=60.0)
    except ValueError as refused:
        print(refused)
    else:
        print("fine")
"""


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_node_without_the_storages_folder_is_named(tmp_path, tmp_path_factory):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path_factory.mktemp("r")), f"file://{tmp_path}", f"file://{tmp_path}/mount"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    there, missing = done.stdout.splitlines()
    assert there == "fine"
    assert missing.startswith(f"node {platform.node()} (")
    told = f"): cluster.storage: expected the folder {tmp_path}/mount on every node, got none on {platform.node()}; create it, or mount its"
    assert missing.endswith(f"{told} disk")
    assert not (tmp_path / "mount").exists()
