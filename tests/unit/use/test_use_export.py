"""A model's copy to hand on: what its card takes from the run, and that figures of another model are left out."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

from rlhf_core.config import ConfigError, load_params
from rlhf_core.models.card import CardFacts, write_card
from rlhf_core.provenance.file_hashes import dvc_md5
from rlhf_core.use.choice import choose
from rlhf_core.use.export import export

ROOT = Path(__file__).parents[3]
FACTS = CardFacts("policy", "dpo", None, {"seed": 0}, {}, {})
FIGURES = {"score_mean": 0.25, "judge_ok": 0.7, "truncated_fraction": 0.0, "length_mean": 12.5}
EVALUATION = {mode: {"sft": FIGURES, "policy": FIGURES | {"judge_ok": 0.91234}} for mode in ("greedy", "sampled")}
EVALUATION["win_rate"] = {"greedy": {"value": 0.8, "low": 0.7, "high": 0.9}}


@pytest.fixture
def project(tmp_path, monkeypatch, sft_folder) -> Path:
    """A run that was evaluated, and committed with a tag."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(sft_folder, "models/policy")
    write_card(Path("models/policy"), FACTS)
    Path("metrics").mkdir()
    Path("metrics/evaluate.json").write_text(json.dumps(EVALUATION))
    params = YAML(typ="safe", pure=True).load(CLERK_PARAMS.read_text())
    params["data"]["sources"][0]["license"] = "CC-BY-4.0"
    write("params.yaml", params)
    load_params("params.yaml")
    write("dvc.yaml", {})
    lock(dvc_md5(Path("models/policy")))
    git("init", "--quiet")
    git("add", "dvc.lock", "params.yaml", "metrics")
    git("-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "-m", "Results")
    git("tag", "v7")
    return tmp_path


def write(path: str, content: dict) -> None:
    with Path(path).open("w") as file:
        YAML(typ="safe", pure=True).dump(content, file)


def git(*command: str) -> str:
    return subprocess.run(["git", *command], check=True, capture_output=True, text=True).stdout.strip()


def lock(evaluated: str) -> None:
    policy = {"path": "models/policy", "md5": dvc_md5(Path("models/policy"))}
    metrics = {"path": "metrics/evaluate.json", "md5": dvc_md5(Path("metrics/evaluate.json"))}
    evaluate = {"deps": [{"path": "models/policy", "md5": evaluated}], "outs": [metrics]}
    write("dvc.lock", {"stages": {"train_policy": {"outs": [policy]}, "evaluate": evaluate}})


def test_the_card_has_evaluation_licences_commit_and_tags(project):
    folder = export(choose(), project / "out/mine")
    text = (folder / "README.md").read_text()
    assert "| greedy | policy | 0.912 | 0.250 | 0.000 | 12.500 |" in text and "greedy 0.800 (0.700 to 0.900)" in text
    assert "| clerk | CC-BY-4.0 |" in text and git("rev-parse", "HEAD") in text and "| tags | v7 |" in text
    assert dvc_md5(project / "models/policy") in text and "evaluation" not in (project / "models/policy/README.md").read_text().lower()
    assert ModelCard(text).data.pipeline_tag == "text-generation"
    names = {p.name for p in (project / "models/policy").iterdir()}
    assert {p.name for p in folder.iterdir()} == names and [p.name for p in folder.parent.iterdir()] == ["mine"]
    for name in names - {"README.md"}:
        assert (folder / name).read_bytes() == (project / "models/policy" / name).read_bytes()


def test_the_card_has_the_harness_figures_with_errors_and_intervals(project):
    difference = {"value": 0.12, "low": 0.02, "high": 0.22, "p_value": 0.01, "n": 100}
    figure = {"higher_is_better": True, "sft": {"value": 0.3, "stderr": 0.046}, "policy": {"value": 0.42, "stderr": 0.0496}}
    task = {"num_fewshot": 5, "n": 100, "documents": 1319, "truncated": {"sft": 7, "policy": 6}}
    tasks = {"gsm8k": task | {"figures": {"exact_match,strict-match": figure | {"difference": difference}}}}
    settings = {"lm_eval": "0.4.13", "chat_template": True, "limit": 100, "max_length": 512, "confidence": 0.95}
    Path("metrics/evaluate.json").write_text(json.dumps(EVALUATION | {"harness": settings | {"tasks": tasks}}))
    lock(dvc_md5(Path("models/policy")))
    text = (export(choose(), project / "out") / "README.md").read_text()
    assert "lm-evaluation-harness 0.4.13, with the chat template, at most 100 documents of each task" in text
    row = "| gsm8k | exact_match, strict-match ↑ | 5 | 100 | 0.3000 ± 0.0460 | 0.4200 ± 0.0496 | +0.1200 (+0.0200 to +0.2200) |"
    assert row in text and "difference, 95% interval" in text
    assert "\nDocuments whose context lost its beginning at 512 tokens: gsm8k: 7.\n" in text


def test_the_card_names_the_scorers_their_gate_and_the_hashes_of_sources(project):
    policy, reward = (
        {"path": "models/policy", "md5": dvc_md5(project / "models/policy")},
        {"path": "models/reward", "md5": "e" * 32 + ".dir"},
    )
    Path("metrics/gate.json").write_text(json.dumps({"passed": True, "message": "passed: accuracy 0.8", "override": None}))
    made = {name: {"path": name, "md5": dvc_md5(Path(name))} for name in ("metrics/evaluate.json", "metrics/gate.json")}
    sources = {"sources": {"data.sources.pairs": {"path": "../pairs.jsonl", "sha256": "a" * 64}}}
    own = {"name": "trained", "kind": "reward_model"}
    other = {"name": "mine", "kind": "function", "path": "my_rewards:mine", "weight": 0.5}

    def card(*scorers: dict, name: str, evaluated: list | None = None) -> str:
        stages = {
            "train_policy": {"outs": [policy], "params": {"data/inputs.json": sources}},
            "gate_reward": {"deps": [reward], "outs": [made["metrics/gate.json"]]},
            "evaluate": {"deps": [policy, reward], "outs": [made["metrics/evaluate.json"]]},
        }
        read = {"rl.reward.scorers": list(scorers), "reward.enabled": True, "evaluation": {"scorers": evaluated}}
        stages["evaluate"]["params"] = {"params.yaml": read}
        write("dvc.lock", {"stages": stages})
        return (export(choose(), project / name) / "README.md").read_text()

    text = card(own, other | {"weight": 0.0}, name="a")
    assert "Mean score and win rate are by: the reward model of this run.\n" in text
    assert "The training didn't use this reward model. Passed: accuracy 0.8" in text
    assert f"| data.sources.pairs | ../pairs.jsonl | {'a' * 64} |" in text
    assert "by: the reward model of this run, weight 1, mine (function), weight 0.5.\n" in card(own, other, name="b")
    text = card(other, name="c")
    assert "by: mine (function).\n" in text and "Gate of the reward model" not in text
    assert "by: mine (function).\n" in card(own, name="e", evaluated=[other])
    write_card(Path("models/policy"), dataclasses.replace(FACTS, gate={"passed": True, "message": "passed: it", "override": None}))
    policy["md5"] = dvc_md5(project / "models/policy")
    assert card(own, name="d").count("Gate of the reward model") == 1


def test_an_evaluation_of_another_model_and_a_changed_one_are_left_out(project):
    lock("0" * 32 + ".dir")
    assert "None for this model" in (export(choose(), project / "a") / "README.md").read_text()
    lock(dvc_md5(project / "models/policy"))
    (project / "metrics/evaluate.json").write_text(json.dumps(EVALUATION | {"more": 1}))
    text = (export(choose(), project / "b") / "README.md").read_text()
    assert "None for this model" in text and "0.912" not in text


def test_a_folder_that_is_there_and_a_model_without_a_card_are_refused(project, sft_folder):
    (project / "out").mkdir()
    with pytest.raises(ConfigError, match="expected a new folder, got an existing one"):
        export(choose(), project / "out")
    with pytest.raises(ConfigError, match=r"README.md: expected the model's card, got none"):
        export(choose(model=sft_folder), project / "new")
    assert not (project / "new").exists()


def test_a_rounds_policy_has_its_comparison(project):
    folder = Path("rounds/1/policy")
    shutil.copytree("models/policy", folder)
    write_card(folder, dataclasses.replace(FACTS, method="dpo, round 1 of iterative DPO"))
    verdict = Path("rounds/1/metrics/evaluate.json")
    verdict.parent.mkdir()
    verdict.write_text(json.dumps({"accepted": True, "reason": "ahead on 80 of 100"}))
    made = {"path": folder.as_posix(), "md5": dvc_md5(folder)}
    compared = {"deps": [made], "outs": [{"path": verdict.as_posix(), "md5": dvc_md5(verdict)}]}
    write("rounds/dvc.lock", {"stages": {"train_round@1": {"outs": [made]}, "evaluate_round@1": compared}})
    text = (export(choose(model=folder), project / "out") / "README.md").read_text()
    assert "## Comparison of round 1\n\nAccepted: ahead on 80 of 100" in text
