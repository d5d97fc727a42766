"""From scores to advantages, on batches small enough to do by hand."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.algorithms.advantages import whiten
from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config import CorrectionConfig
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl import credit
from rlhf_core.trainers.rl.credit import compute_advantages, explained_variance, sampling_logprobs
from rlhf_core.trainers.rl.metrics import batch_metrics
from rlhf_core.trainers.rl.monitor import MonitorState, observe
from rlhf_core.trainers.rl.state import Progress
from rlhf_core.types import Baseline, RolloutBatch, Sequences

NAN, INF = math.nan, math.inf


def rollouts(
    scores: list[float] | dict[str, list[float]],
    lengths: list[int],
    *,
    finished: list[bool] | None = None,
    groups: list[int] | None = None,
    baseline: list[float] | Baseline | None = None,
    **tensors,
):
    """A batch with R = 3, of one scorer unless named; log-probabilities, reference and values are zeros unless given."""
    named = scores if isinstance(scores, dict) else {"reward_model": scores}
    count = len(next(iter(named.values())))
    zeros = torch.zeros(count, 3)
    mask = torch.arange(3) < torch.tensor(lengths)[:, None]
    base = {
        "sequences": Sequences.of([[5, 5, *[6] * n] for n in lengths], [2] * count),
        "response_ids": torch.full((count, 3), 6), "response_mask": mask,
        "rollout_logprobs": zeros, "old_logprobs_source": "recompute",
        "old_logprobs": zeros, "sampler_logprobs": zeros, "ref_logprobs": zeros, "values": zeros,
        "components": {name: torch.tensor(values) for name, values in named.items()},
        "baseline": greedy(baseline) if isinstance(baseline, list) else baseline,
        "group_ids": torch.tensor(groups or list(range(count))),
        "finished": torch.tensor(finished or [True] * count), "policy_versions": zeros.long(), "lengths": torch.tensor(lengths),
        "turns": zeros.long(), "turn_rewards": zeros,
    }  # fmt: skip
    return RolloutBatch(**{**base, **tensors})


def greedy(scores: list[float], lengths: list[int] | None = None, *, finished: list[bool] | None = None, **tensors) -> Baseline:
    """Greedy responses of one scorer, of one token and finished unless said; log-probabilities and reference are zeros unless given."""
    mask = torch.arange(3) < torch.tensor(lengths or [1] * len(scores))[:, None]
    base = {"old_logprobs": torch.zeros(mask.shape), "ref_logprobs": torch.zeros(mask.shape)}
    ended = torch.tensor(finished or [True] * len(scores))
    return Baseline({"reward_model": torch.tensor(scores)}, ended, mask.sum(1), mask, **{**base, **tensors})


def scorer(name: str = "reward_model", *, weight: float = 1.0, normalization: str = "none") -> dict:
    kind = {"kind": "reward_model"} if name == "reward_model" else {"kind": "length", "target_length": 3}
    return {"name": name, "weight": weight, "normalization": normalization, **kind}


def rl(algorithm: str, **changes):
    plain = {"rl.reward.scorers": [scorer()], "rl.ppo.whiten_advantages": False, "rl.kl.coef": 0.0}
    return tiny_params(**{"rl.algorithm": algorithm, **plain, **changes}).rl


def advantages_of(batch: RolloutBatch, config):
    return compute_advantages(batch, config, RewardNormalizer(config.reward), kl_coef=config.kl.coef)


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
    train, metrics = advantages_of(batch, config)
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
    train, metrics = advantages_of(batch, config)
    assert train.advantages.tolist() == [[2.0, 2.0, 0.0]]
    assert metrics["reward_mean"] == 2.0


def test_a_truncated_response_is_penalised_in_normalised_units():
    changes = {"rl.reward.scorers": [scorer(normalization="initial")], "rl.reward.no_eos_penalty": 0.75, "rl.reward.clip": None}
    config = rl("ppo", **changes)
    normalizer = RewardNormalizer(config.reward)
    normalizer.calibrate({"reward_model": torch.tensor([0.0, 20.0])})  # mean 10, std 10
    train, _ = compute_advantages(rollouts([30.0, 30.0], [1, 3], finished=[True, False]), config, normalizer, kl_coef=0.0)
    assert train.returns[0, 0] == 2.0
    assert train.returns[1, 2] == 2.0 - 0.75


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "reinforce_pp"])
def test_truncated_responses_can_be_masked_and_left_out_of_statistics(algorithm: str):
    """As if it weren't there: row 1 is far from the others in everything."""
    config = rl(
        algorithm,
        **{
            "rl.reward.mask_truncated": True,
            "rl.reward.scorers": [scorer(normalization="running")],
            "rl.kl.coef": 0.1,
            "rl.ppo.whiten_advantages": True,
        },
    )
    values = torch.tensor([[0.1, 0.2, 0.3], [9.0, 9.0, 9.0], [0.3, 0.1, 0.2], [0.0, 0.4, 0.1]])
    scores, lengths, finished = [1.0, 50.0, 2.0, 0.5], [3, 3, 2, 3], [True, False, True, True]
    train, metrics = advantages_of(
        rollouts(scores, lengths, finished=finished, groups=[0] * 4, values=values, old_logprobs=-values), config
    )
    others = [0, 2, 3]
    kept, kept_metrics = advantages_of(
        rollouts(
            [scores[i] for i in others], [lengths[i] for i in others], groups=[0] * 3, values=values[others], old_logprobs=-values[others]
        ),
        config,
    )
    assert not train.response_mask[1].any() and not train.advantages[1].any()
    torch.testing.assert_close(train.advantages[others], kept.advantages)
    assert metrics == pytest.approx(kept_metrics)


