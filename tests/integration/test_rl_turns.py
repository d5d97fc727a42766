"""RL jobs through Ray whose engines and trainer take turns: the bits of a job without turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from small_workspace import ROOT

from rlhf_core.trainers.rl.turns import SWITCHES

pytestmark = pytest.mark.timeout(600)
# Evaluations and checkpoints take further turns, and resampled groups come from weights that were kept meanwhile.
PROGRAM = """
import json, sys
from pathlib import Path
from rlhf_core.process import configure_process
from tools.placement_matrix import Cell, curve_difference, lab, largest_difference

configure_process()
settings = {"dynamic_sampling.enabled": True, "kl.refresh_reference_every": 1, "evaluation.every": 1, "checkpoint_every": 1}
cell = Cell("grpo", "two_groups", zero_stage=3, engines=2)
with lab(Path(sys.argv[1]), steps=2, cpus=8) as here:
    found = []
    for turns in (False, True):
        changes = {f"rl.{key}": value for key, value in (settings | {"rollout.take_turns": turns}).items()}
        found.append(here.run(cell, name=f"turns-{turns}", **changes))
print(json.dumps({"curves": curve_difference(*found), "weights": largest_difference(*(trained.weights for trained in found))}))
"""


@pytest.mark.long
def test_turns_change_no_bit_of_a_run_that_resamples_evaluates_and_saves(tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=560, check=False)
    assert done.returncode == 0, done.stdout
    assert json.loads(done.stdout.splitlines()[-1]) == {"curves": 0.0, "weights": 0.0}
    alone, by_turns = (pd.read_csv(tmp_path / f"turns-{turns}" / "timings.csv") for turns in (False, True))
    columns = [f"seconds_{switch}" for switch in SWITCHES]
    assert (by_turns[columns] > 0).all(axis=None) and not set(columns) & set(alone.columns)
    assert (by_turns.filter(regex="^seconds_").sum(axis=1) < 1.01 * by_turns["seconds"]).all()  # each second counts once
