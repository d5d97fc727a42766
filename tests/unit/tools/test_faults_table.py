"""The table of the fault matrix, made from results of earlier runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_a_table_without_results_is_refused(tmp_path):
    folder = tmp_path / "nothing"
    command = [sys.executable, "-m", "tools.faults", "--table", str(tmp_path / "table.csv"), "--folder", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--table: expected results of earlier runs in {folder}/results.jsonl, got no such file; run cells first" in done.stderr
    assert not folder.exists() and not (tmp_path / "table.csv").exists()