def test_a_long_response_loses_what_the_overlong_penalty_says_in_normalised_units():
    # Of 3 tokens the last 2 are the buffer: lengths 1, 2 and 3 lose 0, half and all of 0.8.
    changes = {"rl.rollout.max_new_tokens": 3, "rl.reward.overlong": {"buffer": 2, "penalty": 0.8}, "rl.reward.clip": 1.0}
    _, metrics = advantages_of(rollouts([5.0, 5.0, 5.0], [1, 2, 3]), rl("reinforce_pp", **changes))
    assert metrics["reward_mean"] == pytest.approx((1.0 + 0.6 + 0.2) / 3)


def test_whitening_is_over_the_whole_batch():
    values = torch.tensor([[0.3, -0.2, 0.1], [0.5, 0.1, 77.0], [1.0, 55.0, 66.0]])
    batch = rollouts([1.0, -1.0, 4.0], [3, 2, 1], values=values)
    plain, _ = advantages_of(batch, rl("ppo"))
    white, _ = advantages_of(batch, rl("ppo", **{"rl.ppo.whiten_advantages": True}))
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
    train, metrics = advantages_of(batch, rl("rloo", **{"rl.kl.coef": 0.5}))
    # Rewards less KL: 1 - 0.5 * 2 = 0 and 3; 0 and 0 - 0.5 * 4 = -2. Each less the other of its group.
    assert train.advantages.tolist() == [[-3.0, -3.0, 0.0], [3.0, 3.0, 3.0], [2.0, 0.0, 0.0], [-2.0, 0.0, 0.0]]
    assert not train.returns.any()
    assert metrics["reward_mean"] == (0 + 3 + 0 - 2) / 4


