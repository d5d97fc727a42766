"""params.yaml is refused with the key's path, what was expected and what to do; overrides are typed and keep the comments."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flows.chain.overrides import check, overrides_schema, parse_assignment
from rlhf_core.config import (
    Algorithm,
    ConfigError,
    ScorerConfig,
    apply_overrides,
    load_params,
    needs_pairs,
    parse_params,
    read_recipe,
    read_yaml,
    rows_needed,
    set_key,
)
from rlhf_core.config.scorers import KIND_FIELDS

DEFAULT = Path(__file__).parents[3] / "params.yaml"


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
        ("sft.offload_optimizer", True, "params: sft.offload_optimizer: expected false with zero_stage=0, got true; set zero_stage to 1"),
        ("rl.trainer.offload_optimizer", True, "params: rl.trainer.offload_optimizer: expected false with zero_stage=0, got true"),
        ("rl.trainer.offload_parameters", True, "params: rl.trainer.offload_parameters: expected false with zero_stage=0, got true"),
        (
            "rl.algorithm",
            "sarsa",
            f"params: rl.algorithm: expected {', '.join(map(repr, Algorithm.__args__[:-1]))} or {Algorithm.__args__[-1]!r}, got 'sarsa'",
        ),
        ("data.sources.0.weight", 0, "params: data.sources.0.weight: expected greater than 0, got 0"),
        ("seed", None, "params: seed: expected a valid integer, got None"),
        ("gate", [], "params: gate: expected a valid dictionary or instance of GateConfig, got []"),
        ("rl.samples_per_step", 200, "params: rl.samples_per_step: expected a multiple of minibatch_size=256, got 200; change one of them"),
        ("rl.rollout.max_new_tokens", 96, "params: rl.rollout.max_new_tokens: expected less than model.max_length=96, got 96; no token"),
        ("evaluation.max_new_tokens", 200, "params: evaluation.max_new_tokens: expected less than model.max_length=96, got 200"),
        ("model.template_date", "today", "params: model.template_date: expected a day such as 2024-07-26, got 'today'"),
        ("model.template_options", {"enable_thinking": False}, "params: model.template_options: expected none without model.path"),
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


def scorer(kind: str, **settings) -> dict[str, Any]:
    return {"name": kind, "kind": kind, "weight": 1.0, "normalization": "none", **settings}


ONE_STEP = {"rl.minibatch_size": 256, "rl.kl.placement": "loss", "rl.kl.estimator": "k3"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "from_update"),
        ({"rl.kl.placement": "reward", "rl.kl.coef": 0.0}, "from_update"),
        ({"rl.rollout.min_new_tokens": 3}, "from_update"),
        ({"rl.minibatch_size": 128}, "recompute"),
        ({"rl.epochs": 2}, "recompute"),
        ({"rl.kl.placement": "reward"}, "recompute"),
        ({"rl.correction.kind": "tis"}, "recompute"),
        ({"rl.rollout.top_p": 0.9}, "recompute"),
        ({"rl.rollout.top_k": 20}, "recompute"),
        ({"rl.rollout.one_step_off_policy": True}, "from_engine"),
        ({"rl.rollout.one_step_off_policy": True, "rl.correction.kind": "tis"}, "recompute"),
        ({"rl.algorithm": "ppo", "rl.ppo.critic_warmup_steps": 6}, "recompute"),
        ({"rl.algorithm": "ppo", "rl.ppo.critic_warmup_steps": 5}, "from_update"),
    ],
)
def test_old_log_probabilities_of_a_single_optimizer_step_come_from_the_update(changes: dict, expected: str):
    tree = copy.deepcopy(read_yaml(DEFAULT))
    for key, value in (ONE_STEP | changes).items():
        set_key(tree, key, value)
    assert parse_params(tree).rl.old_logprobs_source(step=5) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (scorer("function"), "path: expected a value for a scorer of kind function, got none; set it"),
        (scorer("regex"), "pattern: expected a value for a scorer of kind regex, got none; set it"),
        (scorer("length"), "target_length: expected a value for a scorer of kind length, got none; set it"),
        (scorer("judge", path="x"), "path: expected none for a scorer of kind judge, got 'x'; remove it"),
        (scorer("number", pattern="x"), "pattern: expected none for a scorer of kind number, got 'x'; remove it"),
        (scorer("regex", pattern="(a"), "pattern: expected a regular expression, got '(a'"),
        (scorer("judge", timeout=0.0), "timeout: expected greater than 0, got 0.0"),
        (scorer("judge", name="a b"), "name: expected"),
        (scorer("judge", members=2), "members: expected 1 for a scorer of kind judge, got 2"),
        (scorer("reward_model", std_coef=0.5), "std_coef: expected 0 with one member, got 0.5"),
    ],
)
def test_a_scorer_has_what_its_kind_needs_and_no_more(settings, message):
    with pytest.raises(ConfigError) as error:
        parse_params(changed("rl.reward.scorers", [settings]))
    assert f"params: rl.reward.scorers.0.{message}" in str(error.value)


def test_every_kind_of_scorer_is_accepted_with_what_it_needs():
    scorers = [
        scorer("reward_model", path="a/folder"),
        scorer("function", path="file.py:name"),
        *(scorer(kind) for kind in ("exact_match", "number", "math", "judge")),
        scorer("regex", pattern="a+"),
        scorer("length", target_length=5, weight=-0.1),
    ]
    assert len(parse_params(changed("rl.reward.scorers", scorers)).rl.reward.scorers) == 8


@pytest.mark.parametrize("kind", get_args(ScorerConfig.model_fields["kind"].annotation))
def test_every_kind_of_scorer_requires_its_own_fields_and_refuses_the_others(kind):
    values = {"path": "file.py:name", "label": 1, "pattern": "a+", "target_length": 5}
    assert set(values) == {field for known in KIND_FIELDS.values() for field in known}
    own = KIND_FIELDS.get(kind, {})
    required = {field: values[field] for field, needed in own.items() if needed}
    for field, value in values.items():
        without, given = {k: v for k, v in required.items() if k != field}, {**required, field: value}
        for fields, refused in ((without, own.get(field, False)), (given, field not in own)):
            tree = changed("rl.reward.scorers", [scorer(kind, **fields)])
            if refused:
                with pytest.raises(ConfigError, match=rf"rl\.reward\.scorers\.0\.{field}: expected .* of kind {kind}"):
                    parse_params(tree)
            else:
                parse_params(tree)


JUDGE = scorer("judge")
LORA = {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl.kl.placement": "loss"}, "rl.kl.estimator: expected k2 or k3 with placement loss, got k1"),
        ({"rl.kl.coef": 0.0, "rl.kl.target": 6.0}, "rl.kl.target: expected null with coef 0, got 6.0"),
        ({"rl.kl.coef": 0.0, "rl.kl.refresh_reference_every": 5}, "rl.kl.refresh_reference_every: expected null with coef 0"),
        ({"rl.kl.target": 6.0, "rl.kl.horizon": 51}, "rl.kl.horizon: expected more than a fifth of samples_per_step=256 with a target"),
        ({"rl.reward.scorers": [JUDGE, JUDGE]}, "rl.reward.scorers: expected different names, got ['judge', 'judge']; rename one"),
        ({"rl.reward.scorers": [JUDGE | {"name": "mean"}]}, "rl.reward.scorers: expected names other than ['score', 'mean', 'std']"),
        ({"rl.reward.scorers": [JUDGE | {"weight": 0.0}]}, "rl.reward.scorers: expected one with a weight other than 0, got none"),
        ({"rl.correction.low": 2.0}, "rl.correction.low: expected less than high=2.0, got 2.0; swap or change them"),
        ({"rl.evaluation.keep_best": True}, "rl.evaluation.keep_best: expected a number of steps in every, got null"),
        (
            {"rl.monitor": {"odd": {"metric": "happiness", "above": 1.0, "action": "warn"}}},
            "rl.monitor.odd.metric: expected a column of the curves, one of ['score_mean'",
        ),
        ({"rl.monitor": {"x": {"metric": "gap_judge", "above": 1.0, "action": "warn"}}}, "rl.monitor.x.metric: expected a column"),
        ({"rl.monitor": {"x": {"metric": "entropy", "action": "warn"}}}, "rl.monitor.x.limit: expected exactly one of above, below and"),
        (
            {"rl.monitor": {"x": {"metric": "entropy", "below": 1.0, "fall": 0.5, "action": "warn"}}},
            "rl.monitor.x.limit: expected exactly one of above, below and fall, got {'below': 1.0, 'fall': 0.5}",
        ),
        ({"rl.monitor": {"x": {"metric": "entropy", "below": 1.0, "action": "shout"}}}, "rl.monitor.x.action: expected 'warn', 'stop' or"),
        (
            {"rl.monitor": {"x": {"metric": "entropy", "below": 1.0, "action": "rollback"}}},
            "rl.monitor.x.action: expected evaluation.every with rollback, got null",
        ),
        (
            {"rl.kl.coef": 0.0, "rl.kl.measure": False, "rl.monitor": {"x": {"metric": "kl_mean", "above": 1.0, "action": "warn"}}},
            "rl.monitor.x.metric: expected one that is measured, got kl_mean with kl.coef 0 and kl.measure false",
        ),
        ({"rl.rollout.stop": ["END", ""]}, "rl.rollout.stop.1: expected String should have at least 1 character, got ''"),
        (
            {"rl.rollout.recomputed_fraction": 0.5, "rl.rollout.top_p": 0.9},
            "rl.rollout.recomputed_fraction: expected 1 with top_p, top_k or min_new_tokens, got 0.5",
        ),
        (
            {"rl.rollout.recomputed_fraction": 0.5, "rl.correction.kind": "tis"},
            "rl.rollout.recomputed_fraction: expected 1 with a correction, got 0.5",
        ),
        (
            {"rl.rollout.one_step_off_policy": True, "rl.algorithm": "grpo", "rl.dynamic_sampling.enabled": True},
            "rl.rollout.one_step_off_policy: expected false with dynamic_sampling, got true",
        ),
        (
            {"rl.rollout.one_step_off_policy": True, "rl.algorithm": "remax"},
            "rl.rollout.one_step_off_policy: expected false with remax, got true",
        ),
        (
            {"rl.rollout.one_step_off_policy": True, "rl.rollout.top_k": 5},
            "rl.rollout.one_step_off_policy: expected false with top_p, top_k or min_new_tokens and without a correction, got true",
        ),
        ({"rl.rollout.min_new_tokens": 32}, "rl.rollout.min_new_tokens: expected less than max_new_tokens=32, got 32; lower it"),
        (
            {"rl.ppo.critic_init": "reward_model", "rl.reward.scorers": [JUDGE]},
            "rl.ppo.critic_init: expected reward_model_trunk or sft where no rewarded scorer is the chain's reward model, got reward_model",
        ),
        (
            {"rl.ppo.critic_init": "reward_model", "rl.reward.scorers.0.normalization": "running"},
            "rl.ppo.critic_init: expected reward_model_trunk or sft with normalization running of ['reward_model'], got reward_model",
        ),
        (
            {"rl.ppo.critic_init": "reward_model", "rl.reward.scorers.0.members": 2, "rl.reward.scorers.0.std_coef": 0.5},
            "rl.ppo.critic_init: expected reward_model_trunk or sft with several members of ['reward_model'], got reward_model",
        ),
        ({"rl.trainer.ranks": 3}, "rl.minibatch_size: expected a multiple of trainer.ranks=3, got 256"),
        (
            {"rl.trainer.ranks": 2, "rl.ptx.coef": 0.1, "rl.ptx.batch_size": 31},
            "rl.ptx.batch_size: expected a multiple of trainer.ranks=2, got 31",
        ),
        (
            {"rl.trainer.ranks": 3, "rl.trainer.sequence_parallel": 2},
            "rl.trainer.sequence_parallel: expected a divisor of ranks=3, got 2; change one of them",
        ),
        (
            {"rl.trainer.ranks": 12, "rl.trainer.sequence_parallel": 4},
            "rl.minibatch_size: expected a multiple of trainer.ranks=12 / trainer.sequence_parallel=4, got 256",
        ),
        (
            {"rl.trainer.ranks": 2, "rl.trainer.sequence_parallel": 2, "rl.moe_aux_coef": 0.1},
            "rl.moe_aux_coef: expected 0 with trainer.sequence_parallel=2, got 0.1",
        ),
        (
            {"rl.policy_loss": "gspo", "rl.loss_aggregation": "token_mean"},
            "rl.loss_aggregation: expected sequence_mean or auto with policy_loss gspo, got token_mean",
        ),
        ({"rl.policy_loss": "cispo", "rl.dual_clip": 3.0}, "rl.dual_clip: expected null with policy_loss cispo, got 3.0"),
        ({"rl.lora": LORA | {"dropout": 0.1}}, "rl.lora.dropout: expected 0 in rl, got 0.1"),
        (
            {"rl.algorithm": "remax", "rl.remax.group_size": 256, "rl.trainer.ranks": 2},
            "rl.remax.group_size: expected at least trainer.ranks=2 prompts a step, got 1; lower it, because each rank computes the KL",
        ),
        ({"rl.dynamic_sampling.enabled": True}, "rl.dynamic_sampling: expected ppo.group_size of at least 2, got 1"),
        (
            {"rl.reward.overlong": {"buffer": 33, "penalty": 1.0}},
            "rl.reward.overlong.buffer: expected at most rollout.max_new_tokens=32, got 33; lower it",
        ),
        ({"rl.evaluation.metric": "judge"}, "rl.evaluation.metric: expected one of ['score', 'reward_model'], got 'judge'"),
        ({"rl.prompt_weights": {"clerk": 0.0}}, "rl.prompt_weights: expected weights above 0, got {'clerk': 0.0}"),
        ({"rl.prompt_weights": {"clark": 1.0}}, "rl.prompt_weights: expected sources of prompts, ['clerk'], got ['clark']; correct"),
        ({"reward.ensemble": 3}, "rl.reward.scorers: expected members=3 of reward_model, as reward.ensemble (the gate"),
        ({"gate.slices": ["source", "source"]}, "gate.slices: expected different names, got ['source', 'source']; take one out"),
        (
            {"reward.enabled": False},
            "rl.reward.scorers: expected none of kind reward_model without a path while reward.enabled is false, got ['reward_model']",
        ),
        (
            {"reward.enabled": False, "rl.reward.scorers": [JUDGE]},
            "rl.ppo.critic_init: expected sft while reward.enabled is false, got reward_model_trunk",
        ),
        (
            {"rl.reward.scorers": [JUDGE], "data.sources.0.kind": "file", "data.sources.0.path": "x", "data.sources.0.format": "preference",
             "data.sources.0.uses": ["prompt"]},
            "rl.reward.scorers: expected no judge for prompts of sources ['clerk'], which have none; give those sources a rule as `judge`",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_together_in_rl_is_refused(changes, message):
    tree = read_yaml(DEFAULT)
    tree["data"]["sources"][0] |= {"path": None, "format": None}
    for key, value in changes.items():
        set_key(tree, key, value)
    with pytest.raises(ConfigError) as error:
        parse_params(tree)
    assert f"params: {message}" in str(error.value)


def test_orpo_with_a_second_likelihood_term_is_refused():
    tree = changed("dpo.loss", "orpo")
    tree["alignment"]["method"] = "dpo"
    with pytest.raises(ConfigError) as error:
        parse_params(tree)
    assert "params: dpo.nll_coef: expected 0 with loss orpo, got 0.5; ORPO's own loss has the likelihood of the chosen" in str(error.value)
    tree["dpo"]["nll_coef"] = 0.0
    assert parse_params(tree).dpo.loss == "orpo"


def test_dropout_is_off_where_two_distributions_are_compared_and_on_where_the_loss_is_sfts():
    tree = read_yaml(DEFAULT)
    params = parse_params(tree)
    assert [name for name in tree if getattr(getattr(params, name), "disable_dropout", False)] == ["reward", "dpo", "kto"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "token_mean"),
        ({"rl.algorithm": "dr_grpo"}, "constant_horizon"),
        ({"rl.policy_loss": "gspo"}, "sequence_mean"),
        ({"rl.algorithm": "dr_grpo", "rl.policy_loss": "gspo"}, "sequence_mean"),
        ({"rl.algorithm": "dr_grpo", "rl.loss_aggregation": "token_mean"}, "token_mean"),
    ],
)
def test_auto_is_the_aggregation_of_the_algorithms_paper(changes, expected):
    tree = read_yaml(DEFAULT)
    for key, value in changes.items():
        set_key(tree, key, value)
    assert parse_params(tree).rl.aggregation == expected


def test_a_chain_without_a_reward_model_is_accepted_with_other_scorers():
    tree = changed("rl.reward.scorers", [JUDGE])
    tree["reward"]["enabled"] = False
    tree["rl"]["ppo"]["critic_init"] = "sft"
    assert not parse_params(tree).reward.enabled
    tree["rl"]["reward"]["scorers"] = [scorer("reward_model", path="another/model")]
    assert parse_params(tree).rl.reward.scorers[0].path == "another/model"


def test_the_confidence_of_each_round_is_refused_with_what_took_its_place():
    tree = changed("iterative.promotion.prompts", 700)
    tree["iterative"]["promotion"] |= {"confidence": 0.95}
    with pytest.raises(
        ConfigError, match=r"iterative\.promotion.* expected error_budget .* write error_budget: 0\.05 and rounds: 30 instead"
    ):
        parse_params(tree)


def test_the_splits_leave_something_to_train_on():
    tree = changed("data.test_fraction", 0.4)
    tree["data"] |= {"promotion_fraction": 0.4, "validation_fraction": 0.2}
    with pytest.raises(ConfigError, match="promotion_fraction: expected less than 1 together, got 1; leave something to train on"):
        parse_params(tree)
    del tree["data"]["promotion_fraction"]  # params from before the split: no row moves
    assert parse_params(tree).data.promotion_fraction == 0


@pytest.mark.parametrize("section", ["rejection_sampling", "iterative"])
@pytest.mark.parametrize(
    ("scorers", "message"),
    [
        ([JUDGE | {"normalization": "initial"}], "scorers: expected normalization none, got another one for ['judge']"),
        ([JUDGE, JUDGE], "scorers: expected different names, got ['judge', 'judge']"),
        ([JUDGE | {"weight": 0.0}], "scorers: expected one with a weight other than 0, got none"),
    ],
)
def test_scorers_that_only_rank_are_raw_and_have_names_and_a_weight(section, scorers, message):
    tree = changed(f"{section}.scorers", scorers)
    tree["alignment"]["method"] = "rejection_sampling"
    with pytest.raises(ConfigError) as error:
        parse_params(tree, rounds=True)
    assert f"params: {section}.{message}" in str(error.value)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            "rejection_sampling",
            "rejection_sampling.scorers: expected none of kind reward_model without a path while reward.enabled is",
        ),
        ("conditional_sft", "conditional_sft.label_by: expected preference while reward.enabled is false, got scores"),
        ("rl", "rl.ppo.critic_init: expected sft while reward.enabled is false"),
        ("dpo", None),
        ("kto", None),
    ],
)
def test_only_the_method_that_is_used_needs_a_reward_model(method, message):
    tree = changed("rl.reward.scorers", [JUDGE])
    tree["reward"]["enabled"] = False
    tree["alignment"]["method"] = method
    if message is None:
        assert parse_params(tree).alignment.method == method
    else:
        with pytest.raises(ConfigError) as error:
            parse_params(tree)
        assert f"params: {message}" in str(error.value)


def test_readers_of_the_rounds_scorers_check_that_they_exist():
    tree = changed("rl.reward.scorers", [JUDGE])
    tree["reward"]["enabled"], tree["alignment"]["method"] = False, "dpo"
    parse_params(tree)
    with pytest.raises(ConfigError, match=r"iterative\.scorers: expected none of kind reward_model"):
        parse_params(tree, rounds=True)


def test_unknown_and_missing_keys_are_all_named():
    tree = read_yaml(DEFAULT)
    tree["rl"]["leraning_rate"] = tree["rl"].pop("learning_rate")
    with pytest.raises(ConfigError) as error:
        parse_params(tree)
    lines = str(error.value).splitlines()
    assert "params: rl.learning_rate: expected a value, got nothing; take it from the default params.yaml" in lines
    assert "params: rl.leraning_rate: expected a known key, got one that nothing reads; did you mean rl.learning_rate?" in lines


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
        (
            {"data.sources.1.weight": 1.0},
            "override data.sources.1.weight: expected a key of params.yaml, got '1' of a list; its items are 0 to 0",
        ),
        ({"seed.deeper": 1}, "override seed.deeper: expected a key of params.yaml, got 'deeper'; see params.yaml"),
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


@pytest.mark.parametrize("recipe", sorted((DEFAULT.parent / "recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_recipes_of_the_project_fit_the_default(recipe):
    check(DEFAULT, read_recipe(recipe))


def test_the_schema_of_a_deployments_form_knows_every_key_and_its_type():
    import jsonschema

    schema = overrides_schema()
    defaults = dict(_leaves(read_yaml(DEFAULT), ""))
    jsonschema.validate(defaults, schema)
    for key in defaults:  # a limit's name is anybody's
        assert key in schema["properties"] or key.startswith("rl.monitor."), key
    for wrong in ({"rl.algoritm": "grpo"}, {"rl.algorithm": "sarsa"}, {"rl.steps": "60"}, {"rl.steps": 0}, {"rl": 3}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
    jsonschema.validate({"rl.monitor.kl": None, "rl.monitor.kl.above": 2.0}, schema)
    jsonschema.validate({"data.sources.0.weight": 2.0, "model.path": "x", "rl.reward.scorers.0.weight": 0.0}, schema)
    jsonschema.validate({"rl.reward.overlong": {"buffer": 8, "penalty": 1.0}, "rl.prompt_weights": {"clerk": 2.0}}, schema)


def _leaves(node: dict[str, Any], prefix: str):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


OWN_SAMPLES = {
    "openings": ["Once"], "opening_tokens": 16, "prompts": 9, "responses_per_prompt": 2, "max_new_tokens": 32, "temperature": 1.0,
    "top_p": 1.0, "label_noise": 0.0,
}  # fmt: skip
OWN = {"name": "own", "kind": "samples", "judge": "rules.py:good", "uses": ["sft", "prompt"], "weight": 1.0, "samples": OWN_SAMPLES}


@pytest.mark.parametrize(
    ("source", "changes", "message"),
    [
        ({"samples": None}, {}, "source own: kind samples expects samples and judge, got no samples section; see recipes/stories.yaml"),
        ({"judge": None}, {}, "source own: kind samples expects samples and judge, got no judge"),
        ({"uses": ["pretrain"]}, {}, "source own: kind samples expects uses among sft, preference, prompt, got pretrain"),
        (
            {},
            {"model.path": None},
            "model.path: expected a pretrained model, from which source own of kind samples draws, got null; set it",
        ),
        ({}, {"model.max_length": 48}, "expected opening_tokens and max_new_tokens of less than model.max_length=48 together, got 48"),
        ({"samples": OWN_SAMPLES | {"openings": []}}, {}, "samples.openings: expected"),
        ({"samples": OWN_SAMPLES | {"responses_per_prompt": 1}}, {}, "samples.responses_per_prompt: expected"),
    ],
)
def test_a_source_of_own_samples_that_lacks_something_is_refused(source, changes, message):
    tree = read_yaml(DEFAULT)
    for key, value in {"model.path": "a/model", "data.sources": [OWN | source], **changes}.items():
        set_key(tree, key, value)
    with pytest.raises(ConfigError, match=re.escape(message)):
        parse_params(tree)


def test_sources_name_their_judge():
    tree = read_yaml(DEFAULT)
    assert parse_params(tree).data.sources[0].judge_name == "clerk"
    file = {"name": "web", "kind": "file", "path": "x", "format": "preference", "uses": ["preference"], "weight": 1.0}
    set_key(tree, "model.path", "a/model")
    set_key(tree, "data.sources", [OWN, file, file | {"name": "judged", "judge": "rules.py:good"}])
    assert [s.judge_name for s in parse_params(tree).data.sources] == ["rules.py:good", None, "rules.py:good"]
    set_key(tree, "data.sources", [read_yaml(DEFAULT)["data"]["sources"][0] | {"judge": "rules.py:good"}])
    with pytest.raises(
        ConfigError, match=r"source clerk: kind clerk expects no judge, got rules.py:good; remove it, for the clerk has its own"
    ):
        parse_params(tree)


def refused(changes: dict[str, Any], **how: Any) -> list[str]:
    """The lines of the message with which overrides of the default are refused."""
    with pytest.raises(ConfigError) as error:
        check(DEFAULT, changes, **how)
    return str(error.value).splitlines()


NO_REWARD_MODEL = {"reward.enabled": False}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        (NO_REWARD_MODEL, ["rl.ppo.critic_init", "rl.reward.scorers"]),
        (NO_REWARD_MODEL | {"alignment.method": "rejection_sampling"}, ["rejection_sampling.scorers"]),
        (NO_REWARD_MODEL | {"alignment.method": "conditional_sft"}, ["conditional_sft.label_by"]),
        ({"rl.trainer.ranks": 3, "rl.kl.placement": "loss", "model.max_length": 32, "gate.slices": ["source", "source"]},
         ["evaluation.max_new_tokens", "gate.slices", "rl.kl.estimator", "rl.minibatch_size", "rl.rollout.max_new_tokens"]),
        ({"rl.stepz": 3, "rl.algorithm": "gropo", "data.validation_fraction": 0.45, "data.test_fraction": 0.45,
          "data.promotion_fraction": 0.45}, ["data.validation_fraction, test_fraction and promotion_fraction", "rl.algorithm", "rl.stepz"]),
    ],
)  # fmt: skip
def test_all_conflicts_are_listed_sorted_by_key(changes, keys):
    lines = refused(changes)
    assert [line.removeprefix("override").lstrip(": ").partition(": ")[0] for line in lines] == keys
    assert all("; " in line for line in lines)  # what to do


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_a_method_that_learns_from_data_asks_nothing_of_other_sections(method):
    others = {"rl.kl.placement": "loss", "rl.reward.scorers": [], "rl.rollout.max_new_tokens": 500, "gate.slices": ["source", "source"]}
    others |= {"rejection_sampling.sampling.max_new_tokens": 500, "rl.prompt_weights": {"nobody": 1.0}, "iterative.scorers": [JUDGE, JUDGE]}
    params = check(DEFAULT, NO_REWARD_MODEL | others | {"alignment.method": method})
    assert params.evaluation_scorers == []


def test_without_a_reward_model_the_evaluation_scores_by_the_scorers_that_are_left():
    scorers = [scorer("reward_model"), scorer("reward_model", name="other", path="a/folder"), JUDGE]
    params = check(DEFAULT, NO_REWARD_MODEL | {"alignment.method": "dpo", "rl.reward.scorers": scorers})
    assert [s.name for s in params.evaluation_scorers] == ["other", "judge"]
    params = check(DEFAULT, {"alignment.method": "dpo", "rl.reward.scorers": scorers})
    assert [s.name for s in params.evaluation_scorers] == ["reward_model", "other", "judge"]


def test_rl_without_anything_to_be_rewarded_is_refused():
    (line,) = refused({"rl.reward.scorers": []})
    assert line.startswith("override: rl.reward.scorers: expected one with a weight other than 0, got none")


PREFERENCES = [("preference", "test"), ("preference", "train")]


@pytest.mark.parametrize(
    ("changes", "rows", "pairs"),
    [
        ({}, [*PREFERENCES, ("prompt", "test"), ("prompt", "train"), ("sft", "train")], True),
        ({"alignment.method": "dpo"}, [*PREFERENCES, ("prompt", "test"), ("sft", "train")], True),
        (NO_REWARD_MODEL | {"alignment.method": "dpo"}, [("preference", "train"), ("prompt", "test"), ("sft", "train")], True),
        (NO_REWARD_MODEL | {"alignment.method": "kto"}, [("preference", "train"), ("prompt", "test"), ("sft", "train")], False),
        (
            NO_REWARD_MODEL | {"rl.reward.scorers": [JUDGE], "rl.ppo.critic_init": "sft"},
            [("prompt", "test"), ("prompt", "train"), ("sft", "train")],
            False,
        ),
    ],
)
def test_data_must_have_the_rows_that_the_method_reads(changes, rows, pairs):
    params = check(DEFAULT, changes)
    assert (list(rows_needed(params)), needs_pairs(params)) == (rows, pairs)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("rl.max_new_tokens", "rl.rollout.max_new_tokens"),
        ("rollout.backend", "rl.rollout.backend"),
        ("rl.lerning_rate", "rl.learning_rate"),
        ("alignement.method", "alignment.method"),
        ("reward.scorers", "rl.reward.scorers"),
        ("data.sources.0.wieght", "data.sources.0.weight"),
    ],
)
def test_an_unknown_key_of_an_override_gets_the_nearest_one(key, meant):
    (line,) = refused({key: 1})
    assert line.endswith(f"; did you mean {meant}?") and len(line) < 200


def test_a_key_of_several_sections_gets_them_all_and_a_strange_one_none():
    (line,) = refused({"max_new_tokens": 1})
    assert line.endswith("did you mean rl.rollout.max_new_tokens, rejection_sampling.sampling.max_new_tokens, "
                         "iterative.sampling.max_new_tokens or evaluation.max_new_tokens?")  # fmt: skip
    assert refused({"xyzzy": 1}) == ["override xyzzy: expected a key of params.yaml, got 'xyzzy'; see params.yaml"]
    (line,) = refused({"rl.xyzzy": 1})
    assert line.endswith("got 'xyzzy'; the keys of rl are in params.yaml")


def test_an_unknown_key_of_the_file_gets_one_that_the_file_need_not_have():
    tree = read_yaml(DEFAULT)
    tree["data"]["sources"][0]["judg"] = "a:b"
    tree["rollout"] = {}
    with pytest.raises(ConfigError) as error:
        parse_params(tree)
    lines = str(error.value).splitlines()
    assert [line.partition("; ")[2] for line in lines] == ["did you mean data.sources.0.judge?", "did you mean rl.rollout?"]


def test_a_word_that_is_almost_one_of_several_gets_that():
    (line,) = refused({"alignment.method": "rejektion-sampling"})
    assert line.endswith("got 'rejektion-sampling'; did you mean rejection_sampling?")
    (line,) = refused({"alignment.method": "sarsa"})
    assert line.endswith("got 'sarsa'; correct it there or in the override")
