"""recipes/steps.yaml: the process reward model finds first wrong steps, and RL with its scores makes solutions right."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML
from small_chain import ROOT, make_chain, run

SHORT = {"rl": {"steps": 16}, "evaluation": {"prompts": 100}, "flow": {"retry_delay": 0.0}}


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_solutions_get_right_by_rewards_of_their_steps(tmp_path: Path):
    recipe = YAML(typ="safe", pure=True).load(ROOT / "recipes/steps.yaml")
    code, printed = run(make_chain(tmp_path / "flow", recipe, SHORT), "flows.full_pipeline", deadline=1800)
    assert code == 0, printed[-3000:]
    gate = json.loads((tmp_path / "flow/metrics/gate.json").read_text())
    assert gate["passed"] and gate["first_error"]["f1"] > 0.75, gate["message"]
    with (tmp_path / "flow/plots/train_policy.csv").open() as file:
        scores = [float(step["score_reward_model"]) for step in csv.DictReader(file)]
    assert len(scores) == 16 and sum(scores[-4:]) / 4 > sum(scores[:2]) / 2 + 0.2, scores
    evaluation = json.loads((tmp_path / "flow/metrics/evaluate.json").read_text())
    before, after = (evaluation["sampled"][model]["judge_ok"] for model in ("sft", "policy"))
    assert 0.3 < before < 0.65 and after > before + 0.25, evaluation
    samples = pd.read_parquet(tmp_path / "flow/data/evaluation_samples.parquet")
    assert samples["policy_steps"].str.fullmatch(r"\d\.\d\d( \d\.\d\d)*").all()
    assert "steps right: " in (tmp_path / "flow/reports/report.html").read_text()