def test_grpo_by_hand_with_the_kl_subtracted_before_the_baseline():
    old_logprobs = torch.zeros(3, 3)
    old_logprobs[0] = torch.tensor([1.0, 1.0, 50.0])
    batch = rollouts([1.0, 1.0, 4.0], [2, 1, 3], groups=[0, 0, 0], old_logprobs=old_logprobs)
    config = {"rl.kl.coef": 0.5, "rl.grpo.group_size": 2}
    centred, _ = advantages_of(batch, rl("grpo", **config, **{"rl.grpo.normalize_std": False}))
    # Rewards less KL: 0, 1, 4; mean 5/3
    assert centred.advantages[:, 0].tolist() == pytest.approx([-5 / 3, -2 / 3, 7 / 3])
    scaled, _ = advantages_of(batch, rl("grpo", **config))
    # Unbiased variance (25 + 4 + 49) / 9 / 2 = 13/3
    assert scaled.advantages[:, 0].tolist() == pytest.approx([x / (13 / 3) ** 0.5 for x in (-5 / 3, -2 / 3, 7 / 3)])
    assert scaled.advantages[1].tolist()[1:] == [0.0, 0.0]


# The other algorithms


def test_dr_grpo_by_hand():
    train, _ = advantages_of(rollouts([1.0, 1.0, 4.0], [2, 1, 3], groups=[0, 0, 0]), rl("dr_grpo", **{"rl.dr_grpo.group_size": 2}))
    assert train.advantages.tolist() == [[-1.0, -1.0, 0.0], [-1.0, 0.0, 0.0], [2.0, 2.0, 2.0]]  # mean 2, no division


def test_reinforce_pp_by_hand_with_the_kl_at_each_token():
    batch = rollouts([2.0, -1.0], [2, 1], old_logprobs=torch.tensor([[1.0, 0.0, 50.0], [0.0, 50.0, 50.0]]))
    train, metrics = advantages_of(batch, rl("reinforce_pp", **{"rl.kl.coef": 0.5, "rl.ppo.gamma": 0.3}))
    # Rewards to go, without a discount: -0.5 + 2 = 1.5 and 2; -1. Less their mean 5/6, over the unbiased deviation:
    # (16 + 49 + 121) / 36 / 2 = 2.58333, root 1.607275
    expected = torch.tensor([[(1.5 - 5 / 6), (2 - 5 / 6), 0.0], [(-1 - 5 / 6), 0.0, 0.0]]) / 1.607275
    torch.testing.assert_close(train.advantages, expected, rtol=0, atol=1e-5)
    assert metrics["reward_mean"] == pytest.approx((2 - 0.5 - 1) / 2)


def test_reinforce_pp_baseline_by_hand_with_the_kl_subtracted_before_the_baseline():
    old_logprobs = torch.tensor([[2.0, 50.0, 50.0], [0.0, 50.0, 50.0], [0.0, 50.0, 50.0], [0.0, 50.0, 50.0]])
    batch = rollouts([1.0, 2.0, 1.0, 5.0], [1, 1, 1, 1], groups=[3, 3, 8, 8], old_logprobs=old_logprobs)
    train, _ = advantages_of(batch, rl("reinforce_pp_baseline", **{"rl.kl.coef": 0.5}))
    # Rewards 0, 2; 1, 5. Less their groups' means: -1, 1, -2, 2. Mean 0, unbiased variance (1 + 1 + 4 + 4) / 3.
    assert train.advantages[:, 0].tolist() == pytest.approx([x / (10 / 3) ** 0.5 for x in (-1, 1, -2, 2)])


def test_remax_by_hand_with_a_baseline_in_the_same_units_that_moves_no_statistic():
    config = rl("remax", **{"rl.reward.scorers": [scorer(normalization="running")], "rl.kl.coef": 0.5, "rl.reward.no_eos_penalty": 0.25})
    normalizer = RewardNormalizer(config.reward)
    batch = rollouts(
        [1.0, 5.0, 3.0],
        [2, 1, 3],
        finished=[True, True, False],
        baseline=[5.0, 1.0, NAN],
        old_logprobs=torch.tensor([[1.0, 0.0, 50.0], [0.0, 50.0, 50.0], [0.0, 0.0, 0.0]]),
    )
    train, _ = compute_advantages(batch, config, normalizer, kl_coef=0.5)
    # 1, 5, 3: mean 3, deviation d = (8/3)^0.5. Rewards -2/d - 0.5 * 1 and 2/d, baselines 2/d and -2/d; the third has no baseline.
    d = (8 / 3) ** 0.5
    assert train.advantages[:, 0].tolist() == pytest.approx([-4 / d - 0.5, 4 / d, 0.0])
    assert normalizer.moments["reward_model"].count == 3


