"""params.yaml is refused with the key's path, what was expected and what to do; overrides are typed and keep the comments."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.overrides import check, overrides_schema, parse_assignment, read_recipe
from rlhf_core.config import ConfigError, apply_overrides, load_params, parse_params, read_yaml, set_key

DEFAULT = Path(__file__).parents[2] / "params.yaml"


def changed(key: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(read_yaml(DEFAULT))
    set_key(tree, key, value)
    return tree


@pytest.fixture
def params_file(tmp_path) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(DEFAULT.read_text())
    return path


def test_the_default_is_accepted_and_typed():
    params = load_params(DEFAULT)
    assert params.rl.algorithm == "ppo" and params.rl.learning_rate == 5e-4 and params.model.path is None
    with pytest.raises(ValueError, match="frozen"):
        params.rl.steps = 1


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rl.steps", "60", "params: rl.steps: expected a valid integer, got '60'; correct it there or in the override"),
        ("rl.steps", 60.0, "params: rl.steps: expected a valid integer, got 60.0"),
        ("rl.steps", 0, "params: rl.steps: expected greater than 0, got 0"),
        ("sft.offload_optimizer", 1, "params: sft.offload_optimizer: expected a valid boolean, got 1"),
        ("rl.algorithm", "sarsa", "params: rl.algorithm: expected 'ppo', 'grpo' or 'rloo', got 'sarsa'"),
        ("data.sources.0.weight", 0, "params: data.sources.0.weight: expected greater than 0, got 0"),
        ("seed", None, "params: seed: expected a valid integer, got None"),
        ("gate", [], "params: gate: expected a valid dictionary or instance of GateConfig, got []"),
        ("rl.samples_per_step", 200, "params: rl.samples_per_step: expected a multiple of minibatch_size=128, got 200; change one of them"),
        ("rl.rollout.max_new_tokens", 96, "params: rl.rollout.max_new_tokens: expected less than model.max_length=96, got 96; no token"),
        ("evaluation.max_new_tokens", 200, "params: evaluation.max_new_tokens: expected less than model.max_length=96, got 200"),
        ("model.architecture.hidden_size", 97, "params: model.architecture.hidden_size: expected an even multiple of heads=3, got 97"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(key, value, message):
    with pytest.raises(ConfigError) as error:
        parse_params(changed(key, value))
    assert message in str(error.value)


def test_the_group_of_the_chosen_algorithm_has_to_divide_the_samples():
    tree = changed("rl.grpo.group_size", 7)
    assert parse_params(tree).rl.group_size == 1  # ppo has its own
    tree["rl"]["algorithm"] = "grpo"
    with pytest.raises(ConfigError, match=r"rl.samples_per_step: expected a multiple of grpo.group_size=7, got 256"):
        parse_params(tree)
    tree["rl"]["grpo"]["group_size"] = 8
    assert parse_params(tree).rl.rollout_batch_size == 32  # 256 / 8


def test_unknown_and_missing_keys_are_all_named():
    tree = read_yaml(DEFAULT)
    tree["rl"]["leraning_rate"] = tree["rl"].pop("learning_rate")
    with pytest.raises(ConfigError) as error:
        parse_params(tree)
    lines = str(error.value).splitlines()
    assert "params: rl.learning_rate: expected a value, got nothing; take it from the default params.yaml" in lines
    assert "params: rl.leraning_rate: expected a known key, got one that nothing reads; remove it or correct its spelling" in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1, 2", "expected YAML, got"),
        ("a: 1\na: 2", "expected YAML, got"),
        ("- 1", "expected a mapping of sections, got list"),
        ("", "expected a mapping of sections, got NoneType"),
    ],
)
def test_a_file_that_is_no_params_file_is_refused(tmp_path, text, message):
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_params(path)


def test_a_missing_file_says_where_to_run(tmp_path):
    with pytest.raises(ConfigError, match="expected a readable parameter file, got No such file or directory; run from the folder"):
        load_params(tmp_path / "params.yaml")


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
        ({"data.sources.1.weight": 1.0}, "override data.sources.1.weight: expected a key of params.yaml, got '1' (known here: 0 to 0)"),
        ({"seed.deeper": 1}, "override seed.deeper: expected a key of params.yaml, got 'deeper' (known here: nothing)"),
        ({"rl.steps": 5, "rl.epochs": "two"}, "override: rl.epochs: expected a valid integer, got 'two'"),
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


@settings(deadline=None, max_examples=20)  # each example writes and reads a file
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


@pytest.mark.parametrize("recipe", sorted((DEFAULT.parent / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_of_the_project_fit_the_default(recipe):
    check(DEFAULT, read_recipe(recipe))


def test_the_schema_of_a_deployments_form_knows_every_key_and_its_type():
    import jsonschema

    schema = overrides_schema()
    defaults = dict(_leaves(read_yaml(DEFAULT), ""))
    jsonschema.validate(defaults, schema)
    for key in defaults:
        assert key in schema["properties"], key
    for wrong in ({"rl.algoritm": "grpo"}, {"rl.algorithm": "sarsa"}, {"rl.steps": "60"}, {"rl.steps": 0}, {"rl": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    jsonschema.validate({"data.sources.0.weight": 2.0, "model.path": "x"}, schema)


def _leaves(node: dict[str, Any], prefix: str):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
