"""rl.distillation: what can't be distilled is refused before anything starts, and what a run without a reward needs."""

from __future__ import annotations

from typing import Any

import pytest
from clerk_params import CLERK_PARAMS

from flows.chain.overrides import check
from rlhf_core.config import ConfigError, Params, curve_columns, rows_needed

TEACHERS = {"teachers": [{"path": "my/teacher"}]}
JUDGE = {"name": "judge", "kind": "judge", "weight": 0.0, "normalization": "none"}
ALONE = {
    **{"rl.algorithm": "grpo", "rl.kl.placement": "loss", "rl.kl.estimator": "k3"},
    **{"rl.distillation": TEACHERS, "rl.reward.scorers": [JUDGE], "reward.enabled": False, "rl.ppo.critic_init": "sft"},
}
REWARDED = {"rl.distillation": TEACHERS}
SERVICE = {"url": "http://127.0.0.1:8001/v1", "model": "large", "api_key_env": "TEACHERS_KEY"}
TOGETHER = [{"roles": ["policy", "teachers"]}, {"roles": ["critic", "reference", "reward_models"]}]


def made(**changes: Any) -> Params:
    return check(CLERK_PARAMS, ALONE | changes)


def test_distillation_needs_no_reward_and_has_its_role_and_its_column():
    rl = made().rl
    assert (rl.title, rl.learns_from_reward, rl.teaches_whole_distributions) == ("distillation", False, True)
    assert rl.roles == ("policy", "reference", "teachers") and "distillation_loss" in curve_columns(rl)
    assert ("prompt", "train") in rows_needed(made())
    beside = check(CLERK_PARAMS, REWARDED).rl
    assert (beside.title, beside.learns_from_reward) == ("ppo and distillation", True)
    assert made(**{"rl.reward.scorers": [], "evaluation.scorers": []}).rl.title == "distillation"


def test_teachers_apart_from_the_policy_compute_before_the_update():
    sampled = TEACHERS | {"loss": "sampled"}
    assert [g.roles for g in made(**{"rl.distillation": sampled, "rl.placement": "two_groups"}).rl.role_groups] == [
        ["policy", "reference"],
        ["teachers"],
    ]
    top = {"rl.distillation": TEACHERS | {"top_k": 8}, "rl.placement": "two_groups"}
    assert [g.roles for g in made(**top).rl.role_groups] == [["policy", "reference"], ["teachers"]]
    assert made(**{"rl.placement": TOGETHER}).rl.role_groups[0].roles == ["policy", "teachers"]


def test_the_teachers_of_a_run_are_named_by_their_keys():
    two = {"teachers": [{"path": "a"}, {"path": "b", "weight": 2.0}]}
    found = made(**{"rl.distillation": two})
    assert found.teachers == {"rl.distillation.teachers.0.path": "a", "rl.distillation.teachers.1.path": "b"}
    assert made(**{"alignment.method": "dpo"}).teachers == {}