REMAX_OPTIONS = {
    "cut off": {"rl.reward.no_eos_penalty": 0.75},
    "overlong": {"rl.rollout.max_new_tokens": 3, "rl.reward.overlong": {"buffer": 2, "penalty": 0.8}},
    "kl": {"rl.kl.coef": 0.5},
    "kl, k3": {"rl.kl.coef": 0.5, "rl.kl.estimator": "k3"},
    "clipped": {"rl.reward.clip": 1.0},
}


@pytest.mark.parametrize("options", REMAX_OPTIONS)
def test_remax_gives_the_greedy_response_itself_an_advantage_of_0(options: str):
    """CORRECTNESS, baselines: they carry the same penalties as the sample. The second row is finished, the third another response."""
    tensors = {
        "old_logprobs": torch.tensor([[-1.0, -2.0, -0.5], [-1.0, NAN, NAN], [-1.0, -1.0, NAN]]),
        "ref_logprobs": torch.tensor([[-2.0, -1.0, -2.5], [-0.5, NAN, NAN], [-3.0, -3.0, NAN]]),
    }
    scores, lengths, finished = [1.5, -0.5, 2.0], [3, 1, 2], [False, True, True]
    baseline = greedy([1.5, -0.5, 0.25], [3, 1, 1], finished=finished, **tensors)
    train, _ = advantages_of(
        rollouts(scores, lengths, finished=finished, baseline=baseline, **tensors), rl("remax", **REMAX_OPTIONS[options])
    )
    assert not train.advantages[:2].any() and train.advantages[2, 0] != 0


def test_remax_baseline_by_hand_with_every_penalty():
    options = {"rl.rollout.max_new_tokens": 3, "rl.reward.overlong": {"buffer": 2, "penalty": 0.8}, "rl.kl.coef": 0.5}
    config = rl("remax", **options, **{"rl.reward.no_eos_penalty": 0.75})
    baseline = greedy([2.0], [3], finished=[False], old_logprobs=torch.tensor([[-1.0, -1.0, -1.0]]), ref_logprobs=torch.full((1, 3), -2.0))
    train, _ = advantages_of(rollouts([1.0], [2], baseline=baseline), config)
    # The sample: 1 - 0.4 for its length. The greedy response: 2 - 0.75 for the end, 0.8 for its length, 0.5 * 3 for the KL: -1.05
    assert train.advantages[0].tolist() == pytest.approx([0.6 + 1.05, 0.6 + 1.05, 0.0])


def test_remax_in_the_loss_leaves_the_kl_out_of_the_baseline():
    placed = {"rl.kl.coef": 0.5, "rl.kl.placement": "loss", "rl.kl.estimator": "k3"}
    train, _ = advantages_of(rollouts([1.0], [2], baseline=greedy([0.25], old_logprobs=torch.ones(1, 3))), rl("remax", **placed))
    assert train.advantages[0].tolist() == [0.75, 0.75, 0.0]


def test_remax_uses_truncated_baselines_but_no_truncated_samples():
    config = rl("remax", **{"rl.reward.mask_truncated": True, "rl.reward.no_eos_penalty": 0.75})
    batch = rollouts([2.0, 2.0], [2, 2], finished=[True, False], baseline=greedy([1.0, 1.0], finished=[False, True]))
    train, _ = advantages_of(batch, config)
    assert train.advantages.tolist() == [[1.75, 1.75, 0.0], [0.0, 0.0, 0.0]] and not train.response_mask[1].any()


