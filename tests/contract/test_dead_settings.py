"""Pairs of settings of which one leaves the other without effect: together refused by the dead one's key, each alone accepted."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.config import ConfigError, parse_params, read_yaml, set_key

DEFAULTS = read_yaml(CLERK_PARAMS)
JUDGE = {"name": "judge", "kind": "judge", "weight": 1.0}
GRPO = {"rl.algorithm": "grpo"}
AHEAD = {"rl.rollout.max_lag": 1}
MINIBATCHES = {"rl.minibatch_size": 64}
UNMEASURED = {"rl.kl.coef": 0.0, "rl.kl.measure": False, "rl.monitor": {"kl": None, "frontier": None, "token_kl": None}}


def limit(**values: Any) -> dict[str, Any]:
    return {"rl.monitor": UNMEASURED["rl.monitor"] | {"mine": {"metric": "entropy", "below": 0.1, "action": "warn", **values}}}


class Pair(NamedTuple):
    """dead: the key, and all changes that set it.    killer: changes that leave it without effect; instead: such that don't."""

    key: str
    dead: dict[str, Any]
    killer: dict[str, Any]
    instead: dict[str, Any]


# In the default params a batch has one optimizer step, a run 60 steps, and rollouts two engines.
PAIRS = [
    Pair("rl.ppo.critic_warmup_steps", {"rl.ppo.critic_warmup_steps": 60}, {}, {"rl.steps": 61}),
    Pair("rl.ppo.critic_warmup_steps", {"rl.ppo.critic_warmup_steps": 80}, {}, GRPO),
    Pair("rl.max_approx_kl", {"rl.max_approx_kl": 0.1}, {}, MINIBATCHES),
    Pair("rl.max_approx_kl", {"rl.max_approx_kl": 0.1}, AHEAD | {"rl.correction.kind": "tis"}, AHEAD),
    Pair("rl.dual_clip", {"rl.dual_clip": 3.0}, {}, {"rl.ppo_epochs": 2}),
    Pair("rl.rollout.recomputed_fraction", {"rl.rollout.recomputed_fraction": 0.5}, {"rl.kl.coef": 0.0}, {}),
    Pair("rl.rollout.recomputed_fraction", {"rl.rollout.recomputed_fraction": 0.5}, AHEAD, MINIBATCHES),
    Pair("rl.rollout.dispatch", {"rl.rollout.dispatch": "dynamic"}, {"rl.rollout.engines": 1}, {}),
    Pair("rl.rollout.max_lag", AHEAD, {"rl.steps": 1}, {"rl.steps": 2}),
    Pair("rl.rollout.send_changes", {"rl.rollout.send_changes": True}, {}, {"model.dtype": "bfloat16"}),
    Pair("rl.dynamic_sampling.max_rounds", {"rl.dynamic_sampling.max_rounds": 1}, GRPO | {"rl.dynamic_sampling.enabled": True}, GRPO),
    Pair("rl.kl.refresh_reference_every", {"rl.kl.refresh_reference_every": 60}, {}, {"rl.steps": 61}),
    Pair("rl.kl.refresh_reference_every", {"rl.kl.refresh_reference_every": 5}, {"rl.kl.coef": 0.0}, {}),
    Pair("rl.kl.target", {"rl.kl.target": 6.0}, {"rl.kl.coef": 0.0}, {}),
    Pair("rl.evaluation.metric", {"rl.evaluation.metric": "reward_model"}, {}, {"rl.evaluation.every": 10}),
    Pair("rl.evaluation.samples", {"rl.evaluation.samples": 4}, {}, {"rl.evaluation.every": 10}),
    Pair("rl.evaluation.sources", {"rl.evaluation.sources": ["clerk"]}, {}, {"rl.evaluation.every": 10}),
    Pair("rl.evaluation.pass_score", {"rl.evaluation.pass_score": 0.5}, {}, {"rl.evaluation.samples": 2, "rl.evaluation.every": 10}),
    Pair("rl.evaluation.keep_best", {"rl.evaluation.keep_best": True}, {}, {"rl.evaluation.every": 10}),
    Pair("rl.min_learning_rate_fraction", {"rl.min_learning_rate_fraction": 0.1}, {}, {"rl.schedule": "cosine"}),
    Pair("rl.trainer.offload_frozen", {"rl.trainer.offload_frozen": True}, UNMEASURED | GRPO | {"rl.reward.scorers": [JUDGE]}, {}),
    Pair("rl.monitor.mine.metric", limit(metric="clip_frac"), {}, MINIBATCHES),
    Pair("rl.monitor.mine.metric", limit(metric="policy_ratio_min"), {}, AHEAD),
    Pair("rl.monitor.mine.metric", limit(metric="clip_frac"), MINIBATCHES | {"rl.policy_loss": "sapo"}, MINIBATCHES),
    Pair("rl.monitor.mine.metric", limit(metric="explained_variance"), GRPO, {}),
    Pair("rl.monitor.mine.metric", limit(metric="stopped_early"), {}, MINIBATCHES | {"rl.max_approx_kl": 0.1}),
    Pair("rl.monitor.mine.metric", limit(metric="kl_coef"), {}, {"rl.kl.target": 6.0}),
    Pair("rl.monitor.mine.metric", limit(metric="kl_mean"), UNMEASURED, {}),
    Pair("rl.monitor.mine.from_step", limit(from_step=61), {}, {"rl.steps": 61}),
    Pair("rl.monitor.mine.from_step", limit(window=5, patience=3, from_step=55), {}, {"rl.steps": 61}),
    Pair("rl.monitor.mine.from_step", limit(metric="eval_score", patience=4), {"rl.evaluation.every": 25}, {"rl.evaluation.every": 15}),
    Pair("dpo.offload_frozen", {"dpo.offload_frozen": True}, {"alignment.method": "dpo", "dpo.loss": "simpo"}, {"alignment.method": "dpo"}),
    Pair(
        "kto.offload_frozen", {"kto.offload_frozen": True, "alignment.method": "kto"}, {"kto.reference": "live", "kto.lora": {}},
        {"kto.reference": "live"},
    ),
    Pair("dpo.reference", {"dpo.reference": "live", "alignment.method": "dpo"}, {"dpo.loss": "orpo", "dpo.nll_coef": 0.0}, {}),
]  # fmt: skip


