"""recipes/code.yaml, made short: RL and evaluation run the model's programs against their tests."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from ruamel.yaml import YAML
from small_chain import PYTORCH_ROLLOUTS, ROOT, SMALL, make_chain, run

SHORT = {
    "model": {"architecture": {"hidden_size": 96, "intermediate_size": 256, "layers": 2, "heads": 3}},
    "sft": {"steps": 120, "batch_size": 32, "checkpoint_every": 60, "eval_every": 60},
    "rl": {"steps": 3, "samples_per_step": 32, "minibatch_size": 32, "rollout": {"max_new_tokens": 48}},
    "evaluation": {"prompts": 16, "max_new_tokens": 48},
}


@pytest.mark.long
def test_programs_are_rewarded_and_evaluated_by_their_tests(tmp_path: Path):
    recipe = YAML(typ="safe", pure=True).load(ROOT / "recipes/code.yaml")
    code, printed = run(make_chain(tmp_path / "flow", SMALL, PYTORCH_ROLLOUTS, recipe, SHORT), "flows.full_pipeline")
    assert code == 0, printed[-3000:]
    with (tmp_path / "flow/plots/train_policy.csv").open() as file:
        steps = list(csv.DictReader(file))
    scores = [float(step["score_tests"]) for step in steps]
    assert len(scores) == 3 and all(0 <= score <= 1 for score in scores) and max(scores) > 0
    assert all(0 <= json.loads(step["scorer_metrics"])["tests.no_program"] < 1 for step in steps)
    evaluation = json.loads((tmp_path / "flow/metrics/evaluate.json").read_text())
    found = [evaluation[how][model]["scores"]["tests"] for how in ("greedy", "sampled") for model in ("sft", "policy")]
    assert all(score["n"] == 16 and 0 <= score["mean"] <= 1 for score in found), evaluation
