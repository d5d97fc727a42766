from __future__ import annotations

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.advantages import (
    dr_grpo,
    gae,
    grpo,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rloo,
    token_rewards,
    whiten,
)

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:groups of equal rewards")


def rows(*values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def mask(*values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.bool)


def same(actual: torch.Tensor, expected: torch.Tensor, atol: float = 1e-14) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def per_response(estimator, rewards: list[float], group_ids: list[int], **settings_) -> torch.Tensor:
    """The estimator's advantage of each response; its tokens must all carry it."""
    response_mask = torch.ones(len(rewards), 2, dtype=torch.bool)
    result = estimator(torch.tensor(rewards, dtype=torch.float64), torch.tensor(group_ids), response_mask, **settings_)
    assert torch.equal(result[:, 0], result[:, 1])
    return result[:, 0]


# Rewards per token


def test_reward_placement_on_the_last_sampled_token_and_kl_on_each():
    # kl_coef 0.5. Row 0: padding after two tokens. Row 1: a tool's output in the middle. Row 2: one token.
    scores = torch.tensor([1.0, 2.0, -1.0], dtype=torch.float64)
    kl = rows([0.2, 0.4, NAN, NAN], [0.1, NAN, 0.3, NAN], [1.0, NAN, NAN, NAN])
    response_mask = mask([1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 0])
    expected = rows(
        [-0.1, 1.0 - 0.2, 0, 0],
        [-0.05, 0, 2.0 - 0.15, 0],
        [-1.0 - 0.5, 0, 0, 0],
    )
    same(token_rewards(scores, kl, response_mask, kl_coef=0.5), expected)


@pytest.mark.parametrize("unscored", [NAN, float("inf"), -float("inf")])
def test_reward_failures_give_no_reward_at_all(unscored):
    # Not even the KL penalty: the row takes no part.
    scores = torch.tensor([unscored, 1.0], dtype=torch.float64)
    rewards = token_rewards(scores, torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.bool), kl_coef=0.5)
    assert torch.equal(rewards, rows([0, 0], [-0.5, 0.5]))


def test_a_row_without_sampled_tokens_gets_no_reward():
    rewards = token_rewards(torch.tensor([3.0]), torch.tensor([[NAN, 1.0]]), mask([0, 0]), kl_coef=1.0)
    assert torch.equal(rewards, torch.zeros(1, 2))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data(), kl_coef=st.floats(0, 2))
def test_token_rewards_sum_to_the_score_less_the_kl(data, kl_coef):
    width = data.draw(st.integers(1, 6))
    kept = torch.tensor([data.draw(st.lists(st.booleans(), min_size=width, max_size=width))])
    kl = torch.tensor([data.draw(st.lists(st.floats(-3, 3), min_size=width, max_size=width))], dtype=torch.float64)
    score = data.draw(st.floats(-5, 5))
    total = token_rewards(torch.tensor([score], dtype=torch.float64), kl, kept, kl_coef=kl_coef).sum().item()
    expected = score - kl_coef * kl[kept].sum().item() if kept.any() else 0.0
    assert total == pytest.approx(expected, abs=1e-12)


# GAE


def test_gae_by_hand_and_returns_are_unwhitened_advantages_plus_values():
    # gamma = gae_lambda = 0.5, so A_t = d_t + 0.25 A_{t+1} and d_t = r_t + 0.5 V_{t+1} - V_t; rewards 0, 0, 1; values 0.5, 0.25, 0.5
    # d_2 = 1 - 0.5 = 0.5                  A_2 = 0.5
    # d_1 = 0 + 0.25 - 0.25 = 0            A_1 = 0 + 0.125 = 0.125
    # d_0 = 0 + 0.125 - 0.5 = -0.375       A_0 = -0.375 + 0.03125 = -0.34375
    rewards, values = rows([0, 0, 1]), rows([0.5, 0.25, 0.5])
    advantages, returns = gae(rewards, values, mask([1, 1, 1]), gamma=0.5, gae_lambda=0.5)
    same(advantages, rows([-0.34375, 0.125, 0.5]), atol=0)
    same(returns, rows([0.15625, 0.375, 1.0]), atol=0)


