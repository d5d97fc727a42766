from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.preference_losses import bradley_terry


def pair(chosen: float, rejected: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([chosen], dtype=torch.float64), torch.tensor([rejected], dtype=torch.float64)


@pytest.mark.parametrize(
    ("chosen", "rejected", "margin", "centering_coef", "expected"),
    [
        (0.0, 0.0, 0.0, 0.0, math.log(2)),  # sigmoid(0) = 1/2
        (math.log(3), 0.0, 0.0, 0.0, math.log(4 / 3)),  # sigmoid(ln 3) = 3/4
        (0.0, math.log(3), 0.0, 0.0, math.log(4)),  # sigmoid(-ln 3) = 1/4
        (math.log(3), 0.0, math.log(3), 0.0, math.log(2)),  # a lead of ln 3 just meets a margin of ln 3
        (2.0, 1.0, 1.0, 0.01, math.log(2) + 0.09),  # lead 1 - margin 1; 0.01 * (2 + 1)^2
    ],
)
def test_bradley_terry_by_hand(chosen, rejected, margin, centering_coef, expected):
    loss = bradley_terry(*pair(chosen, rejected), margin=margin, centering_coef=centering_coef)
    torch.testing.assert_close(loss, torch.tensor([expected], dtype=torch.float64), rtol=0, atol=1e-14)


def test_bradley_terry_gradient_by_hand():
    # lead ln 3: -(1 - 3/4) = -1/4 for the chosen, +1/4 for the rejected; centring: 2 * 0.01 * (ln 3 + 0) for both
    chosen, rejected = pair(math.log(3), 0.0)
    chosen.requires_grad_(), rejected.requires_grad_()
    bradley_terry(chosen, rejected, margin=0.0, centering_coef=0.01).sum().backward()
    pull = 0.02 * math.log(3)
    assert chosen.grad.item() == pytest.approx(-0.25 + pull, abs=1e-14)
    assert rejected.grad.item() == pytest.approx(0.25 + pull, abs=1e-14)


def test_bradley_terry_gradient_agrees_with_finite_differences():
    scores = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    margin = torch.rand(5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    leaves = [s.clone().requires_grad_() for s in scores]
    assert torch.autograd.gradcheck(lambda c, r: bradley_terry(c, r, margin=margin, centering_coef=0.3), leaves)


def test_bradley_terry_stays_finite_where_the_sigmoid_underflows():
    # -log sigmoid(-1000) = 1000, with gradient -1 for the chosen
    chosen, rejected = torch.tensor([-500.0], requires_grad=True), torch.tensor([500.0])
    loss = bradley_terry(chosen, rejected, margin=0.0, centering_coef=0.0)
    loss.sum().backward()
    assert loss.item() == pytest.approx(1000.0) and chosen.grad.item() == pytest.approx(-1.0)


def test_the_sum_over_pairs_is_the_same_however_the_batch_is_cut():
    chosen, rejected = torch.randn(2, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    whole = bradley_terry(chosen, rejected, margin=0.1, centering_coef=0.02).sum()
    parts = [bradley_terry(c, r, margin=0.1, centering_coef=0.02).sum() for c, r in zip(chosen.split(3), rejected.split(3), strict=True)]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, rtol=0, atol=1e-13)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(chosen=st.floats(-20, 20), rejected=st.floats(-20, 20), shift=st.floats(-20, 20))
def test_without_centring_only_the_difference_counts_and_both_orders_are_a_distribution(chosen, rejected, shift):
    loss = bradley_terry(*pair(chosen, rejected), margin=0.0, centering_coef=0.0)
    moved = bradley_terry(*pair(chosen + shift, rejected + shift), margin=0.0, centering_coef=0.0)
    swapped = bradley_terry(*pair(rejected, chosen), margin=0.0, centering_coef=0.0)
    torch.testing.assert_close(loss, moved, rtol=0, atol=1e-12)
    assert ((-loss).exp() + (-swapped).exp()).item() == pytest.approx(1.0, abs=1e-12)
