"""From scores to advantages, on batches small enough to do by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import tiny_params

from rlhf_core.algorithms.advantages import whiten
from rlhf_core.config import ScoreConfig
from rlhf_core.trainers.credit import Moments, RewardNormalizer, assign_credit, explained_variance
from rlhf_core.types import RolloutBatch

NAN, INF = math.nan, math.inf


def rollouts(scores: list[float], lengths: list[int], *, finished: list[bool] | None = None, groups: list[int] | None = None, **tensors):
    """A batch with R = 3; log-probabilities, reference and values are zeros unless given."""
    count = len(scores)
    zeros = torch.zeros(count, 3)
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    base = {
        "prompt_ids": torch.full((count, 2), 5), "prompt_mask": torch.ones(count, 2, dtype=torch.bool),
        "response_ids": torch.full((count, 3), 6), "response_mask": mask,
        "rollout_logprobs": zeros, "old_logprobs": zeros, "ref_logprobs": zeros, "values": zeros,
        "scores": torch.tensor(scores), "group_ids": torch.tensor(groups or list(range(count))),
        "finished": torch.tensor(finished or [True] * count), "policy_versions": torch.zeros(count, dtype=torch.long),
    }  # fmt: skip
    return RolloutBatch(**{**base, **tensors})


def rl(algorithm: str, **changes):
    plain = {"rl.reward.normalization": "none", "rl.ppo.whiten_advantages": False, "rl.kl.coef": 0.0}
    return tiny_params(**{"rl.algorithm": algorithm, **plain, **changes}).rl


def credit(batch: RolloutBatch, config):
    return assign_credit(batch, config, RewardNormalizer(config.reward))


# Scores to rewards


def score_config(normalization: str, clip: float | None = None) -> ScoreConfig:
    return ScoreConfig(normalization=normalization, normalization_samples=16, clip=clip, no_eos_penalty=0.0, max_unscored_fraction=0.1)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=8), max_size=6))
def test_moments_merged_part_by_part_equal_all_at_once(parts: list[list[float]]):
    merged = Moments()
    for part in parts:
        merged = merged.merge(torch.tensor([*part, NAN, INF, -INF]))
    everything = torch.tensor([x for part in parts for x in part], dtype=torch.float64)
    assert merged.count == len(everything)
    if len(everything):
        assert merged.mean == pytest.approx(float(everything.mean()), rel=1e-9, abs=1e-9)
        assert merged.std == pytest.approx(float(everything.std(correction=0)), rel=1e-6, abs=1e-6)
    else:
        assert (merged.mean, merged.std) == (0.0, 0.0)


def test_initial_normalisation_stays_with_the_first_samples():
    normalizer = RewardNormalizer(score_config("initial"))
    normalizer.calibrate(torch.tensor([1.0, 3.0, NAN]))  # mean 2, std 1
    assert normalizer(torch.tensor([2.0, 5.0, 0.5])).tolist() == [0.0, 3.0, -1.5]
    assert normalizer(torch.tensor([100.0])).tolist() == [98.0]


def test_running_normalisation_has_seen_the_batch_it_normalises():
    normalizer = RewardNormalizer(score_config("running"))
    assert normalizer(torch.tensor([1.0, 3.0])).tolist() == [-1.0, 1.0]
    # 1, 3, 5, 7: mean 4, variance (9 + 1 + 1 + 9) / 4 = 5
    torch.testing.assert_close(normalizer(torch.tensor([5.0, 7.0, NAN])), torch.tensor([1.0, 3.0, NAN]) / 5**0.5, equal_nan=True)


def test_no_normalisation_only_clips():
    normalizer = RewardNormalizer(score_config("none", clip=2.0))
    normalizer.calibrate(None)
    assert normalizer(torch.tensor([-7.0, 1.5, 2.5])).tolist() == [-2.0, 1.5, 2.0]


def test_clipping_comes_after_normalising():
    normalizer = RewardNormalizer(score_config("initial", clip=2.0))
    normalizer.calibrate(torch.tensor([10.0, 12.0]))
    assert normalizer(torch.tensor([11.5, 20.0, 2.0])).tolist() == [0.5, 2.0, -2.0]


def test_reward_failures_stay_unknown_and_are_never_a_number():
    for normalization in ("initial", "running", "none"):
        normalizer = RewardNormalizer(score_config(normalization, clip=5.0))
        normalizer.calibrate(torch.tensor([1.0, 3.0]))
        assert normalizer(torch.tensor([NAN, INF, -INF, 1.0])).isnan().tolist() == [True, True, True, False]


def test_calibrating_on_nothing_but_failures_is_refused():
    with pytest.raises(ValueError, match="initial policy's 2 samples, got none that is finite"):
        RewardNormalizer(score_config("initial")).calibrate(torch.tensor([NAN, INF]))


# PPO


def test_ppo_advantages_and_returns_by_hand():
    """CORRECTNESS, reward placement: the score is at the last sampled token, the KL at each."""
    batch = rollouts(
        [2.0, 1.0],
        [3, 2],
        old_logprobs=torch.tensor([[-1.0, -1.0, -1.0], [-2.0, -1.0, 9.0]]),
        ref_logprobs=torch.tensor([[-1.5, -1.0, -0.5], [-1.0, -1.0, NAN]]),
        values=torch.tensor([[0.5, 1.0, 1.5], [0.0, 0.5, 99.0]]),
    )
    config = rl("ppo", **{"rl.kl.coef": 0.2, "rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 0.5})
    train, metrics = credit(batch, config)
    # Row 0: KL 0.5, 0, -0.5, so r = -0.1, 0, 0.1 + 2.  d2 = 2.1 - 1.5 = 0.6; d1 = 0 + 1.5 - 1 = 0.5; d0 = -0.1 + 1 - 0.5 = 0.4
    #        A2 = 0.6, A1 = 0.5 + 0.5 * 0.6 = 0.8, A0 = 0.4 + 0.5 * 0.8 = 0.8
    # Row 1: KL -1, 0, so r = 0.2, 1.  d1 = 1 - 0.5 = 0.5, d0 = 0.2 + 0.5 - 0 = 0.7;  A1 = 0.5, A0 = 0.7 + 0.25 = 0.95
    torch.testing.assert_close(train.advantages, torch.tensor([[0.8, 0.8, 0.6], [0.95, 0.5, 0.0]]))
    torch.testing.assert_close(train.returns, torch.tensor([[1.3, 1.8, 2.1], [0.95, 1.0, 0.0]]))
    assert torch.equal(train.old_values, batch.values)
    # Rewards with the KL: 2 - 0.2 * 0 = 2 and 1 - 0.2 * -1 = 1.2
    assert metrics["reward_mean"] == pytest.approx(1.6)


def test_kl_in_the_loss_leaves_the_rewards_alone():
    batch = rollouts([2.0], [2], old_logprobs=torch.tensor([[-1.0, -1.0, 0.0]]), ref_logprobs=torch.tensor([[-3.0, -3.0, 0.0]]))
    config = rl("ppo", **{"rl.kl.coef": 0.2, "rl.kl.placement": "loss", "rl.kl.estimator": "k3", "rl.ppo.gae_lambda": 1.0})
    train, metrics = credit(batch, config)
    assert train.advantages.tolist() == [[2.0, 2.0, 0.0]]
    assert metrics["reward_mean"] == 2.0


def test_no_eos_a_cut_off_response_is_penalised_in_normalised_units():
    config = rl("ppo", **{"rl.reward.normalization": "initial", "rl.reward.no_eos_penalty": 0.75, "rl.reward.clip": None})
    normalizer = RewardNormalizer(config.reward)
    normalizer.calibrate(torch.tensor([0.0, 20.0]))  # mean 10, std 10
    train, _ = assign_credit(rollouts([30.0, 30.0], [1, 3], finished=[True, False]), config, normalizer)
    assert train.returns[0, 0] == 2.0
    assert train.returns[1, 2] == 2.0 - 0.75


def test_whitening_is_over_the_whole_batch():
    values = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.1, 77.0], [1.0, 55.0, 66.0]])
    batch = rollouts([1.0, -1.0, 4.0], [3, 2, 1], values=values)
    plain, _ = credit(batch, rl("ppo"))
    white, _ = credit(batch, rl("ppo", **{"rl.ppo.whiten_advantages": True}))
    torch.testing.assert_close(white.advantages, whiten(plain.advantages, batch.response_mask))
    kept = white.advantages[batch.response_mask]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-6)
    assert float(kept.std()) == pytest.approx(1, abs=1e-6)
    assert torch.equal(white.returns, plain.returns)  # CORRECTNESS, value clip: returns come from unwhitened advantages


# GRPO, RLOO


def test_rloo_by_hand_with_the_kl_subtracted_before_the_baseline():
    batch = rollouts(
        [1.0, 3.0, 0.0, 0.0],
        [2, 3, 1, 1],
        groups=[7, 7, 4, 4],
        old_logprobs=torch.tensor([[1.0, 1.0, 50.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [4.0, 50.0, 50.0]]),
    )
    train, metrics = credit(batch, rl("rloo", **{"rl.kl.coef": 0.5}))
    # Rewards less KL: 1 - 0.5 * 2 = 0 and 3; 0 and 0 - 0.5 * 4 = -2. Each less the other of its group.
    assert train.advantages.tolist() == [[-3.0, -3.0, 0.0], [3.0, 3.0, 3.0], [2.0, 0.0, 0.0], [-2.0, 0.0, 0.0]]
    assert not train.returns.any()
    assert metrics["reward_mean"] == (0 + 3 + 0 - 2) / 4


def test_grpo_by_hand_with_the_kl_subtracted_before_the_baseline():
    old_logprobs = torch.zeros(3, 3)
    old_logprobs[0] = torch.tensor([1.0, 1.0, 50.0])
    batch = rollouts([1.0, 1.0, 4.0], [2, 1, 3], groups=[0, 0, 0], old_logprobs=old_logprobs)
    config = {"rl.kl.coef": 0.5, "rl.grpo.group_size": 2}
    centred, _ = credit(batch, rl("grpo", **config, **{"rl.grpo.normalize_std": False}))
    # Rewards less KL: 0, 1, 4; mean 5/3
    assert centred.advantages[:, 0].tolist() == pytest.approx([-5 / 3, -2 / 3, 7 / 3])
    scaled, _ = credit(batch, rl("grpo", **config))
    # Unbiased variance (25 + 4 + 49) / 9 / 2 = 13/3
    assert scaled.advantages[:, 0].tolist() == pytest.approx([x / (13 / 3) ** 0.5 for x in (-5 / 3, -2 / 3, 7 / 3)])
    assert scaled.advantages[1].tolist()[1:] == [0.0, 0.0]


# What could not be scored


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "rloo"])
def test_reward_failures_are_masked_and_change_nothing_for_the_others(algorithm: str, bad: float):
    """Row 1 could not be scored: policy and critic get no token of it, and its group, statistics and mean are as without it."""
    config = rl(algorithm, **{"rl.kl.coef": 0.1, "rl.ppo.whiten_advantages": True, "rl.reward.normalization": "running"})
    tensors = {
        name: torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
        for k, name in enumerate(("old_logprobs", "ref_logprobs", "values"))
    }
    scores, lengths, groups = [1.0, bad, 2.0, 0.5], [3, 3, 2, 3], [0, 0, 0, 0]
    train, metrics = credit(rollouts(scores, lengths, groups=groups, **tensors), config)
    others = [0, 2, 3]
    kept, kept_metrics = credit(
        rollouts([scores[i] for i in others], [lengths[i] for i in others], groups=[0] * 3, **{n: t[others] for n, t in tensors.items()}),
        config,
    )
    assert not train.response_mask[1].any()
    assert not train.advantages[1].any() and not train.returns[1].any()
    for name in ("advantages", "returns", "response_mask"):
        torch.testing.assert_close(getattr(train, name)[others], getattr(kept, name))
    assert metrics == pytest.approx(kept_metrics)
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_batch_that_could_not_be_scored_at_all_teaches_nothing():
    train, _ = credit(rollouts([NAN, NAN], [3, 2]), rl("ppo", **{"rl.ppo.whiten_advantages": True}))
    assert not train.response_mask.any()
    assert train.advantages.tolist() == train.returns.tolist() == [[0.0] * 3] * 2


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, False], [True, True, False]])
    returns = torch.tensor([[0.0, 2.0, 50.0], [4.0, 6.0, 50.0]])  # variance 5
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.ones(2, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([[1.0, 1.0, 0.0], [5.0, 5.0, 0.0]]), returns, mask) == pytest.approx(1 - 1 / 5)
    assert explained_variance(returns, torch.ones(2, 3), mask) == 0.0