def test_a_service_takes_no_rank_and_its_key_is_visible_to_stages():
    distillation = {"teachers": [{"service": SERVICE}, {"path": "a", "weight": 3.0}], "loss": "sampled"}
    both, alone = (
        made(**{"rl.distillation": distillation | {"teachers": t}}) for t in (distillation["teachers"], distillation["teachers"][:1])
    )
    assert "teachers" in both.rl.roles and "teachers" not in alone.rl.roles
    assert both.teachers == {"rl.distillation.teachers.1.path": "a"} and both.rl.distillation.early_weights == [3.0, 1.0]
    assert list(both.teacher_services) == ["rl.distillation.teachers.0.service"] and "TEACHERS_KEY" in both.environment
    assert made(**{"alignment.method": "dpo"}).teacher_services == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rl.distillation": {"teachers": []}}, "rl.distillation.teachers: expected List should have at least 1 item"),
        ({"rl.distillation": TEACHERS | {"loss": "kl"}}, "rl.distillation.loss: expected 'sampled', 'reverse_kl', 'forward_kl' or 'jsd'"),
        ({"rl.distillation": TEACHERS | {"beta": 0.1}}, "rl.distillation.beta: expected 0.5, the default, with loss reverse_kl, got 0.1"),
        ({"rl.distillation": TEACHERS | {"loss": "jsd", "beta": 1.0}}, "rl.distillation.beta: expected less than 1"),
        ({"rl.distillation": TEACHERS | {"loss": "sampled", "top_k": 4}}, "rl.distillation.top_k: expected null with loss sampled, got 4"),
        ({"rl.distillation": {"teachers": [{}]}}, "rl.distillation.teachers.0.path: expected either a path or a service, got none"),
        ({"rl.distillation": {"teachers": [{"path": "a", "service": SERVICE}]}}, "expected either a path or a service, got both"),
        ({"rl.distillation": {"teachers": [{"service": SERVICE | {"url": "me"}}]}}, "service.url: expected http:// or https://"),
        (
            {"rl.distillation": {"teachers": [{"service": SERVICE | {"api_key_file": "key"}}]}},
            "rl.distillation.teachers.0.service.api_key_file: expected an absolute path",
        ),
        ({"rl.distillation": {"teachers": [{"service": SERVICE}]}}, "rl.distillation.top_k: expected a number with a service and loss"),
        (
            {"rl.distillation": {"teachers": [{"service": SERVICE}], "loss": "sampled"}, "rl.rollout.temperature": 0.7},
            "rl.rollout.temperature: expected 1.0 with a service in distillation.teachers, got 0.7",
        ),
        ({"rl.distillation": TEACHERS | {"teacher_template": "{label}"}}, "teacher_template: expected {prompt} in it, got none"),
        (
            {"rl.distillation": TEACHERS | {"teacher_template": "{prompt}"}, "rl.environment": {"path": "agents/guess.py:play"}},
            "rl.distillation.teacher_template: expected null with environment",
        ),
        (
            {"rl.distillation": TEACHERS | {"top_k": 4}, "rl.correction.kind": "tis"},
            "rl.correction.kind: expected none without a scorer with a weight",
        ),
        ({"rl.placement": "two_groups"}, "rl.placement: expected teachers in the policy's group with distillation.loss reverse_kl"),
        (
            {"rl.trainer.ranks": 2, "rl.trainer.sequence_parallel": 2},
            "rl.distillation.loss: expected sampled with trainer.sequence_parallel=2, got reverse_kl",
        ),
        ({"rl.algorithm": "ppo"}, "rl.algorithm: expected grpo without a scorer with a weight in reward.scorers, got ppo"),
        ({"rl.algorithm": "remax"}, "rl.algorithm: expected grpo without a scorer with a weight in reward.scorers, got remax"),
        ({"rl.dynamic_sampling.enabled": True}, "rl.dynamic_sampling.enabled: expected false without a scorer with a weight"),
        ({"rl.kl.placement": "reward"}, "rl.kl.placement: expected loss without a scorer with a weight"),
        ({"rl.correction.kind": "tis"}, "rl.correction.kind: expected none without a scorer with a weight"),
        (
            {"rl.rollout.quantization": "fp8", "model.dtype": "bfloat16"},
            "rl.rollout.quantization: expected null without a scorer with a weight in reward.scorers and with distillation.loss reverse_kl",
        ),
        ({"rl.evaluation.every": 5}, "rl.evaluation.metric: expected a scorer's name without a scorer with a weight"),
        ({"rl.distillation": None}, "rl.reward.scorers: expected one with a weight other than 0, got none"),
        ({"alignment.method": "distillation"}, "alignment.method: expected rl, whose section has distillation, got distillation; set"),
        ({"rl.placement": [{"roles": ["policy", "reference"]}]}, "rl.placement: expected a group for each role of the run, got none for"),
    ],
)
def test_what_cannot_be_distilled_is_refused(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError) as refusal:
        made(**changes)
    assert message in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"rl.correction.kind": "tis", "rl.distillation": TEACHERS | {"loss": "sampled"}},
        {"rl.evaluation.every": 5, "rl.evaluation.metric": "judge"},
        {"rl.kl.coef": 0.0, "rl.trainer.offload_frozen": True},
    ],
)
def test_what_can_be_distilled_is_not_refused(changes: dict[str, Any]):
    assert made(**changes).rl.title == "distillation"


def test_a_correction_is_not_asked_for_where_it_is_refused():
    with pytest.raises(ConfigError) as refusal:
        made(**{"rl.distillation.top_k": 8, "rl.rollout.quantization": "fp8", "model.dtype": "bfloat16"})
    assert "rl.rollout.quantization: expected null" in str(refusal.value) and "rl.correction.kind" not in str(refusal.value)