def test_gae_over_gaps_carries_value_and_advantage_across_tool_tokens_and_ignores_nan_there():
    # The numbers of the test above with masked tokens before, between and after: none of them may show.
    rewards, values = rows([9, 0, NAN, 7, 0, 1, NAN]), rows([NAN, 0.5, NAN, 3, 0.25, 0.5, NAN])
    advantages, returns = gae(rewards, values, mask([0, 1, 0, 0, 1, 1, 0]), gamma=0.5, gae_lambda=0.5)
    same(advantages, rows([0, -0.34375, 0, 0, 0.125, 0.5, 0]), atol=0)
    same(returns, rows([0, 0.15625, 0, 0, 0.375, 1.0, 0]), atol=0)


def test_gae_gives_constants():
    values = rows([0.5, 0.2]).requires_grad_()
    advantages, returns = gae(rows([0, 1]), values, mask([1, 1]), gamma=1.0, gae_lambda=0.95)
    assert not advantages.requires_grad and not returns.requires_grad


def test_gae_of_an_empty_mask_is_zero():
    advantages, returns = gae(rows([NAN, 1]), rows([NAN, 1]), mask([0, 0]), gamma=1.0, gae_lambda=1.0)
    assert torch.equal(advantages, rows([0, 0])) and torch.equal(returns, rows([0, 0]))


number = st.floats(-5, 5)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.tuples(number, number, st.booleans()), min_size=1, max_size=8),
    gamma=st.floats(0, 1),
    gae_lambda=st.floats(0, 1),
)
def test_gae_is_the_discounted_sum_of_the_temporal_differences_of_the_sampled_tokens(tokens, gamma, gae_lambda):
    rewards, values, kept = (torch.tensor([column]) for column in zip(*tokens, strict=True))
    rewards, values = rewards.double(), values.double()
    advantages, returns = gae(rewards, values, kept, gamma=gamma, gae_lambda=gae_lambda)
    r, v = rewards[kept].tolist(), [*values[kept].tolist(), 0.0]
    delta = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(r))]
    expected = [sum((gamma * gae_lambda) ** (j - t) * delta[j] for j in range(t, len(r))) for t in range(len(r))]
    assert advantages[kept].tolist() == pytest.approx(expected, abs=1e-11)
    same(returns[kept], (advantages + values)[kept])
    assert not advantages[~kept].any() and not returns[~kept].any()


@settings(max_examples=50, deadline=None, derandomize=True)
@given(tokens=st.lists(st.tuples(number, number), min_size=1, max_size=8))
def test_gae_with_gamma_and_lambda_one_is_reward_to_go_less_value(tokens):
    rewards, values = rows(*zip(*tokens, strict=True)).split(1)
    advantages, returns = gae(rewards, values, torch.ones_like(rewards, dtype=torch.bool), gamma=1.0, gae_lambda=1.0)
    to_go = rewards.flip(1).cumsum(1).flip(1)
    same(advantages, to_go - values, atol=1e-11)
    same(returns, to_go, atol=1e-11)


# GRPO and RLOO


def test_grpo_by_hand_with_the_unbiased_std():
    # Group 7: 1, 2, 3: mean 2, std sqrt((1 + 0 + 1) / 2) = 1.   Group -4: 5, 9: mean 7, std sqrt((4 + 4) / 1) = 2 sqrt 2.
    rewards, group_ids = [1.0, 5.0, 2.0, 3.0, 9.0], [7, -4, 7, 7, -4]
    half = math.sqrt(0.5)
    same(per_response(grpo, rewards, group_ids, normalize_std=True), torch.tensor([-1, -half, 0, 1, half], dtype=torch.float64))
    same(per_response(grpo, rewards, group_ids, normalize_std=False), torch.tensor([-1, -2, 0, 1, 2], dtype=torch.float64))


def test_dr_grpo_by_hand_is_the_reward_less_the_mean_of_the_group():
    # Group 7: 1, 2, 3: mean 2.   Group -4: 5, 9: mean 7.
    advantages = per_response(dr_grpo, [1.0, 5.0, 2.0, 3.0, 9.0], [7, -4, 7, 7, -4])
    same(advantages, torch.tensor([-1, -2, 0, 1, 2], dtype=torch.float64))


