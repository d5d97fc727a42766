"""recipes/stories.yaml from the model's own samples to the report: few prompts and steps, a real pretrained model."""

from __future__ import annotations

import json

import pandas as pd
import pytest
from ruamel.yaml import YAML
from small_chain import ORDER, make_chain, ran, run
from small_workspace import ROOT

from rlhf_core.data.judge import find_judge

MODEL = ROOT.parent / "shared/data/stories260k"
RECIPE = YAML(typ="safe", pure=True).load((ROOT / "recipes/stories.yaml").read_text())
BRIEF = {
    "data": {"sources": {0: {"samples": {"prompts": 120}}}, "test_fraction": 0.3},
    "validation": {"min_pairs": 50},
    "sft": {"steps": 20, "batch_size": 16, "learning_rate": 2.0e-3},
    "reward": {"epochs": 1.0},
    "gate": {"min_accuracy": 0.3, "min_pairs": 30},
    "rl": {
        "steps": 2,
        "samples_per_step": 32,
        "minibatch_size": 32,
        "reward": {
            "normalization_samples": 32,
            "scorers": [
                {"name": "reward_model", "kind": "reward_model", "weight": 1.0, "normalization": "initial"},
                {"name": "judge", "kind": "judge", "weight": 0.0, "normalization": "none"},
            ],
        },
    },
    "evaluation": {"prompts": 30},
    "cluster": {"threads": 1},
}
pytestmark = pytest.mark.timeout(900)


@pytest.mark.long
@pytest.mark.skipif(not MODEL.is_dir(), reason="the pretrained model is not here: ../shared/data/stories260k, beside the checkout")
def test_a_pretrained_model_is_aligned_to_a_rule_on_its_own_samples(tmp_path):
    (tmp_path / "shared").symlink_to(MODEL.resolve().parents[1])
    workspace = make_chain(tmp_path / "project", RECIPE, BRIEF)
    code, printed = run(workspace, "dvc", "repro")
    assert (code, ran(printed)) == (0, ORDER), printed

    # Label noise aside, the rule prefers what is chosen.
    judge = find_judge(str(ROOT / "rewards/stories.py:kind"))
    pairs = pd.read_parquet(workspace / "data/prepared/preference.parquet")
    margins = [judge(list(r.messages), r.chosen).met - judge(list(r.messages), r.rejected).met for r in pairs.itertuples()]
    assert len(margins) > 100 and 0.01 < sum(m < 0 for m in margins) / len(margins) < 0.12 and 0 not in margins
    # Plain text: no roles and no special tokens.
    template = json.loads((workspace / "models/policy/tokenizer_config.json").read_text()).get("chat_template")
    template = template or (workspace / "models/policy/chat_template.jinja").read_text()
    assert "Assistant" not in template

    evaluation = json.loads((workspace / "metrics/evaluate.json").read_text())
    assert evaluation["judge"] and evaluation["sampled"]["policy"]["judge_n"] == 30
    table = pd.read_parquet(workspace / "data/evaluation_samples.parquet")
    for row in table[table["mode"] == "sampled"].itertuples():
        prompt = [{"role": "user", "content": row.prompt.removeprefix("user: ")}]
        assert judge(prompt, row.policy_response).ok == row.policy_judge_ok
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert curves["score_judge"].between(0, 1).all() and curves["logprob_difference"].max() < 1e-4
    page = (workspace / "reports/report.html").read_text()
    assert all(f">{aspect}<" in page for aspect in ("kind", "happy", "told"))


@pytest.mark.long
def test_a_missing_model_is_named_first_with_how_to_get_one(tmp_path):
    workspace = make_chain(tmp_path / "project", RECIPE, {"cluster": {"threads": 1}})
    code, printed = run(workspace, "dvc", "repro")
    assert code != 0 and ran(printed) == [] and "Running stage 'hash_inputs'" in printed
    assert (
        "hash_inputs: model.path: expected a folder with a pretrained model, got ../shared/data/stories260k with nothing there" in printed
    )
    assert "or any model on Hugging Face" in printed and "Traceback" not in printed