@pytest.mark.parametrize("algorithm", ["grpo", "reinforce_pp"])
def test_the_kl_coefficient_of_the_moment_counts(algorithm: str):
    """Not the configured one, which is only where it starts."""
    old_logprobs = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    batch = rollouts([1.0, 2.0, 0.0, 1.0], [3, 2, 3, 1], groups=[0] * 4, old_logprobs=old_logprobs)
    one, other = (rl(algorithm, **{"rl.kl.coef": c}) for c in (0.1, 7.0))
    first, _ = compute_advantages(batch, one, RewardNormalizer(one.reward), kl_coef=0.3)
    second, _ = compute_advantages(batch, other, RewardNormalizer(other.reward), kl_coef=0.3)
    third, _ = compute_advantages(batch, one, RewardNormalizer(one.reward), kl_coef=0.9)
    assert torch.equal(first.advantages, second.advantages)
    assert not torch.allclose(first.advantages, third.advantages)


# Corrections


def test_importance_weights_compare_the_sampling_engine_with_the_distribution_that_was_sampled_from():
    """Not with the whole one: with top-p those differ by the mass that is left. Masked tokens and unscored responses count nowhere."""
    sampler = torch.tensor([[-1.0, -1.0, 50.0], [-1.0, 50.0, 50.0], [9.0, 9.0, 9.0]])
    rollout = torch.tensor([[-1.0, -1.0 - math.log(3), NAN], [-1.0 + math.log(4), NAN, NAN], [0.0, 0.0, 0.0]])
    batch = rollouts(
        [1.0, 2.0, NAN], [2, 1, 3], groups=[0, 0, 0], sampler_logprobs=sampler, rollout_logprobs=rollout, old_logprobs=sampler - 5.0
    )
    train, metrics = advantages_of(batch, rl("rloo", **{"rl.correction.kind": "tis", "rl.correction.high": 2.0}))
    torch.testing.assert_close(train.importance_weights, torch.tensor([[1.0, 2.0, 1.0], [0.25, 1.0, 1.0], [1.0, 1.0, 1.0]]))
    assert metrics["mismatch_max"] == pytest.approx(math.log(4))
    assert metrics["corrected_fraction"] == pytest.approx(1 / 3)
    uncorrected, same = advantages_of(batch, rl("rloo"))
    assert torch.equal(uncorrected.importance_weights, torch.ones(3, 3))
    assert same["mismatch_max"] == metrics["mismatch_max"]


def test_where_the_engines_log_probabilities_are_the_old_ones_nothing_is_compared():
    """They are those of the policy that sampled, a step before the one that is trained."""
    engine = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]])
    same = {"rollout_logprobs": engine, "old_logprobs_source": "from_engine", "old_logprobs": engine, "sampler_logprobs": engine}
    train, metrics = advantages_of(rollouts([1.0, 2.0], [3, 3], groups=[0, 0], **same), rl("rloo", **{"rl.rollout.max_lag": 1}))
    assert torch.equal(train.old_logprobs, engine) and torch.equal(train.importance_weights, torch.ones(2, 3))
    assert not [name for name in metrics if name.startswith(("mismatch", "ratio", "corrected"))]


# The reference's, the sampler's and the trained policy's distribution over four tokens: the sampler has moved from the reference, and the
# update since then has moved the policy on, to where the sampler's tokens are rare.
REFERENCE, STALE, CURRENT = (torch.tensor(p).log() for p in ([0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4], [0.02, 0.02, 0.06, 0.9]))


