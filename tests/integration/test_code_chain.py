"""recipes/code.yaml with half of its RL: the share of the tests that the model's programs pass rises."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from small_chain import ROOT, make_chain, run

SHORT = {"rl": {"steps": 16}, "evaluation": {"prompts": 48}, "flow": {"retry_delay": 0.0}}


@pytest.mark.long
@pytest.mark.timeout(2000)
def test_programs_pass_more_tests_after_rl(tmp_path: Path):
    recipe = YAML(typ="safe", pure=True).load(ROOT / "recipes/code.yaml")
    code, printed = run(make_chain(tmp_path / "flow", recipe, SHORT), "flows.full_pipeline", deadline=1800)
    assert code == 0, printed[-3000:]
    with (tmp_path / "flow/plots/train_policy.csv").open() as file:
        steps = list(csv.DictReader(file))
    scores = [float(step["score_tests"]) for step in steps]
    assert len(scores) == 16 and 0.15 < scores[0] < 0.55, scores  # 0.28 of the demonstrations are right
    assert sum(scores[-4:]) / 4 > sum(scores[:2]) / 2 + 0.15, scores
    assert all(json.loads(step["scorer_metrics"])["tests.no_program"] < 0.1 for step in steps)
    evaluation = json.loads((tmp_path / "flow/metrics/evaluate.json").read_text())
    found = [evaluation[how][model]["scores"]["tests"] for how in ("greedy", "sampled") for model in ("sft", "policy")]
    assert all(score["n"] == 48 and 0 <= score["mean"] <= 1 for score in found), evaluation
