"""params.yaml is refused with the key's path, what was expected and what to do."""

from __future__ import annotations

import copy
import re
from typing import Any, get_args

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config import (
    ConfigError,
    ScorerConfig,
    load_params,
    number_of,
    parse_params,
    read_yaml,
    set_key,
)
from rlhf_core.config.scorers import KIND_FIELDS

DEFAULT = CLERK_PARAMS


def changed(key: str, value: Any) -> dict[str, Any]:
    tree = copy.deepcopy(read_yaml(DEFAULT))
    set_key(tree, key, value)
    return tree


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
            f"params: rl.algorithm: expected {', '.join(map(repr, [*ALGORITHMS][:-1]))} or {[*ALGORITHMS][-1]!r}, got 'sarsa'",
        ),
        ("data.sources.0.weight", 0, "params: data.sources.0.weight: expected greater than 0, got 0"),
        (
            "gate.llm_judge",
            {"pairs": 9},
            "params: gate.llm_judge.pairs: expected at least min_pairs=200, got 9; raise it, or lower min_pairs",
        ),
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


ASKED = {"url": "http://a/v1", "model": "m"}
LORA = {"rank": 2, "alpha": 4.0, "dropout": 0.0, "target_modules": "all-linear"}
ONE_STEP = {"rl.minibatch_size": 256, "rl.kl.placement": "loss", "rl.kl.estimator": "k3"}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "from_update"),
        ({"rl.kl.placement": "reward", "rl.kl.coef": 0.0}, "from_update"),
        ({"rl.rollout.min_new_tokens": 3}, "from_update"),
        ({"rl.minibatch_size": 128}, "recompute"),
        ({"rl.ppo_epochs": 2}, "recompute"),
        ({"rl.kl.placement": "reward"}, "recompute"),
        ({"rl.correction.kind": "tis"}, "recompute"),
        ({"rl.rollout.top_p": 0.9}, "recompute"),
        ({"rl.rollout.top_k": 20}, "recompute"),
        ({"rl.rollout.max_lag": 1}, "from_engine"),
        ({"rl.rollout.max_lag": 1, "rl.correction.kind": "tis"}, "recompute"),
        ({"rl.algorithm": "ppo", "rl.ppo.critic_warmup_steps": 6}, "recompute"),
        ({"rl.algorithm": "ppo", "rl.ppo.critic_warmup_steps": 5}, "from_update"),
    ],
)
def test_old_log_probabilities_of_a_single_optimizer_step_come_from_the_update(changes: dict, expected: str):
    tree = copy.deepcopy(read_yaml(DEFAULT))
    for key, value in (ONE_STEP | changes).items():
        set_key(tree, key, value)
    assert parse_params(tree).rl.old_logprobs_source(step=5) == expected


REFRESHED, ROUNDED = {"rl.kl.refresh_reference_every": 5}, {"rl.lora": LORA | {"quantize": "nf4"}}
NO_REFERENCE = {"rl.kl.coef": 0.0, "rl.kl.measure": False} | dict.fromkeys(("rl.monitor.token_kl", "rl.monitor.frontier", "rl.monitor.kl"))


@pytest.mark.parametrize(
    ("placement", "changes", "expected"),
    [
        ("apart", {}, False),  # the reference reads the SFT model's files
        ("apart", REFRESHED, True),
        ("apart", ROUNDED, True),
        ("apart", {"rl.lora": LORA}, False),
        ("apart", ROUNDED | NO_REFERENCE, False),
        ("together", REFRESHED, False),
        ("two_groups", ROUNDED, False),  # in the policy's group
    ],
)
def test_whole_weights_go_to_a_reference_elsewhere_only(placement: str, changes: dict, expected: bool):
    tree = changed("rl.placement", placement)
    for key, value in changes.items():
        set_key(tree, key, value)
    assert parse_params(tree).rl.sends_reference is expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (scorer("function"), "path: expected a value for a scorer of kind function, got none; set it"),
        (scorer("regex"), "pattern: expected a value for a scorer of kind regex, got none; set it"),
        (scorer("length"), "target_length: expected a value for a scorer of kind length, got none; set it"),
        (scorer("http"), "url: expected a value for a scorer of kind http, got none; set it"),
        *(
            (scorer("http", url=url), "url: expected http:// or https:// with a host, without a password or #, got")
            for url in (
                "ftp://a/b",
                "http://",
                "judge:80",
                "http://a:x/",
                "http://a/#b",
                "http://a b/",
                "http://[::1",
                "//a",
            )
        ),
        (scorer("http", url="http://a", api_key_env="A", api_key_file="/b"), "api_key_file: expected none with api_key_env=A, got '/b'"),
        (scorer("http", url="http://a", api_key_file="key"), "api_key_file: expected an absolute path outside the project, got 'key'"),
        (scorer("http", url="http://a", request_timeout=60.0), "request_timeout: expected less than timeout=60.0, got 60.0; lower it"),
        (scorer("llm_judge", **ASKED, scale=[5, 5]), "scale: expected the worst and then a higher best score, got [5, 5]"),
        (scorer("llm_judge", **ASKED, mode="pairwise", scale=[1, 5]), "scale: expected none with mode pairwise, got [1, 5]; remove it"),
        (scorer("llm_judge", **ASKED, criteria=[{"criterion": "x"}]), "criteria: expected none with mode pointwise, got 1; remove them"),
        (scorer("llm_judge", **ASKED, budget_cost=3.0), "prices: expected those of the model with budget_cost=3.0, got none; add them"),
        (scorer("llm_judge", **ASKED, request={"n": 2}), "request: expected other keys than those of the question, got ['n']; remove"),
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
        scorer("code", seconds=0.5, memory_mib=128, reward="all"),
    ]
    assert len(parse_params(changed("rl.reward.scorers", scorers)).rl.reward.scorers) == 9


