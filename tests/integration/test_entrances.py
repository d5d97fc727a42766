"""Chains that begin with models made elsewhere: no SFT, a policy from outside, a ready-made reward model."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from small_chain import PYTORCH_ROLLOUTS, SMALL, change_params, make_chain, ran, run
from tiny_models import save_tiny_models, tiny_tokenizer

from rlhf_core.models.weights import read_state_dict
from rlhf_core.provenance.file_hashes import dvc_md5

STEPS = {"steps": 6, "batch_size": 8, "checkpoint_every": 3, "eval_every": 3}
PAIRS_ONLY = {
    "sft": {"enabled": False},
    "reward": {"enabled": False},
    "alignment": {"method": "dpo"},
    "dpo": STEPS,
    "validation": {"max_length_bias": 0.5, "min_pairs": 50},
    "data": {"test_fraction": 0.3, "promotion_fraction": 0.0},
}


def pairs(count: int) -> list[dict]:
    draw = random.Random(3)
    sums = [(draw.randrange(100), draw.randrange(100)) for _ in range(count)]
    return [
        {"prompt": f"What is {a} and {b}, number {i}?", "chosen": f"It is {a + b}.", "rejected": f"It is {a + b + 1}!"}
        for i, (a, b) in enumerate(sums)
    ]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A chain without SFT that has trained a policy by DPO from pairs alone. Beside it are the base model and a reward model."""
    folder = tmp_path_factory.mktemp("entrances")
    save_tiny_models(folder / "outside", tiny_tokenizer())
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs(200))))
    source = {"name": "sums", "kind": "file", "path": str(folder / "pairs.jsonl"), "format": "preference", "uses": ["preference", "prompt"]}
    workspace = folder / "project"
    workspace.mkdir()
    own = {"model": {"path": str(folder / "outside/sft"), "max_length": 64}, "data": {"sources": [source]}}
    make_chain(workspace, SMALL, PYTORCH_ROLLOUTS, PAIRS_ONLY, own)
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0, printed[-3000:]
    assert "not needed: the given model is used" in printed and "train_sft: not needed, since sft.enabled is false" in printed
    return workspace


@pytest.mark.long
def test_dpo_without_sft_starts_from_the_given_weights(project: Path):
    given, taken = read_state_dict(project.parent / "outside/sft"), read_state_dict(project / "models/sft")
    assert given.keys() == taken.keys() and all(torch.equal(given[name], taken[name]) for name in given)
    assert json.loads((project / "metrics/train_sft.json").read_text())["trained"] is False
    evaluation = json.loads((project / "metrics/evaluate.json").read_text())
    assert evaluation["kl"]["sampled"] is not None and evaluation["greedy"]["sft"]["n"] == 20
    report = (project / "reports/report.html").read_text()
    assert "KL to the given model" in report and "SFT model" not in report
    assert "# Given model" in (project / "models/sft/README.md").read_text()


@pytest.mark.long
def test_a_policy_and_a_reward_model_from_elsewhere_are_judged_beside_the_given_model(project: Path):
    """The policy is that of the chain before, so that the evaluation finds the same answers."""
    outside = project.parent / "outside"
    before = json.loads((project / "metrics/evaluate.json").read_text())
    shutil.copytree(project / "models/policy", outside / "policy")
    (outside / "policy/README.md").unlink()
    given = {"reward": {"enabled": True, "path": str(outside / "reward")}, "alignment": {"method": "external"}}
    override = {"gate": {"override": "a reward model of random weights", "min_pairs": 10}}
    change_params(project, given, override, {"external": {"path": str(outside / "policy")}})
    code, printed = run(project, "flows.full_pipeline")
    assert code == 0, printed[-3000:]
    assert not {"prepare_data", "train_sft"} & set(ran(printed)) and "made elsewhere" in printed
    for name in ("sft", "policy"):
        one, other = read_state_dict(outside / name), read_state_dict(project / "models" / name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    assert (project / "models/reward/model.safetensors").read_bytes() == (outside / "reward/model.safetensors").read_bytes()
    gate = json.loads((project / "metrics/gate.json").read_text())
    assert gate["needed"] and gate["n"] > 30 and {"accuracy", "same_scores"} & {check["name"] for check in gate["checks"]}
    assert gate["look"]["model"] == dvc_md5(project / "models/reward")
    after = json.loads((project / "metrics/evaluate.json").read_text())
    assert after["kl"] == before["kl"] and after["win_rate"]["greedy"]["value"] is not None
    report = (project / "reports/report.html").read_text()
    assert "was made elsewhere" in report and "whether it was trained on these held-out pairs" in report
    inputs = json.loads((project / "data/inputs.json").read_text())
    assert inputs["reward"]["reward.path"]["sha256"] and inputs["policy"]["external.path"]["sha256"]
