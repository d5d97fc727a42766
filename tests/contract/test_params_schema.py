"""The schema of params.yaml for editors is fresh and accepts what the repository has; `rlhf params show` explains keys by the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from ruamel.yaml import YAML

from rlhf_core.commands import main
from rlhf_core.config import ConfigError, Params
from rlhf_core.config.base import section_keys
from tools.explained import SCHEMA, comments_of, explain, schema

ROOT = Path(__file__).parents[2]
COMMENTS = comments_of((ROOT / "params.yaml").read_text())
COMMITTED = json.loads((ROOT / SCHEMA).read_text())
FILES = [ROOT / "params.yaml", *(path for path in sorted((ROOT / "recipes").rglob("*.yaml")) if "kubernetes" not in path.parts)]


def problems(tree: object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(COMMITTED).iter_errors(tree)]


def test_the_committed_schema_is_fresh():
    assert schema(COMMENTS) == COMMITTED, "run: rlhf params schema > params.schema.json"
    assert (ROOT / "params.yaml").read_text().startswith(f"# yaml-language-server: $schema={SCHEMA}\n")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_params_and_recipes_fit_the_schema(file):
    assert problems(YAML(typ="safe", pure=True).load(file.read_text())) == []


@pytest.mark.parametrize(
    ("tree", "problem"),
    [
        ({"sft": {"stepz": 1}}, "'stepz' was unexpected"),
        ({"gate": {"min_accuracy": 1.5}}, "1.5 is greater than the maximum"),
        ({"alignment": {"method": "dqo"}}, "'dqo' is not one of"),
        ({"data": {"sources": [{"kind": "tape"}]}}, "'tape' is not one of"),
    ],
)
def test_an_editor_marks_what_the_pipeline_refuses(tree, problem):
    (found,) = problems(tree)
    assert problem in found


def test_every_key_is_explained_with_type_and_stages():
    found = {key.replace(".0", ""): explain(key, COMMENTS) for key in section_keys(Params)}
    assert len(found) > 500 and all(one.kind for one in found.values())
    assert [key for key, one in found.items() if not one.text] == [], "write what it does behind the field in rlhf_core/config"
    assert found["gate.min_slice_pairs"].text == "a smaller slice is shown, not judged."
    assert found["sft.ranks"].text == COMMENTS["training.ranks"] and found["sft.ranks"].default == 1
    assert found["rl.eps"].text == "not of lion." and found["rl.ema_decay"].text.startswith("of the average of the weights")
    assert found["cluster.start_timeout"].text == "seconds." and found["cluster.silence_timeout"].text.startswith("seconds without a sign")
    assert found["sft.lora.rank"].text == "width of the adapters" and found["rl.ppo.group_size"].text == "samples of each prompt"
    assert found["evaluation.scorers.pattern"].text == "regex: 1 where it is found in the response, else 0"
    assert found["gate.incumbent.sha256"].text.startswith("of the folder; None if")
    assert found["sft.steps"].stages == ("train_sft", "report")
    assert found["rl.kl.coef"].stages == ("train_policy (with alignment.method: rl)", "report")
    assert "train_policy" in found["alignment.method"].stages and found["cluster.address"].stages == ()
    assert explain("data.sources.0.kind", COMMENTS) == explain("data.sources.kind", COMMENTS)


def test_an_unknown_key_is_refused_with_the_nearest_one():
    with pytest.raises(
        ConfigError, match=r"rl\.kl\.coeff: expected a key of params.yaml, got none of that name; did you mean rl\.kl\.coef\?"
    ):
        explain("rl.kl.coeff", COMMENTS)
    with pytest.raises(ConfigError, match=r"did you mean dpo\.beta or kto\.beta or rl\.distillation\.beta\?"):
        explain("preference.beta", COMMENTS)


def test_a_key_is_shown_with_its_value_and_the_pages_about_it(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    assert main("params", "show", "rl.algorithm", "--set", "rl.algorithm=rloo") == 0
    shown = capsys.readouterr().out
    assert 'value    "rloo"' in shown and "docs/rl.md" in shown
    assert main("params", "show", "data.sources.7.kind") == 0 and "that of each item" in capsys.readouterr().out
    assert main("params", "show", "gate", "--json") == 0
    assert json.loads(capsys.readouterr().out)["below"]["min_slice_pairs"] == "a smaller slice is shown, not judged."