@pytest.mark.parametrize("kind", get_args(ScorerConfig.model_fields["kind"].annotation))
def test_every_kind_of_scorer_requires_its_own_fields_and_refuses_the_others(kind):
    values = {"path": "file.py:name", "label": 1, "steps": "sum", "pattern": "a+", "target_length": 5}
    values |= {"seconds": 0.5, "memory_mib": 128, "reward": "all"}
    values |= {"url": "http://judge:80/", "dialect": "openrlhf", "batch_size": 2, "concurrency": 2, "retries": 0, "request_timeout": 9.0}
    values |= {"api_key_env": "KEY", "api_key_file": "/run/key", "model": "judge-7b", "mode": "rubric", "scale": [0, 5]}
    values |= {"criteria": [{"criterion": "It is polite."}], "template": "judge.txt", "max_answer_tokens": 64, "request": {"top_p": 1.0}}
    values |= {"budget_tokens": 1000, "budget_cost": 2.5, "prices": {"input": 1.0, "output": 4.0}}
    beside = {
        "steps": {"path": "a/process/model"},
        "mode": {"criteria": values["criteria"]},
        "criteria": {"mode": "rubric"},
        "budget_cost": {"prices": values["prices"]},
    }  # of that kind
    assert set(values) == {field for known in KIND_FIELDS.values() for field in known}
    own = KIND_FIELDS.get(kind, {})
    required = {field: values[field] for field, needed in own.items() if needed}
    for field, value in values.items():
        without = {k: v for k, v in required.items() if k != field}
        given = {**required, field: value, **(beside.get(field, {}) if field in own else {})}
        for fields, refused in ((without, own.get(field, False)), (given, field not in own)):
            tree = changed("rl.reward.scorers", [scorer(kind, **fields)])
            tree["rl"]["environment"] = {"path": "agents/notebook.py:play"}
            if refused:
                with pytest.raises(ConfigError, match=rf"rl\.reward\.scorers\.0\.{field}: expected .* of kind {kind}"):
                    parse_params(tree)
            else:
                parse_params(tree)


JUDGE = scorer("judge")


def test_a_rewarded_rubric_of_the_rows_which_the_gate_cant_judge_needs_a_reason():
    tree = changed("rl.reward.scorers", [scorer("llm_judge", **ASKED, mode="rubric")])
    with pytest.raises(
        ConfigError, match=r"rl\.reward\.scorers: expected criteria of the judges \['llm_judge'\], got none: the gate can't"
    ):
        parse_params(tree)
    tree["gate"]["override"] = "each row has criteria of its own"
    assert list(parse_params(tree).rewarded_judges) == ["rl.reward.scorers.llm_judge"]
    tree["gate"]["override"] = None
    tree["rl"]["reward"]["scorers"] = [scorer("number"), scorer("llm_judge", **ASKED, mode="rubric") | {"weight": 0.0}]
    assert parse_params(tree).rewarded_judges == {}


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
        ({"rl.policy_loss": "sapo", "rl.algorithm": "grpo"}, "sequence_mean"),
        ({"rl.policy_loss": "dppo_tv"}, "token_mean"),
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
        (
            {"samples": OWN_SAMPLES | {"openings": []}},
            {},
            "source own: kind samples expects samples.openings or path, a file of prompts, got neither; set one of them",
        ),
        ({"path": "a.jsonl", "format": "prompt"}, {}, "kind samples expects samples.openings or path, a file of prompts, got both"),
        (
            {"path": "a.jsonl", "format": "prompt", "samples": OWN_SAMPLES | {"openings": []}},
            {},
            "source own: kind samples with a path expects samples.opening_tokens 0, got 16; remove it, for the file's prompts are whole",
        ),
        ({"path": "a.jsonl", "samples": OWN_SAMPLES | {"openings": []}}, {}, "kind samples with a path expects format prompt, got None"),
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


def test_a_number_has_its_noun_in_the_singular_or_the_plural():
    assert [number_of(n, "GPU") for n in (0, 1, 1.0, 2.0, 0.5, 1_500_000)] == [
        "0 GPUs",
        "1 GPU",
        "1 GPU",
        "2 GPUs",
        "0.5 GPUs",
        "1500000 GPUs",
    ]
    assert [number_of(n, "GPU that is", "GPUs that are") for n in (1, 2)] == ["1 GPU that is", "2 GPUs that are"]