def test_rloo_by_hand():
    # 1 - (2 + 6)/2 = -3;  2 - (1 + 6)/2 = -1.5;  6 - (1 + 2)/2 = 4.5.   Group 0: 4 - 1 = 3, 1 - 4 = -3.
    same(per_response(rloo, [1.0, 4.0, 2.0, 6.0, 1.0], [3, 0, 3, 3, 0]), torch.tensor([-3, 3, -1.5, 4.5, -3], dtype=torch.float64))


def test_rloo_with_the_kl_subtracted_before_the_baseline_is_another_objective_than_after():
    # Scores 1, 3; kl_coef * KL 1, 0. Before: 0 - 3 = -3 and 3 - 0 = 3.   After: (1 - 3) - 1 = -3 and (3 - 1) - 0 = 2.
    scores, penalties = torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([1.0, 0.0], dtype=torch.float64)
    before = per_response(rloo, (scores - penalties).tolist(), [0, 0])
    after = per_response(rloo, scores.tolist(), [0, 0]) - penalties
    same(before, torch.tensor([-3, 3], dtype=torch.float64))
    same(after, torch.tensor([-3, 2], dtype=torch.float64))


def test_grpo_and_rloo_leave_unscored_responses_out_of_the_group():
    # What is left are 1 and 3: mean 2, std sqrt 2, leave-one-out 1 - 3 and 3 - 1. Counting the NaN as 0 would give a mean of 4/3.
    half = math.sqrt(0.5)
    for unscored in (NAN, float("inf"), -float("inf")):
        rewards = [1.0, unscored, 3.0]
        same(per_response(grpo, rewards, [0, 0, 0], normalize_std=True), torch.tensor([-half, 0, half], dtype=torch.float64))
        same(per_response(rloo, rewards, [0, 0, 0]), torch.tensor([-2, 0, 2], dtype=torch.float64))


def test_masked_rows_stay_out_of_the_group_statistics():
    # The third response, cut off and masked as configured, has the reward -100 that would ruin its siblings' baseline.
    response_mask = mask([1, 1], [1, 0], [0, 0])
    rewards, group_ids = torch.tensor([1.0, 3.0, -100.0], dtype=torch.float64), torch.zeros(3, dtype=torch.long)
    same(grpo(rewards, group_ids, response_mask, normalize_std=False), rows([-1, -1], [1, 0], [0, 0]))
    same(rloo(rewards, group_ids, response_mask), rows([-2, -2], [2, 0], [0, 0]))


def degenerate(rewards: list[float], group_ids: list[int]) -> list[torch.Tensor]:
    return [
        per_response(grpo, rewards, group_ids, normalize_std=True),
        per_response(grpo, rewards, group_ids, normalize_std=False),
        per_response(rloo, rewards, group_ids),
        per_response(reinforce_pp_baseline, rewards, group_ids),
    ]


@pytest.mark.parametrize(
    ("rewards", "group_ids"),
    [
        ([5.0], [0]),  # a group of one
        ([0.1, 0.1, 0.1], [0, 0, 0]),  # all equal; 0.1 has no exact mean
        ([5.0, NAN], [0, 0]),  # one that could be scored
        ([NAN, NAN], [0, 0]),  # none
        ([5.0, -1.0, 0.3, 0.3], [0, 1, 2, 2]),  # several such groups
    ],
)
def test_group_of_one_and_all_equal_group_get_advantage_exactly_zero(rewards, group_ids):
    for advantages in degenerate(rewards, group_ids):
        assert torch.equal(advantages, torch.zeros_like(advantages))


def test_groups_that_say_nothing_are_reported_once_and_others_not():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        per_response(rloo, [1.0, 2.0], [0, 0])
        assert not caught
        for _ in range(3):
            degenerate([1.0, 1.0], [0, 0])
    assert len(caught) == 1 and "advantage 0" in str(caught[0].message)


def test_near_constant_rewards_do_not_explode():
    # Centred to -+0.5e-6; their std 0.7e-6 is under the floor 1e-4: -+0.5e-6 / 1e-4 = -+0.005, and not -+0.707.
    same(per_response(grpo, [0.0, 1e-6], [0, 0], normalize_std=True), torch.tensor([-0.005, 0.005], dtype=torch.float64))
    same(per_response(grpo, [0.0, 1e-6], [0, 0], normalize_std=True, std_floor=1e-3), torch.tensor([-5e-4, 5e-4], dtype=torch.float64))


