"""Credit by turn, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.algorithms.turns import grpo_by_turn, placed_rewards

NAN = math.nan


def test_rewards_of_turns_lie_on_the_last_trained_token_before_them():
    mask = torch.tensor([[True, True, False, True, False], [False, False, False, True, True]])
    given_ = torch.tensor([[0.0, 1.0, 0.0, 0.0, 2.0], [0.0, 4.0, 0.0, 0.0, 8.0]])
    # Row 0: 1 stays; 2 is given after token 4, which isn't trained, so token 3 has it. Row 1: 4 comes before any trained token.
    assert placed_rewards(given_, mask).tolist() == [[0.0, 1.0, 0.0, 2.0, 0.0], [0.0, 0.0, 0.0, 0.0, 8.0]]


# Two samples of a prompt: the first has two turns with a gap between them, the second has one. Masked entries are NaN.
REWARDS = torch.tensor([[0.25, 0.75, NAN, 0.0, 3.0], [0.0, 0.0, NAN, NAN, NAN]])
TURNS = torch.tensor([[0, 0, -1, 1, 1], [0, 0, -1, -1, -1]])
MASK = TURNS >= 0
SAME = torch.zeros(2, dtype=torch.long)


def test_grpo_by_turn_by_hand():
    """CORRECTNESS, group baselines: statistics over the turns of the group's samples, and the sum over later turns."""
    # Turns have 1, 3 and 0: mean 4/3, deviations -1/3, 5/3, -4/3, their squares' sum 42/9, unbiased std sqrt(21/9) = 1.527525
    # Sample 0: its second turn 5/3 / std = 1.091089, its first one (-1/3 + 5/3) / std = 0.872872. Sample 1: -4/3 / std = -0.872872
    found = grpo_by_turn(REWARDS, TURNS, SAME, MASK, normalize_std=True)
    torch.testing.assert_close(
        found, torch.tensor([[0.872872, 0.872872, 0.0, 1.091089, 1.091089], [-0.872872, -0.872872, 0.0, 0.0, 0.0]]), rtol=0, atol=1e-6
    )
    undivided = grpo_by_turn(REWARDS, TURNS, SAME, MASK, normalize_std=False)
    torch.testing.assert_close(undivided[:, 0], torch.tensor([4 / 3, -4 / 3]))
    torch.testing.assert_close(undivided[0, 4], torch.tensor(5 / 3))


def test_a_turn_without_a_trained_token_is_none():
    mask = MASK.clone()
    mask[0, 3:] = False
    # Left are turns of 1 and 0: mean 0.5
    found = grpo_by_turn(REWARDS, TURNS, SAME, mask, normalize_std=False)
    assert found.tolist() == [[0.5, 0.5, 0.0, 0.0, 0.0], [-0.5, -0.5, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("normalize_std", [True, False])
def test_a_sample_alone_and_equal_turns_get_advantage_0(normalize_std: bool):
    alone = grpo_by_turn(REWARDS, TURNS, torch.tensor([0, 1]), MASK, normalize_std=normalize_std)
    equal = grpo_by_turn(
        torch.where(MASK, 0.5, NAN) / MASK.sum(1, keepdim=True), TURNS.clamp(max=0), SAME, MASK, normalize_std=normalize_std
    )
    nothing = grpo_by_turn(REWARDS, TURNS, SAME, torch.zeros_like(MASK), normalize_std=normalize_std)
    assert not alone.any() and float(equal.abs().max()) < 1e-9 and not nothing.any()


def test_padding_and_the_order_of_rows_change_nothing():
    found = grpo_by_turn(REWARDS, TURNS, SAME, MASK, normalize_std=True)
    pad = [torch.nn.functional.pad(t, (0, 3), value=v) for t, v in ((REWARDS, NAN), (TURNS, -1), (MASK, False))]
    torch.testing.assert_close(grpo_by_turn(pad[0], pad[1], SAME, pad[2], normalize_std=True)[:, :5], found)
    torch.testing.assert_close(grpo_by_turn(REWARDS.flip(0), TURNS.flip(0), SAME, MASK.flip(0), normalize_std=True).flip(0), found)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=1, max_size=4), min_size=2, max_size=5))
def test_with_one_token_a_turn_it_equals_loops_over_numbers(samples: list[list[float]]):
    width = max(map(len, samples))
    rewards = torch.tensor([[*s, *[NAN] * (width - len(s))] for s in samples])
    mask = torch.arange(width) < torch.tensor(list(map(len, samples)))[:, None]
    turns = torch.arange(width).expand(len(samples), width).where(mask, -1)
    found = grpo_by_turn(rewards, turns, torch.zeros(len(samples), dtype=torch.long), mask, normalize_std=False)
    flat = [reward for s in samples for reward in s]
    mean = sum(flat) / len(flat)
    for row, sample in zip(found.tolist(), samples, strict=True):
        assert row[: len(sample)] == pytest.approx([sum(r - mean for r in sample[k:]) for k in range(len(sample))], abs=1e-4)
