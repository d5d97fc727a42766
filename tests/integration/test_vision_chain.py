"""Chains of models that see: pictures beside a JSONL file, SFT with adapters, a reward model with its gate, DPO or PPO and the report;
and recipes/vlm.yaml.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
import torch
from PIL import Image
from ruamel.yaml import YAML
from seeing_models import save_seeing_model
from small_chain import ROOT, SMALL, change_params, make_chain, ran, run
from transformers import AutoModelForImageTextToText

from rlhf_core.models.tokenizer import load_tokenizer

COLORS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (30, 60, 220)}
STEPS = {"steps": 4, "batch_size": 8, "checkpoint_every": 2, "eval_every": 2}


def records(folder: Path, count: int) -> Path:
    """Pairs about pictures of one color, of which some are broken or missing."""
    (folder / "pictures").mkdir(parents=True)
    names = list(COLORS)
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for number in range(count):
            color, other = names[number % 3], names[(number + 1) % 3]
            Image.new("RGB", (12 + number, 20), COLORS[color]).save(folder / "pictures" / f"{number}.png")
            record = {"prompt": "<image>\nWhich color is it?", "chosen": f"It is {color}.", "rejected": f"It is {other}."}
            file.write(json.dumps({**record, "images": [f"pictures/{number}.png"]}) + "\n")
    (folder / "pictures" / "5.png").write_bytes(b"broken")
    (folder / "pictures" / "7.png").unlink()
    return folder / "pairs.jsonl"


PPO = {
    "alignment": {"method": "rl"},
    "rl": {
        "algorithm": "ppo", "steps": 3, "checkpoint_every": 2, "rollout": {"backend": "pytorch", "max_new_tokens": 8}, "lora": {"rank": 2},
    },
}  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(900)
def test_sft_reward_model_dpo_and_ppo_with_pictures(tmp_path):
    data, model = records(tmp_path / "data", 240), save_seeing_model(tmp_path / "model")
    source = {
        "name": "colors", "kind": "file", "path": str(data), "images": str(data.parent), "format": "preference",
        "uses": ["sft", "preference", "prompt"], "weight": 1.0,
    }  # fmt: skip
    workspace = tmp_path / "flow"
    workspace.mkdir()
    make_chain(
        workspace, SMALL, {"model": {"path": str(model), "architecture": None, "vision": "frozen", "max_length": 128}},
        {"sft": {**STEPS, "pretrain": {"steps": 0, "batch_size": 16}, "lora": {"rank": 2}}, "dpo": STEPS},
        {"reward": {"steps": 4, "checkpoint_every": 2, "eval_every": 2}, "gate": {"min_pairs": 10, "min_slice_pairs": 5, "probe_pairs": 4}},
        {"alignment": {"method": "dpo"}, "data": {"sources": [source]}, "evaluation": {"max_new_tokens": 16, "backend": "pytorch"}},
    )  # fmt: skip
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0, printed[-3000:]

    metrics = {name: json.loads((workspace / f"metrics/{name}.json").read_text()) for name in ("prepare_data", "check_model")}
    assert metrics["prepare_data"]["dropped"]["colors"] == {"a picture can't be decoded": 1, "a picture's file is missing": 1}
    assert metrics["prepare_data"]["pictures"] == 238
    right = {name: metrics["check_model"]["checks"][name] for name in ("sft", "reward", "dpo", "lora")}
    assert set(right.values()) == {"right"}
    gate = json.loads((workspace / "metrics/gate.json").read_text())
    assert gate["n"] >= 10 and gate["probes"]["stored_scores"]["value"] < 1e-4
    evaluation = json.loads((workspace / "metrics/evaluate.json").read_text())
    assert all(evaluation[mode]["policy"]["scores"]["reward_model"]["n"] == 20 for mode in ("greedy", "sampled"))
    assert (workspace / "reports/report.html").read_text(encoding="utf-8").count('<img src="data:image/jpeg;base64,') >= 8
    given, sft, policy = (
        AutoModelForImageTextToText.from_pretrained(p).state_dict() for p in (model, workspace / "models/sft", workspace / "models/policy")
    )
    changed = {name for name in given if not torch.equal(given[name], policy[name])}
    assert changed and not any("visual" in name for name in changed)
    assert any(not torch.equal(sft[name], policy[name]) for name in changed)
    tokenizer = load_tokenizer(str(workspace / "models/policy"), trust_remote_code=False, vision="frozen")
    assert tokenizer.vision.token == "<|image_pad|>"

    change_params(workspace, PPO)
    code, printed = run(workspace, "flows.full_pipeline")
    assert code == 0 and "train_policy" in ran(printed) and "train_reward" not in ran(printed), printed[-3000:]
    rows = pd.read_csv(workspace / "plots/train_policy.csv")
    assert len(rows) == 3 and rows["score_reward_model"].notna().all() and (rows["value_loss"] > 0).all()
    assert rows["logprob_difference"].max() < 1e-4

    (data.parent / "pictures" / "9.png").write_bytes((data.parent / "pictures" / "10.png").read_bytes())
    code, printed = run(workspace, "flows.full_pipeline", "--until", "prepare_data")
    assert code == 0 and json.loads((workspace / "metrics/prepare_data.json").read_text())["pictures"] == 237  # a picture is an input


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_recipe_learns_to_see_and_to_answer(tmp_path):
    recipe = YAML(typ="safe", pure=True).load(ROOT / "recipes/vlm.yaml")
    code, printed = run(make_chain(tmp_path / "flow", recipe), "flows.full_pipeline", deadline=800)
    assert code == 0, printed[-3000:]
    evaluation = json.loads((tmp_path / "flow/metrics/evaluate.json").read_text())
    sft, policy = (evaluation["sampled"][model]["scores"]["right"]["mean"] for model in ("sft", "policy"))
    assert 0.3 < sft < 0.6 and policy > 0.9  # half of the demonstrations are right