def test_a_response_has_its_advantage_on_each_sampled_token_and_zero_elsewhere():
    response_mask = mask([1, 0, 1, 0], [1, 1, 1, 1])
    advantages = rloo(torch.tensor([1.0, 3.0], dtype=torch.float64), torch.tensor([0, 0]), response_mask)
    same(advantages, rows([-2, 0, -2, 0], [2, 2, 2, 2]), atol=0)


def test_advantages_keep_the_input_precision():
    rewards, response_mask = torch.tensor([1.0, 3.0]), torch.ones(2, 2, dtype=torch.bool)
    group_ids = torch.zeros(2, dtype=torch.long)
    assert grpo(rewards, group_ids, response_mask, normalize_std=True).dtype == torch.float32
    assert rloo(rewards, group_ids, response_mask).dtype == torch.float32
    assert whiten(torch.rand(2, 2), response_mask).dtype == torch.float32


grouped = st.lists(st.tuples(st.integers(-2, 2), st.floats(-5, 5)), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(samples=grouped, shift=st.floats(-10, 10), scale=st.floats(0.1, 10))
def test_group_advantages_sum_to_zero_and_ignore_each_groups_shift(samples, shift, scale):
    group_ids, rewards = (list(column) for column in zip(*samples, strict=True))
    moved = [r + shift * g for g, r in samples]
    for advantages, again in zip(degenerate(rewards, group_ids)[1:3], degenerate(moved, group_ids)[1:3], strict=True):
        same(again, advantages, atol=1e-11)
        for group in set(group_ids):
            assert advantages[torch.tensor(group_ids) == group].sum().item() == pytest.approx(0.0, abs=1e-11)
    scaled = per_response(rloo, [scale * r for r in rewards], group_ids)
    same(scaled, scale * per_response(rloo, rewards, group_ids), atol=1e-10)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    rewards=st.lists(st.integers(-500, 500).map(lambda n: n / 100), min_size=2, max_size=8).filter(lambda r: len(set(r)) > 1),
    shift=st.floats(-10, 10),
    scale=st.floats(0.1, 10),
)
def test_grpo_with_std_has_std_one_and_ignores_shift_and_scale(rewards, shift, scale):
    advantages = per_response(grpo, rewards, [0] * len(rewards), normalize_std=True)
    assert advantages.std().item() == pytest.approx(1.0, abs=1e-10)
    same(per_response(grpo, [shift + scale * r for r in rewards], [0] * len(rewards), normalize_std=True), advantages, atol=1e-9)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(samples=grouped, seed=st.integers(0, 1000))
def test_group_advantages_do_not_depend_on_the_order_of_the_batch(samples, seed):
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed)).tolist()
    group_ids, rewards = (list(column) for column in zip(*samples, strict=True))
    straight = degenerate(rewards, group_ids)
    mixed = degenerate([rewards[i] for i in order], [group_ids[i] for i in order])
    for a, b in zip(straight[1:3], mixed[1:3], strict=True):
        same(b, a[order], atol=1e-12)


@pytest.mark.parametrize("estimate", [lambda r, g, m: grpo(r, g, m, normalize_std=True), rloo], ids=["grpo", "rloo"])
def test_rloo_and_grpo_are_invariant_to_padding_and_to_whole_groups_on_other_ranks(estimate):
    generator = torch.Generator().manual_seed(0)
    rewards, group_ids = torch.randn(12, dtype=torch.float64, generator=generator), torch.arange(12) // 4
    response_mask = torch.arange(5) < torch.randint(1, 6, (12, 1), generator=generator)
    whole = estimate(rewards, group_ids, response_mask)
    padded = estimate(rewards, group_ids, torch.nn.functional.pad(response_mask, (0, 3)))
    assert torch.equal(padded, torch.nn.functional.pad(whole, (0, 3)))
    parts = [estimate(rewards[part], group_ids[part], response_mask[part]) for part in (slice(0, 4), slice(4, 12))]
    same(torch.cat(parts), whole)


# REINFORCE++