def sampled(count: int, *, one_step_off: bool, top_k: int | None, corrected: bool) -> tuple[RolloutBatch, float]:
    """Responses of three tokens, and the exact mean of log policy - log reference over the tokens that were sampled."""

    def left(logprobs: torch.Tensor) -> torch.Tensor:
        """The distribution that is sampled from: the last so many tokens are the most probable ones."""
        return logprobs.where(torch.arange(4) >= 4 - (top_k or 4), -INF).log_softmax(-1)

    of = STALE if one_step_off else CURRENT
    tokens = torch.multinomial(left(of).exp(), 3 * count, replacement=True, generator=torch.Generator().manual_seed(0)).view(count, 3)
    trainer = CURRENT if corrected or not one_step_off else of
    how = {"rollout_logprobs": left(of)[tokens], "old_logprobs": trainer[tokens], "sampler_logprobs": left(trainer)[tokens]}
    how |= {"ref_logprobs": REFERENCE[tokens], "old_logprobs_source": "recompute" if trainer is CURRENT else "from_engine"}
    batch = rollouts([1.0] * count, [3] * count, groups=[0] * count, **how)
    probable = left(of).exp()
    # log q of all tokens is log q of those that are left plus the log of their share; with rollouts ahead the share is the policy's.
    share = (CURRENT if one_step_off else of).exp()[probable > 0].sum().log()
    return batch, float((probable * (left(of).where(probable > 0, 0.0) + share - REFERENCE)).sum())


@pytest.mark.parametrize("kind", get_args(CorrectionConfig.model_fields["kind"].annotation))
@pytest.mark.parametrize("one_step_off", [False, True], ids=["on policy", "one step off"])
@pytest.mark.parametrize("top_k", [None, 3])
def test_the_kl_is_that_of_the_policy_that_sampled(kind: str, one_step_off: bool, top_k: int | None):
    """On policy the current one's; with rollouts ahead, with every correction, the one's of the step before: KL(q || ref)."""
    if one_step_off and kind == "none" and top_k is not None:
        pytest.skip("refused: the engine's probabilities would be the old ones of another distribution")
    changes = {"rl.rollout.max_lag": int(one_step_off), "rl.correction.kind": kind, "rl.rollout.top_k": top_k, "rl.kl.coef": 0.5}
    config = rl("rloo", **changes)
    batch, exact = sampled(20_000, one_step_off=one_step_off, top_k=top_k, corrected=kind != "none")
    row = batch_metrics(batch, sampling_logprobs(batch, batch.old_logprobs, config), config.reward)
    error = 4 * 1.5 / math.sqrt(3 * 20_000)  # four standard errors; a log ratio's deviation is below 1.5
    assert row["kl_token_mean"] == pytest.approx(exact, abs=error) and row["kl_mean"] == pytest.approx(3 * exact, abs=3 * error)
    _, metrics = advantages_of(batch, config)
    assert metrics["reward_mean"] == pytest.approx(1.0 - 0.5 * row["kl_mean"], abs=1e-4), "the reward has the KL of the curve"
    if top_k is None:
        assert exact == pytest.approx({False: 1.7912, True: 0.4564}[one_step_off], abs=0.01) and row["kl_token_min"] < 0
    if one_step_off and kind != "none":  # what log p - log ref of the current policy would have been
        assert float((batch.old_logprobs - batch.ref_logprobs).mean()) < 0 < exact


def test_a_limit_on_the_kl_and_its_target_hold_with_rollouts_ahead_and_a_correction():
    limit = {"kl": {"metric": "kl_token_mean", "above": 0.3, "window": 1, "patience": 1, "action": "stop"}}
    changes = {"rl.rollout.max_lag": 1, "rl.correction.kind": "tis", "rl.monitor": limit, "rl.kl.target": 1.0}
    config = rl("rloo", **changes, **{"rl.kl.coef": 0.1})
    batch, _ = sampled(500, one_step_off=True, top_k=None, corrected=True)
    row = {"step": 1, **batch_metrics(batch, sampling_logprobs(batch, batch.old_logprobs, config), config.reward)}
    state, _, _ = observe(config, MonitorState(), row, batch)
    assert state.stopped.limit == "kl" and state.frontier == ((row["kl_mean"], 1.0),) and row["kl_mean"] > 1.0
    assert Progress.start(config).after_step(config, kl=row["kl_mean"], prompts_drawn=1).kl_coef > 0.1


def test_rows_that_were_scored_but_teach_nothing_are_counted():
    batch = rollouts([1.0, 1.0, 0.0, 3.0, NAN], [3, 2, 1, 2, 3], groups=[0, 0, 1, 1, 1])
    _, metrics = advantages_of(batch, rl("rloo"))
    assert metrics["advantage_zero_fraction"] == 2 / 4


