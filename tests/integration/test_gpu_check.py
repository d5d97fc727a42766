"""A rehearsal of the whole GPU check: every part runs on the CPU with a tiny shape, as it would on a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time

import pytest

from bench.gpu.cases import ROOT
from bench.gpu.harness import FAILED, PARTS, RAN, read_result
from bench.gpu.table import REHEARSAL

MOST_SECONDS = 600  # two minutes on two cores with nothing else to do
# A figure that each part must have, by the beginning of its name, and how many have a value.
FIGURES = {
    "tests": ("test_", 0),
    "training": ("DPO, a tiny shape", 1),
    "lora": ("SFT with QLoRA, a tiny shape", 1),
    "memory": ("PPO trainer, a tiny shape, bfloat16: policy: gradients", 1),
}


@pytest.mark.timeout(MOST_SECONDS + 60)
def test_a_rehearsal_runs_every_part_and_its_table_has_them_all(tmp_path):
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.gpu", "--rehearse", "--minutes", "20", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=MOST_SECONDS)
    assert time.monotonic() - began < MOST_SECONDS
    table = (tmp_path / "out" / "gpu.md").read_text()
    assert table.startswith(REHEARSAL) and table in done.stdout
    there = [part for part in PARTS if importlib.util.find_spec(part.program) is not None]
    assert done.returncode == (0 if there == list(PARTS) else 1), done.stdout[-3000:]
    for part in PARTS:
        result = read_result(tmp_path / "out" / f"{part.name}.json")
        assert result.rehearsal and f"### {part.name}: {part.tells}" in table
        assert result.outcome == (RAN if part in there else FAILED), (result.reason, done.stdout[-3000:])
        if part in there:
            assert result.figures and result.figures[0].what in table
    for name, (beginning, least) in FIGURES.items():
        figures = [f for f in read_result(tmp_path / "out" / f"{name}.json").figures if f.what.startswith(beginning)]
        assert figures and sum(bool(f.values) for f in figures) >= least, name
    files = list((tmp_path / "out").iterdir())
    assert len(files) == len(PARTS) + 1 <= 8 and all(file.is_file() for file in files)
    assert json.loads((tmp_path / "out" / "tests.json").read_text())["about"]["torch"]