def test_reinforce_pp_by_hand():
    # gamma 1/2. Row 0, rewards 1, 2, 4: G = 1 + 2 = 3, 2 + 2 = 4, 4.   Row 1, rewards 0, 1: 0.5, 1.
    # mean 12.5 / 5 = 2.5; deviations 0.5, 1.5, 1.5, -2, -1.5; squares 0.25 + 2.25 + 2.25 + 4 + 2.25 = 11; std sqrt(11 / 4)
    std = math.sqrt(11 / 4)
    advantages = reinforce_pp(rows([1, 2, 4], [0, 1, NAN]), mask([1, 1, 1], [1, 1, 0]), gamma=0.5)
    same(advantages, rows([0.5 / std, 1.5 / std, 1.5 / std], [-2 / std, -1.5 / std, 0]))


def test_reinforce_pp_carries_the_reward_to_go_across_a_gap_and_sees_no_masked_reward():
    # The first row of the test above with a tool's output, and a row that could not be scored.
    rewards = rows([1, NAN, 2, 4], [0, 1, 9, NAN], [NAN, 5, 5, 5])
    response_mask = mask([1, 0, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0])
    std = math.sqrt(11 / 4)
    expected = rows([0.5 / std, 0, 1.5 / std, 1.5 / std], [-2 / std, -1.5 / std, 0, 0], [0, 0, 0, 0])
    same(reinforce_pp(rewards, response_mask, gamma=0.5), expected)


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [([[0.0, 0.1], [0.0, 0.1]], [[1, 1], [1, 1]]), ([[0.0, NAN]], [[1, 0]]), ([[NAN, NAN]], [[0, 0]])],
    ids=["all equal", "one token", "empty mask"],
)
def test_reinforce_pp_of_a_batch_that_says_nothing_is_zero(rewards, kept):
    assert not reinforce_pp(rows(*rewards), mask(*kept), gamma=1.0).any()


def test_reinforce_pp_baseline_by_hand():
    # Group 0: 1, 3: mean 2, so -1 and 1, with 2 tokens and 1.   Group 1: 0, 6: -3 and 3, with 1 token each.
    # Tokens -1, -1, 1, -3, 3: mean -1/5; squares 1 + 1 + 1 + 9 + 9 = 21, less 5 / 25 = 20.8; std sqrt(20.8 / 4) = sqrt 5.2
    rewards, group_ids = torch.tensor([1.0, 0.0, 3.0, 6.0], dtype=torch.float64), torch.tensor([0, 1, 0, 1])
    std = math.sqrt(5.2)
    advantages = reinforce_pp_baseline(rewards, group_ids, mask([1, 1], [0, 1], [1, 0], [1, 0]))
    same(advantages, rows([-0.8 / std, -0.8 / std], [0, -2.8 / std], [1.2 / std, 0], [3.2 / std, 0]))


def test_reinforce_pp_baseline_counts_equal_groups_in_the_std_and_unscored_responses_nowhere():
    # -1, 1 and, of a group of equal rewards, 0, 0: mean 0, std sqrt(2 / 3). Without the latter it would be sqrt 2.
    high = math.sqrt(3 / 2)
    for unscored in (NAN, float("inf"), -float("inf")):
        advantages = per_response(reinforce_pp_baseline, [1.0, 3.0, 5.0, 5.0, unscored], [0, 0, 1, 1, 0])
        expected = torch.tensor([-1, 1, 0, 0, 0], dtype=torch.float64)
        # two tokens each: 4 squares of 1 over 7
        same(advantages, expected / math.sqrt(4 / 7))
        one_token = torch.ones(5, 1, dtype=torch.bool)
        rewards = torch.tensor([1.0, 3.0, 5.0, 5.0, unscored], dtype=torch.float64)
        same(reinforce_pp_baseline(rewards, torch.tensor([0, 0, 1, 1, 0]), one_token), (expected * high).unsqueeze(1))


@pytest.mark.parametrize("seed", range(3))
def test_whole_batch_advantages_are_invariant_to_padding_and_to_the_order_of_the_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    rewards, group_ids = torch.randn(8, 5, dtype=torch.float64, generator=generator), torch.arange(8) // 4
    response_mask = torch.arange(5) < torch.randint(1, 6, (8, 1), generator=generator)
    order = torch.randperm(8, generator=generator)
    for estimate in (
        lambda r, g, m: reinforce_pp(r, m, gamma=0.9),
        lambda r, g, m: reinforce_pp_baseline(r[:, 0], g, m),
        lambda r, g, m: remax(r[:, 0], r[:, 1], m),
    ):
        whole = estimate(rewards, group_ids, response_mask)
        wide = estimate(torch.nn.functional.pad(rewards, (0, 3), value=NAN), group_ids, torch.nn.functional.pad(response_mask, (0, 3)))
        same(wide, torch.nn.functional.pad(whole, (0, 3)))
        same(estimate(rewards[order], group_ids[order], response_mask[order]), whole[order], atol=1e-13)
        assert whole[response_mask].abs().min() > 0 and not whole[~response_mask].any()


