"""Values that don't fit together are all refused at once; an unknown key gets the nearest one."""

from __future__ import annotations

from typing import Any

import pytest
from clerk_params import CLERK_PARAMS

from flows.chain.overrides import check
from rlhf_core.config import (
    ConfigError,
    needs_pairs,
    parse_params,
    read_yaml,
    rows_needed,
    set_key,
)

DEFAULT = CLERK_PARAMS
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0, "normalization": "none"}


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
        ({"rl.environment": {}}, "rl.environment.path: expected one of path, tools and command, got none; keep one"),
        (
            {"rl.environment": {"path": "a.py:play", "tools": ["a.py:add"]}},
            "rl.environment.path: expected one of path, tools and command, got path and tools; keep one",
        ),
        (
            {"rl.environment": {"tools": ["a.py:add"], "claims": 2}},
            "rl.environment.claims: expected no value without command, got 2; remove it",
        ),
        (
            {"rl.environment": {"command": ["node", "a.js"], "agent_timeout": 300.0}},
            "rl.environment.agent_timeout: expected less than half of rl.deadlines.step=600, which ends the run, got 300; lower it",
        ),
        (
            {"rl.environment": {"command": ["node", "a.js"], "processes": 20, "claims": 6}, "rl.rollout.max_lag": 1},
            "rl.environment.processes: expected processes * claims of at least 512 with rollout.max_lag=1, for the episodes",
        ),
        (
            {"rl.environment": {"command": ["node", "a.js"], "credit": "turn"}},
            "rl.environment.credit: expected episode with command, whose score is of a whole episode, got turn; change one",
        ),
        (
            {"rl.environment": {"path": "a.py:play"}, "rl.rollout.min_new_tokens": 2},
            "rl.rollout.min_new_tokens: expected 0 with environment, got 2",
        ),
        (
            {"rl.environment": {"path": "a.py:play"}, "rl.rollout.max_lag": 2, "rl.rollout.last_tokens": 9},
            "rl.rollout.last_tokens: expected null with environment, got 9",
        ),
        (
            {"rl.reward.scorers": [JUDGE | {"kind": "environment"}], "rl.environment": {"tools": ["a.py:add"]}},
            "rl.reward.scorers: expected none of kind environment without rl.environment.path or rl.environment.command, which score, got",
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
            {"rl.rollout.quantization": "fp8", "model.dtype": "bfloat16"},
            "rl.correction.kind: expected tis, icepop, sequence_tis or sequence_mask with rollout.quantization fp8, got none; set it to",
        ),
        (
            {"rl.rollout.quantization": "fp8", "rl.correction.kind": "tis"},
            "rl.rollout.quantization: expected null with model.dtype float32, got fp8; set it to null or model.dtype to bfloat16",
        ),
        (
            {"rl.rollout.quantization": "fp8", "rl.correction.kind": "tis", "model.dtype": "bfloat16", "rl.rollout.backend": "pytorch"},
            "rl.rollout.quantization: expected null with backend pytorch, got fp8; change it or the backend",
        ),
        (
            {"rl.rollout.send_changes": True, "model.dtype": "bfloat16", "rl.rollout.weight_transfer": "nccl"},
            "rl.rollout.send_changes: expected false with weight_transfer nccl, got true; only gloo has it, so change one",
        ),
        (
            {"rl.rollout.max_lag": 1, "rl.rollout.take_turns": True},
            "rl.rollout.take_turns: expected auto or false with max_lag=1, got true",
        ),
        (
            {"rl.rollout.max_lag": 2, "rl.rollout.top_k": 5},
            "rl.rollout.max_lag: expected 0 with top_p, top_k or min_new_tokens and without a correction, got 2; set correction.kind",
        ),
        (
            {"rl.rollout.max_lag": 1, "rl.rollout.last_tokens": 100},
            "rl.rollout.last_tokens: expected null with max_lag=1, got 100; remove it or raise max_lag",
        ),
        (
            {"rl.rollout.weight_transfer": "nccl", "rl.rollout.backend": "pytorch"},
            "rl.rollout.weight_transfer: expected auto or gloo with backend pytorch, got nccl",
        ),
        (
            {"rl.rollout.weight_transfer": "ipc", "rl.rollout.max_lag": 1},
            "rl.rollout.weight_transfer: expected auto, gloo or nccl with max_lag=1, got ipc",
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
        ({"rl.policy_loss": "dppo_kl", "rl.dual_clip": 3.0}, "rl.dual_clip: expected null with policy_loss dppo_kl, got 3.0"),
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
        ({"rl.prompt_weights": {"clerk": -1.0}}, "rl.prompt_weights: expected weights of at least 0, got {'clerk': -1.0}"),
        ({"rl.prompt_weights": {"clerk": 0.0}}, "rl.prompt_weights: expected a source of prompts with a weight above 0, got"),
        (
            {"rl.evaluation.sources": ["clark"], "rl.evaluation.every": 5},
            "rl.evaluation.sources: expected sources of prompts, ['clerk'], got ['clark']; correct",
        ),
        (
            {"rl.evaluation.sources": ["clerk", "clerk"], "rl.evaluation.every": 5},
            "rl.evaluation.sources: expected each source once, got ['clerk', 'clerk']",
        ),
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
            {"reward.path": "a/folder"},
            "rl.ppo.critic_init: expected sft with reward.path, got reward_model_trunk; set it to sft, because a ready-made reward model",
        ),
        ({"reward.path": "v2.0.0", "reward.ensemble": 2}, "reward.ensemble: expected 1 with reward.path, which names one model, got 2"),
        ({"reward.path": "a/folder", "reward.enabled": False}, "reward.path: expected null with reward.enabled false, got a/folder; set"),
        ({"sft.enabled": False}, "sft.enabled: expected true without model.path, got false; set model.path to the model to start from"),
        ({"alignment.method": "external"}, "external.path: expected the folder or the Hugging Face name of the policy, got null; set it"),
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
    assert params.evaluation_scorers == ("rl.reward.scorers", [])


