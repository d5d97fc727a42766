"""Rewards of steps: numbers by hand, and sums that are the response's reward."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.algorithms.step_rewards import START, aggregate_of, running_aggregate, step_rewards

NAN = float("nan")
PROBABILITIES = torch.tensor([[0.9, 0.4, 0.7], [0.8, NAN, NAN]])


@pytest.mark.parametrize(
    ("aggregate", "scores", "rewards"),
    [
        # min: 0.4 and 0.8. From 1: 0.9 - 1, 0.4 - 0.9, then 0.7 changes nothing.
        ("min", [0.4, 0.8], [[-0.1, -0.5, 0.0], [-0.2, 0.0, 0.0]]),
        # sum: 0.9 + 0.4 + 0.7
        ("sum", [2.0, 0.8], [[0.9, 0.4, 0.7], [0.8, 0.0, 0.0]]),
        # last: 0.7 and 0.8. From 0: 0.9, 0.4 - 0.9, 0.7 - 0.4
        ("last", [0.7, 0.8], [[0.9, -0.5, 0.3], [0.8, 0.0, 0.0]]),
    ],
)
def test_three_steps_by_hand(aggregate, scores, rewards):
    torch.testing.assert_close(aggregate_of(PROBABILITIES, aggregate), torch.tensor(scores))
    torch.testing.assert_close(step_rewards(PROBABILITIES, aggregate), torch.tensor(rewards), rtol=0, atol=1e-6)


@given(st.lists(st.lists(st.floats(0, 1, width=32), max_size=5), min_size=1, max_size=4), st.sampled_from(["min", "sum", "last"]))
def test_rewards_of_all_steps_are_the_reward_of_the_response(rows, aggregate):
    width = max(map(len, rows))
    probabilities = torch.tensor([[*row, *[NAN] * (width - len(row))] for row in rows]).reshape(len(rows), width)
    found, whole = step_rewards(probabilities, aggregate).sum(1), aggregate_of(probabilities, aggregate)
    for row, reward, score in zip(rows, found.tolist(), whole.tolist(), strict=True):
        assert score != score if not row else reward == pytest.approx(score - START[aggregate], abs=1e-5)


def test_padding_changes_nothing():
    padded = torch.cat([PROBABILITIES, torch.full((2, 3), NAN)], 1)
    for aggregate in START:
        torch.testing.assert_close(aggregate_of(padded, aggregate), aggregate_of(PROBABILITIES, aggregate))
        torch.testing.assert_close(step_rewards(padded, aggregate)[:, :3], step_rewards(PROBABILITIES, aggregate))
        assert running_aggregate(padded, aggregate)[:, 3:].isnan().all()


def test_without_any_step_there_is_no_score():
    assert aggregate_of(torch.zeros(2, 0), "min").isnan().all() and step_rewards(torch.zeros(2, 0), "sum").shape == (2, 0)