# ReMax


def test_remax_by_hand():
    rewards, greedy = torch.tensor([3.0, 1.0, -2.0]), torch.tensor([1.0, 1.0, 0.5])
    advantages = remax(rewards, greedy, mask([1, 1], [1, 0], [0, 1]))
    assert torch.equal(advantages, torch.tensor([[2.0, 2.0], [0.0, 0.0], [0.0, -2.5]]))


@pytest.mark.parametrize("unscored", [NAN, float("inf"), -float("inf")])
def test_remax_learns_nothing_where_either_response_could_not_be_scored(unscored):
    rewards, greedy = torch.tensor([3.0, unscored, unscored, 4.0]), torch.tensor([unscored, 1.0, unscored, 1.0])
    advantages = remax(rewards, greedy, torch.ones(4, 2, dtype=torch.bool))
    assert torch.equal(advantages, torch.tensor([[0.0, 0.0]] * 3 + [[3.0, 3.0]]))


# Whitening


def test_whitening_by_hand_with_the_unbiased_std_and_masked_nan():
    # 2, 4, 6: mean 4, std sqrt((4 + 0 + 4) / 2) = 2
    advantages, kept = rows([2, NAN, 4], [float("inf"), 6, 99]), mask([1, 0, 1], [0, 1, 0])
    same(whiten(advantages, kept), rows([-1, 0, 0], [0, 1, 0]))
    same(whiten(advantages, kept, shift_mean=False), rows([3, 0, 4], [0, 5, 0]))


def test_whitening_is_over_the_whole_batch_and_not_per_part():
    advantages = rows([1, 2], [11, 12])
    kept = torch.ones(2, 2, dtype=torch.bool)
    # mean 6.5, squares 30.25 + 20.25 twice = 101, std sqrt(101 / 3)
    std = math.sqrt(101 / 3)
    same(whiten(advantages, kept), rows([-5.5 / std, -4.5 / std], [4.5 / std, 5.5 / std]))
    per_rank = torch.cat([whiten(advantages[i : i + 1], kept[i : i + 1]) for i in range(2)])
    assert (per_rank[0] - per_rank[1]).abs().max() == 0  # a part's own whitening loses that the second row is far better


@pytest.mark.parametrize(
    ("values", "kept"),
    [([3.0, 3.0], [1, 1]), ([3.0, NAN], [1, 0]), ([NAN, NAN], [0, 0]), ([0.1, 0.1], [1, 1])],
    ids=["all equal", "one entry", "empty mask", "inexact"],
)
def test_whitening_of_a_batch_that_says_nothing_is_zero(values, kept):
    assert torch.equal(whiten(rows(values), mask(kept)), rows([0, 0]))


def test_whitening_of_near_constant_advantages_does_not_explode():
    # std 0.7e-6 is under the floor 1e-4: -+0.5e-6 / 1e-4
    same(whiten(rows([0, 1e-6]), mask([1, 1])), rows([-0.005, 0.005]))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-500, 500).map(lambda n: n / 100), min_size=2, max_size=12).filter(lambda r: len(set(r)) > 1),
    shift=st.floats(-10, 10),
    scale=st.floats(0.1, 10),
    padding=st.integers(0, 3),
)
def test_whitened_advantages_have_mean_zero_and_std_one_whatever_the_scale_and_padding(values, shift, scale, padding):
    kept = mask([1] * len(values) + [0] * padding)
    white = whiten(rows(values + [NAN] * padding), kept)
    assert white[kept].mean().item() == pytest.approx(0.0, abs=1e-12)
    assert white[kept].std().item() == pytest.approx(1.0, abs=1e-12)
    same(whiten(rows([shift + scale * v for v in values] + [7.0] * padding), kept), white, atol=1e-10)