def conflicts(*changes: dict[str, Any]) -> list[str]:
    tree = copy.deepcopy(DEFAULTS)
    for key, value in {key: value for change in changes for key, value in change.items()}.items():
        set_key(tree, key, copy.deepcopy(value))
    try:
        parse_params(tree)
    except ConfigError as error:
        return [line.removeprefix("params: ") for line in str(error).splitlines()]
    return []


def test_a_number_of_steps_that_epochs_give_is_checked_once_it_is_known():
    late = {
        "rl.steps": None,
        "rl.ppo.critic_warmup_steps": 9,
        "rl.kl.refresh_reference_every": 9,
        "rl.schedule": "wsd",
        "rl.warmup_steps": 9,
    }
    tree = copy.deepcopy(DEFAULTS)
    for key, value in late.items():
        set_key(tree, key, value)
    rl = parse_params(tree).rl
    assert rl.over_prompts(256 * 30).steps == 30
    with pytest.raises(ValueError, match=r"rl\.ppo\.critic_warmup_steps: expected less than steps=9") as refused:
        rl.over_prompts(256 * 9)
    assert "rl.kl.refresh_reference_every: expected less than steps=9, got 9" in str(refused.value)
    with pytest.raises(ValueError, match=r"rl\.decay_fraction: expected at most 0\.1"):
        rl.over_prompts(256 * 19)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair.key} {pair.killer}")
def test_a_setting_that_another_leaves_without_effect_is_refused(pair: Pair):
    (line,) = conflicts(pair.killer, pair.dead)
    assert line.startswith(f"{pair.key}: expected ") and "; " in line
    assert conflicts(pair.killer) == [], "the other alone"
    assert conflicts(pair.dead, pair.instead) == [], "the setting where it has an effect"


def test_the_default_limits_hold_for_a_run_of_any_length_and_method():
    assert conflicts({"rl.steps": 1} | GRPO) == []
    assert conflicts({"rl.steps": 1, "rl.monitor": {"clipping": {"above": 0.5}}}) == [], "as the default"
    (line,) = conflicts({"rl.monitor": {"clipping": {"above": 0.4}}})
    assert line.startswith(
        "rl.monitor.clipping.metric: expected one that can change, got clip_frac without several optimizer steps a batch"
    )


def test_policy_that_would_never_be_trained_is_refused_in_a_sentence():
    assert conflicts({"rl.ppo.critic_warmup_steps": 60}) == [
        "rl.ppo.critic_warmup_steps: expected less than steps=60, got 60; lower it, because the policy would never be trained"
    ]
