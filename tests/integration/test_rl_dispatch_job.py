"""RL jobs through Ray whose engines get prompts as they become free: the curves of equal shares within rounding, also if an engine dies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from small_workspace import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
PROGRAM = """
import json, re, sys
sys.path.insert(0, "tests/integration")
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from rlhf_core.process import configure_process
from small_workspace import command_line, wait_until
from tools.placement_matrix import Cell, curve_difference, lab, largest_difference

configure_process()
settings = {"rl.samples_per_step": 96, "rl.minibatch_size": 96, "rl.rollout.max_concurrent_sequences": 16, "rl.max_replacements": 1}
cell = Cell("grpo", "together", engines=2, backend="vllm")


def serving():
    return [p for p in psutil.Process().children(recursive=True) if re.search("ray::rollout[.]serve", " ".join(command_line(p)))]


with lab(Path(sys.argv[1]), steps=5, cpus=6) as here, ThreadPoolExecutor(1) as pool:
    def run(dispatch):
        return here.run(cell, name=dispatch, **settings, **{"rl.rollout.dispatch": dispatch})

    equal, job = run("equal"), pool.submit(run, "dynamic")
    wait_until(lambda: job.done() or serving(), 120, "an engine that generates")
    serving()[0].kill()
    dynamic = job.result(timeout=300)
print(json.dumps({"curves": curve_difference(equal, dynamic), "weights": largest_difference(equal.weights, dynamic.weights)}))
"""


def test_an_engine_that_dies_changes_no_result(tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout
    differences = json.loads(done.stdout.splitlines()[-1])
    assert differences["curves"] < 1e-4 and differences["weights"] < 1e-4
    assert pd.read_csv(tmp_path / "dynamic" / "timings.csv")["replacements"].iloc[-1] == 1
