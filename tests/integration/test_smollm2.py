"""recipes/smollm2.yaml from the questions to the report with the real model: few questions and steps."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from ruamel.yaml import YAML
from small_chain import ORDER, make_chain, ran, run
from small_workspace import ROOT

MODEL = ROOT / "pretrained/smollm2"
RECIPE = YAML(typ="safe", pure=True).load((ROOT / "recipes/smollm2.yaml").read_text())
BRIEF = {
    "data": {"sources": {0: {"samples": {"prompts": 60}}}},
    "validation": {"min_pairs": 20},
    "reward": {"epochs": 1.0},
    "gate": {"min_accuracy": 0.3, "min_pairs": 10},
    "rl": {"steps": 2, "samples_per_step": 16, "minibatch_size": 16, "reward": {"normalization_samples": 16}},
    "evaluation": {"prompts": 12},
}
pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.long,
    pytest.mark.skipif(not MODEL.is_dir(), reason="the model is not here; make pretrained/smollm2 downloads it"),
]


def test_a_chat_model_answers_questions_of_a_file(tmp_path):
    workspace = make_chain(tmp_path / "project", RECIPE, BRIEF)
    (workspace / "pretrained").mkdir()
    (workspace / "pretrained/smollm2").symlink_to(MODEL)
    code, printed = run(workspace, "dvc", "repro", deadline=1500)
    assert (code, ran(printed)) == (0, ORDER), printed

    prompts = pd.read_parquet(workspace / "data/prepared/prompt.parquet")
    assert len(prompts) == 60 and prompts["label"].notna().all()
    evaluation = json.loads((workspace / "metrics/evaluate.json").read_text())
    assert {"brief", "right"} <= set(evaluation["sampled"]["policy"]["scores"])
    assert all(0 < evaluation["greedy"][side]["scores"]["right"]["mean"] <= 1 for side in ("sft", "policy"))
