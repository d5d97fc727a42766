"""The model card in a saved folder: what it says, that the same work gives the same bytes, and that Hugging Face can read it."""

from __future__ import annotations

import dataclasses

import pytest
from huggingface_hub import ModelCard
from ruamel.yaml import YAML

from rlhf_core.models.card import CardFacts, counting, metadata, render_card, split_card, write_card

FACTS = CardFacts(
    kind="policy",
    method="rl (grpo)",
    base="owner/small-model",
    params={
        "seed": 3,
        "model": {"path": "/home/somebody/models/mine", "dtype": "float32", "architecture": {"layers": 3}},
        "rl": {"algorithm": "grpo", "steps": 5, "ppo": {"gamma": 1.0}, "grpo": {"group_size": 8}, "checkpoint_every": 4, "deadlines": {}},
    },
    sources={
        "pairs": {"kind": "huggingface", "path": "owner/pairs", "rows": {"preference": {"train": 30, "validation": 2, "test": 4}}},
        "mine": {"kind": "file", "path": "/home/somebody/rows.jsonl", "rows": {"sft": {"train": 7, "validation": 1, "test": 2}}},
    },
    inputs={"data/prepared": "0123.dir", "models/sft": "4567.dir"},
    gate={"passed": False, "message": "rejected: accuracy 0.61 | too low,\nfor 0.7", "override": "read forty samples"},
    figures={"heldout_loss": 0.51239},
)


def changed(**changes) -> str:
    return render_card(dataclasses.replace(FACTS, **changes))


def test_hugging_face_reads_the_metadata(tmp_path):
    write_card(tmp_path, FACTS)
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rlhf", "policy", "rl"],
        "base_model": "owner/small-model",
        "datasets": ["owner/pairs"],
    }
    reward = ModelCard(changed(kind="reward", method="Bradley-Terry on pairs")).data
    assert (reward.pipeline_tag, reward.tags) == ("text-classification", ["rlhf", "reward-model"])
    assert ModelCard(changed(method="dpo, round 2 of iterative DPO")).data.tags == ["rlhf", "policy", "dpo"]


def test_data_inputs_figures_and_the_gates_verdict_are_in_it():
    text = render_card(FACTS)
    assert "| pairs | huggingface | preference | 30 | 2 | 4 | 0 |" in text and "| models/sft | 4567.dir |" in text
    assert "| heldout_loss | 0.5124 |" in text
    assert "Not passed: accuracy 0.61 | too low, for 0.7" in text and "for this reason: read forty samples" in text
    assert "## Gate" not in changed(gate=None)


def test_each_judge_that_the_policy_learned_from_has_its_verdict():
    judge = {"name": "helpful", "model": "/home/somebody/judge", "passed": True, "message": "passed: accuracy 0.9.", "override": "a try"}
    text = changed(judges=[judge, judge | {"name": "kind", "passed": False, "message": "rejected: position bias."}])
    assert "## Gate of the judge helpful\n\nModel: judge. Passed: accuracy 0.9.\n" in text
    assert "Not passed: position bias.\n\nUsed although it was rejected, for this reason: a try" in text and text.count("a try") == 1
    assert "Gate of the judge" not in render_card(FACTS)


def test_no_path_of_a_machine_is_in_it():
    assert "somebody" not in render_card(FACTS) and "/home" not in changed(base="/home/somebody/models/mine")
    assert "started from stories" in changed(base="../shared/data/stories")
    assert "base_model" not in split_card(changed(base="../shared/data/stories"))[0] and "trained from nothing" in changed(base=None)


def test_what_changes_no_weights_changes_no_card():
    written = YAML(typ="safe", pure=True).load(render_card(FACTS).split("```yaml\n")[1].split("```")[0])
    assert written == {
        "seed": 3,
        "model": {"path": "mine", "dtype": "float32"},
        "rl": {"algorithm": "grpo", "steps": 5, "grpo": {"group_size": 8}},
    }
    assert counting({"sft": {"steps": 2, "eval_every": 5}}) == {"sft": {"steps": 2}}


def test_a_folder_of_the_project_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def base_of(path: str) -> str | None:
        return metadata(dataclasses.replace(FACTS, base=path)).get("base_model")

    assert base_of("models/base") == "models/base"
    (tmp_path / "models/base").mkdir(parents=True)
    assert [base_of(path) for path in ("models/base", "../models", "/a/b")] == [None, None, None]


def test_a_readme_that_is_no_card_is_refused():
    head, body = split_card(render_card(FACTS))
    assert head["tags"][0] == "rlhf" and body.startswith("# Policy\n")
    with pytest.raises(ValueError, match=r"README.md: expected a model card with metadata"):
        split_card("# something else\n")