def test_without_a_reward_model_the_evaluation_scores_by_the_scorers_that_are_left():
    reward_model = JUDGE | {"name": "reward_model", "kind": "reward_model"}
    scorers = [reward_model, reward_model | {"name": "other", "path": "a/folder"}, JUDGE]
    params = check(DEFAULT, NO_REWARD_MODEL | {"alignment.method": "dpo", "rl.reward.scorers": scorers})
    assert [s.name for s in params.evaluation_scorers[1]] == ["other", "judge"]
    params = check(DEFAULT, {"alignment.method": "dpo", "rl.reward.scorers": scorers})
    assert [s.name for s in params.evaluation_scorers[1]] == ["reward_model", "other", "judge"]


def test_the_evaluation_may_have_its_own_scorers_engine_and_stop_and_is_else_like_rl():
    likewise = check(DEFAULT, {"rl.rollout.stop": ["\n"]})
    assert (likewise.evaluation_scorers, likewise.evaluation_backend) == (("rl.reward.scorers", likewise.rl.reward.scorers), "vllm")
    assert likewise.evaluation_stop == ["\n"] and [*likewise.scorers_in_use] == ["rl.reward.scorers"]
    own = {"evaluation.scorers": [JUDGE], "evaluation.backend": "pytorch", "evaluation.stop": []}
    apart = check(DEFAULT, {"rl.rollout.stop": ["\n"], **own})
    assert [s.name for s in apart.evaluation_scorers[1]] == ["judge"] and [*apart.scorers_in_use] == [
        "evaluation.scorers",
        "rl.reward.scorers",
    ]
    assert (apart.evaluation_backend, apart.evaluation_stop, apart.rl.rollout.backend) == ("pytorch", [], "vllm")


