"""Overrides and recipes are typed, change only their lines and keep the comments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from clerk_params import CLERK_PARAMS, ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.chain.overrides import check, overrides_schema
from rlhf_core.config import (
    ConfigError,
    apply_overrides,
    load_params,
    overridden,
    parse_assignment,
    parse_params,
    read_recipe,
    read_yaml,
    with_recipes,
)

DEFAULT = CLERK_PARAMS


@pytest.fixture
def params_file(tmp_path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(DEFAULT.read_text())
    return path


def test_overrides_are_typed_and_change_only_their_lines(params_file):
    before = params_file.read_text().splitlines()
    overrides = {"rl.algorithm": "grpo", "data.sources.0.weight": 2.5, "model.path": "a/model", "rl.learning_rate": 1e-5}
    params = apply_overrides(params_file, overrides)
    assert params == load_params(params_file)
    assert (params.rl.algorithm, params.data.sources[0].weight, params.model.path, params.rl.learning_rate) == (
        "grpo",
        2.5,
        "a/model",
        1e-5,
    )
    after = params_file.read_text().splitlines()
    assert len(after) == len(before)
    differing = [(b, a) for b, a in zip(before, after, strict=True) if b.split() != a.split()]
    assert len(differing) == len(overrides)
    assert all("#" not in b or b.split("#")[1] == a.split("#")[1] for b, a in differing)  # comments stay


def test_back_to_the_old_value_gives_the_old_params(params_file):
    original = load_params(params_file)
    apply_overrides(params_file, {"rl.algorithm": "grpo", "model.path": "x"})
    assert apply_overrides(params_file, {"rl.algorithm": "ppo", "model.path": None}) == original


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"rl.algoritm": "grpo"}, "override rl.algoritm: expected a key of params.yaml, got 'algoritm'"),
        (
            {"data.sources.1.weight": 1.0},
            "override data.sources.1.weight: expected a key of params.yaml, got '1' of a list; its items are 0 to 0",
        ),
        ({"seed.deeper": 1}, "override seed.deeper: expected a key of params.yaml, got 'deeper'; see params.yaml"),
        ({"rl.steps": 5, "rl.ppo_epochs": "two"}, "override: rl.ppo_epochs: expected a valid integer, got 'two'"),
    ],
)
def test_refused_overrides_write_nothing(params_file, overrides, message):
    with pytest.raises(ConfigError) as error:
        apply_overrides(params_file, overrides)
    assert message in str(error.value)
    assert params_file.read_text() == DEFAULT.read_text()
    with pytest.raises(ConfigError) as checked:
        check(params_file, overrides)
    assert str(checked.value) == str(error.value)


@settings(deadline=None, max_examples=8)  # each example writes and reads a file
@given(st.integers(min_value=1, max_value=10**6), st.floats(min_value=1e-8, max_value=1.0))
def test_numbers_survive_the_file(tmp_path_factory, steps, rate):
    path = tmp_path_factory.mktemp("params") / "params.yaml"
    path.write_text(DEFAULT.read_text())
    apply_overrides(path, {"sft.steps": steps, "sft.learning_rate": rate})
    loaded = load_params(path).sft
    assert (loaded.steps, loaded.learning_rate) == (steps, rate)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rl.algorithm=grpo", ("rl.algorithm", "grpo")),
        ("sft.steps=5", ("sft.steps", 5)),
        ("rl.learning_rate=1e-4", ("rl.learning_rate", 1e-4)),
        ("rl.learning_rate=3.0e-3", ("rl.learning_rate", 3e-3)),
        ("model.path=null", ("model.path", None)),
        ("report.title=a=b", ("report.title", "a=b")),
        ("sft.offload_optimizer=true", ("sft.offload_optimizer", True)),
        ("data.sources.0.uses=[sft, prompt]", ("data.sources.0.uses", ["sft", "prompt"])),
    ],
)
def test_assignments_on_the_command_line_are_yaml(text, expected):
    assert parse_assignment(text) == expected


def test_a_recipe_replaces_leaves_and_lists(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rl:\n  steps: 3\n  kl: {coef: 0.1}\ndata:\n  sources:\n    - {name: x}\n")
    assert read_recipe(recipe) == {"rl.steps": 3, "rl.kl.coef": 0.1, "data.sources": [{"name": "x"}]}


def test_a_mapping_that_is_one_value_is_replaced_as_a_whole(params_file, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("rl:\n  prompt_weights: {clerk: 2.0}\n  reward:\n    overlong: {buffer: 8, penalty: 1.0}\n")
    overrides = read_recipe(recipe)
    assert overrides == {"rl.prompt_weights": {"clerk": 2.0}, "rl.reward.overlong": {"buffer": 8, "penalty": 1.0}}
    rl = apply_overrides(params_file, overrides).rl
    assert rl.prompt_weights == {"clerk": 2.0} and rl.reward.overlong.buffer == 8
    assert apply_overrides(params_file, {"rl.reward.overlong": None, "rl.prompt_weights": {}}) == load_params(DEFAULT)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_of_the_project_fit_the_settings_that_they_are_laid_over(recipe):
    check(ROOT / "params.yaml" if recipe.stem == "smollm2" else DEFAULT, read_recipe(recipe))


def test_the_schema_of_a_deployments_form_knows_every_key_and_its_type():
    import jsonschema

    schema = overrides_schema()
    defaults = dict(_leaves(read_yaml(DEFAULT), ""))
    jsonschema.validate(defaults, schema)
    for key in defaults:  # a limit's name is anybody's
        assert key in schema["properties"] or key.startswith("rl.monitor."), key
    for wrong in (
        {"rl.algoritm": "grpo"},
        {"rl.algorithm": "sarsa"},
        {"rl.steps": "60"},
        {"rl.steps": 0},
        {"rl": 3},
        {"evaluation.scorers": 1},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    jsonschema.validate({"rl.monitor.kl": None, "rl.monitor.kl.above": 2.0}, schema)
    jsonschema.validate({"data.sources.0.weight": 2.0, "model.path": "x", "rl.reward.scorers.0.weight": 0.0}, schema)
    jsonschema.validate({"evaluation.scorers": [{"name": "brief"}], "evaluation.scorers.0.weight": 0.0, "evaluation.stop": ["."]}, schema)
    jsonschema.validate({"rl.reward.overlong": {"buffer": 8, "penalty": 1.0}, "rl.prompt_weights": {"clerk": 2.0}}, schema)


def _leaves(node: dict[str, Any], prefix: str):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def test_epochs_over_steps_that_replace_them_are_refused(params_file, tmp_path):
    """Otherwise the epochs would have no effect, or an old recipe's passes over a rollout batch would be taken for epochs."""
    apply_overrides(params_file, {"sft.steps": 250, "rl.steps": 60, "dpo.steps": None})
    with pytest.raises(
        ConfigError, match=r"^override rl\.epochs: expected rl\.steps null, since steps replace epochs, got 60; set rl"
    ) as old:
        apply_overrides(params_file, {"sft.epochs": 2.0, "rl.epochs": 2, "dpo.epochs": 3.0})
    assert "passes over each rollout batch are rl.ppo_epochs\noverride sft.epochs: expected sft.steps null" in str(old.value)
    params = apply_overrides(params_file, {"sft.epochs": 2.0, "sft.steps": None, "dpo.epochs": 3.0})
    assert (params.sft.epochs, params.sft.steps, params.dpo.epochs) == (2.0, None, 3.0)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("sft: {steps: 9}")
    with pytest.raises(ConfigError, match=r"--set: sft\.epochs: expected sft\.steps null, since steps replace epochs, got 9; set"):
        with_recipes([recipe], {"sft.epochs": 2.0})
    assert with_recipes([recipe], {"sft.epochs": 2.0, "sft.steps": None}) == {"sft.epochs": 2.0, "sft.steps": None}


def test_a_file_from_before_ppo_epochs_is_told_what_it_is():
    tree = read_yaml(DEFAULT)
    tree["rl"]["epochs"] = tree["rl"].pop("ppo_epochs")
    with pytest.raises(
        ConfigError, match=r"rl\.ppo_epochs: expected the passes over each rollout batch, which were rl\.epochs; rl\.epochs"
    ):
        parse_params(tree)


def test_overrides_that_change_no_value_leave_the_text_as_it_is():
    text = (ROOT / "params.yaml").read_text(encoding="utf-8")
    overrides = with_recipes([ROOT / "recipes/clerk.yaml"], {"seed": 3})
    once = overridden(text, overrides, subject="params.yaml")[0]
    assert once != text and overridden(once, overrides, subject="params.yaml")[0] == once