@pytest.mark.parametrize("algorithm", tuple(ALGORITHMS))
@pytest.mark.filterwarnings("error")
def test_where_every_response_is_masked_figures_are_missing_and_one_sentence_says_so(algorithm: str, caplog: pytest.LogCaptureFixture):
    credit._tell_nothing_is_learned.cache_clear()
    config = rl(algorithm, **{"rl.reward.mask_truncated": True, "rl.correction.kind": "tis"})
    baseline = [1.0] * 4 if algorithm == "remax" else None
    batch = rollouts([1.0, 2.0, 1.0, 0.0], [3, 2, 3, 3], finished=[False] * 4, groups=[0, 0, 1, 1], baseline=baseline)
    for _ in range(2):
        train, metrics = advantages_of(batch, config)
        assert not train.response_mask.any() and not train.advantages.any() and not train.returns.any()
        assert {"reward_mean", "ratio_mean", "mismatch_kl"} <= metrics.keys() and all(map(math.isnan, metrics.values()))
    (message,) = caplog.messages
    assert message.startswith("rl: expected responses to learn from, got a step whose responses are all masked: truncated, with")


# What could not be scored


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("algorithm", tuple(ALGORITHMS))
def test_reward_failures_are_masked_and_change_nothing_for_the_others(algorithm: str, bad: float):
    """Row 1 could not be scored: policy and critic get no token of it, and its group, statistics and mean are as without it."""
    config = rl(algorithm, **{"rl.kl.coef": 0.1, "rl.ppo.whiten_advantages": True, "rl.reward.scorers": [scorer(normalization="running")]})
    tensors = {
        name: torch.randn(4, 3, generator=torch.Generator().manual_seed(k))
        for k, name in enumerate(("old_logprobs", "ref_logprobs", "values"))
    }
    scores, lengths, groups = [1.0, bad, 2.0, 0.5], [3, 3, 2, 3], [0, 0, 0, 0]
    baseline = [0.5, 1.0, 0.0, 2.0]
    train, metrics = advantages_of(rollouts(scores, lengths, groups=groups, baseline=baseline, **tensors), config)
    others = [0, 2, 3]
    kept, kept_metrics = advantages_of(
        rollouts(
            [scores[i] for i in others],
            [lengths[i] for i in others],
            groups=[0] * 3,
            baseline=[baseline[i] for i in others],
            **{n: t[others] for n, t in tensors.items()},
        ),
        config,
    )
    assert not train.response_mask[1].any()
    assert not train.advantages[1].any() and not train.returns[1].any()
    for name in ("advantages", "returns", "response_mask"):
        torch.testing.assert_close(getattr(train, name)[others], getattr(kept, name))
    assert metrics == pytest.approx(kept_metrics)
    assert all(math.isfinite(v) for v in metrics.values())


def test_a_batch_that_could_not_be_scored_at_all_teaches_nothing():
    train, _ = advantages_of(rollouts([NAN, NAN], [3, 2]), rl("ppo", **{"rl.ppo.whiten_advantages": True}))
    assert not train.response_mask.any()
    assert train.advantages.tolist() == train.returns.tolist() == [[0.0] * 3] * 2


def test_explained_variance_by_hand():
    mask = torch.tensor([[True, True, False], [True, True, False]])
    returns = torch.tensor([[0.0, 2.0, 50.0], [4.0, 6.0, 50.0]])  # variance 5
    assert explained_variance(returns + 3, returns, mask) == pytest.approx(1.0)
    assert explained_variance(torch.ones(2, 3), returns, mask) == pytest.approx(0.0)
    assert explained_variance(torch.tensor([[1.0, 1.0, 0.0], [5.0, 5.0, 0.0]]), returns, mask) == pytest.approx(1 - 1 / 5)
    assert explained_variance(returns, torch.ones(2, 3), mask) == 0.0