def test_with_its_own_scorers_the_evaluation_of_another_method_reads_nothing_of_rl():
    faulty = {"alignment.method": "dpo", "rl.reward.scorers": [JUDGE, JUDGE]}
    assert [line.partition(": ")[2][:32] for line in refused(faulty)] == ["rl.reward.scorers: expected diffe"[:32]]
    assert check(DEFAULT, faulty | {"evaluation.scorers": []}).evaluation_scorers == ("evaluation.scorers", [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"evaluation.scorers": [JUDGE, JUDGE]}, "evaluation.scorers: expected different names"),
        (
            NO_REWARD_MODEL | {"alignment.method": "dpo", "evaluation.scorers": [{"name": "own", "kind": "reward_model"}]},
            "evaluation.scorers: expected none of kind reward_model without a path while reward.enabled is false",
        ),
        ({"evaluation.scorers": [{"name": "own", "kind": "reward_model", "members": 2}]}, "evaluation.scorers: expected members=1 of own"),
        (
            {"evaluation.backend": "pytorch", "cluster.inference_ranks_per_model": 2, "cluster.inference_ranks": 2},
            "evaluation.backend: expected vllm with cluster.inference_ranks_per_model=2, got pytorch",
        ),
        ({"evaluation.stop": [""]}, "evaluation.stop.0"),
    ],
)
def test_what_the_evaluation_can_not_use_is_refused(changes, message):
    assert any(message in line for line in refused(changes)), refused(changes)


def test_rl_without_anything_to_be_rewarded_is_refused():
    (line,) = refused({"rl.reward.scorers": []})
    assert line.startswith("override: rl.reward.scorers: expected one with a weight other than 0, got none")


PREFERENCES = [("preference", "test"), ("preference", "train")]
GIVEN = {"model.path": "a/folder", "sft.enabled": False}


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
        (GIVEN | NO_REWARD_MODEL | {"alignment.method": "dpo"}, [("preference", "train"), ("prompt", "test")], True),
        (GIVEN | {"rl.ptx.coef": 0.1}, [*PREFERENCES, ("prompt", "test"), ("prompt", "train"), ("sft", "train")], True),
        (
            GIVEN | {"reward.path": "other/folder", "alignment.method": "external", "external.path": "third/folder"},
            [("preference", "test"), ("prompt", "test")],
            True,
        ),
    ],
)
def test_data_must_have_the_rows_that_the_method_reads(changes, rows, pairs):
    params = check(DEFAULT, changes)
    assert (list(rows_needed(params)), needs_pairs(params)) == (rows, pairs)


def test_settings_of_a_training_that_is_left_out_are_not_checked():
    too_small = {"sft.ranks": 4, "sft.batch_size": 2, "reward.ranks": 4, "reward.batch_size": 2}
    assert len(refused(too_small)) == 2
    given = GIVEN | {"reward.path": "other/folder", "rl.ppo.critic_init": "sft"}
    assert check(DEFAULT, too_small | given).reward.is_registered is False
    assert [check(DEFAULT, given | {"reward.path": name}).reward.is_registered for name in ("registry", "v12.0.0")] == [True, True]


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


@pytest.mark.parametrize("key", ["rl.rollout.enable_expert_parallel", "rl.trainer.expert_model_parallel_size", "rl.expert_parallel"])
def test_a_key_of_expert_parallelism_gets_what_divides_experts_here(key: str):
    (line,) = refused({key: 2})
    assert "experts can't be put on different GPUs as a whole: rl.rollout.tensor_parallel_size divides each of them" in line
    tree = read_yaml(DEFAULT)
    tree["rl"]["rollout"]["expert_parallel_size"] = 2
    with pytest.raises(ConfigError, match=r"rl\.rollout\.expert_parallel_size: .*tensor_parallel_size divides each of them"):
        parse_params(tree)


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


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:6411", "ray://head:10001", "auto", "", "http://", "https://:8265", "http://head:port", "http://he ad:8265", "head"],
)
def test_a_cluster_address_is_that_of_a_dashboard(address: str):
    message = rf"cluster\.address: expected http://HOST:PORT or https://HOST:PORT of Ray's dashboard.*, got {address}; correct it, or set"
    with pytest.raises(ConfigError, match=message):
        check(DEFAULT, {"cluster.address": address})
    for right in ("http://127.0.0.1:8265", "https://ray.example", "http://[::1]:8265/", None):
        assert check(DEFAULT, {"cluster.address": right}).cluster.address == right
