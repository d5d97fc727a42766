"""HH-RLHF and GSM8K solutions through their recipes, from the files to the gate: half of the rows, few steps, the verdict as it comes.

test_prepare_data.py prepares all of them.
"""

from __future__ import annotations

import json

import pandas as pd
import pytest
from ruamel.yaml import YAML
from small_chain import make_chain, ran, run
from small_workspace import ROOT

REAL = ROOT.parent / "shared/data"
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not REAL.is_dir(), reason="the real data sets are not here: ../shared/data, beside the checkout"),
]
BRIEF = {
    "data": {"max_rows": 1200},
    "gate": {"min_pairs": 100},
    "sft": {"steps": 3, "batch_size": 8, "eval_every": 3},
    "reward": {"epochs": 0.02, "eval_every": 1000},
}
UPSTREAM = ["prepare_data", "validate_data", "check_model", "train_sft", "train_reward", "gate_reward"]


@pytest.mark.parametrize(("recipe", "bar"), [("hh_rlhf", 0.2), ("gsm8k", 0.9)])
def test_a_recipe_runs_to_the_gate_which_judges_by_its_bar(tmp_path, recipe, bar):
    """One that even a coin clears, and one that no model clears after so few steps."""
    (tmp_path / "shared").symlink_to(REAL.resolve().parent)
    laid_over = YAML(typ="safe", pure=True).load((ROOT / f"recipes/{recipe}.yaml").read_text())
    workspace = make_chain(tmp_path / "project", laid_over, BRIEF, {"gate": {"min_accuracy": bar}})

    code, printed = run(workspace, "dvc", "repro", "gate_reward")
    assert ran(printed) == UPSTREAM, printed
    validation, gate = (json.loads((workspace / f"metrics/{name}.json").read_text()) for name in ("validation", "gate"))
    assert validation["passed"] and validation["rows"]["preference"] > 1000
    heldout = pd.read_parquet(workspace / "data/reward_heldout.parquet")
    assert gate["n"] == (heldout["split"] == "test").sum() >= 100
    assert 0.2 < gate["low"] < gate["accuracy"] < gate["high"] < 0.9 and gate["threshold"] == bar
    rejected = "gate_reward: rejected: expected the lower end of the interval to reach gate.min_accuracy=0.9"
    assert (code == 0, gate["passed"], rejected in printed) == ((True, True, False) if bar < 0.5 else (False, False, True))
