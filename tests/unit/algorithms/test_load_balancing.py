from __future__ import annotations

import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from rlhf_core.algorithms.policy_losses import expert_counts, load_balancing_loss

LN3 = math.log(3.0)


def random_logits(rows: int) -> torch.Tensor:
    return torch.randn(rows, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def test_counts_and_loss_by_hand():
    """Two experts, one per token: probabilities (1/4, 3/4), (1/4, 3/4), (3/4, 1/4)."""
    logits = torch.tensor([[0.0, LN3], [0.0, LN3], [LN3, 0.0]])
    counts = expert_counts(logits, top_k=1)
    assert counts.tolist() == [1.0, 2.0]
    # f = (1/3, 2/3), P = (5/12, 7/12); 2 * (1/3 * 5/12 + 2/3 * 7/12) = 2 * 19/36 = 19/18
    assert float(load_balancing_loss(logits, counts, top_k=1)) == pytest.approx(19 / 18)


def test_an_even_load_costs_top_k_and_a_single_favourite_more():
    even = torch.eye(4) * 1e-3
    assert float(load_balancing_loss(even, expert_counts(even, top_k=1), top_k=1)) == pytest.approx(1.0)
    favourite = torch.tensor([[20.0, 0.0, 0.0, 0.0]] * 4)
    assert float(load_balancing_loss(favourite, expert_counts(favourite, top_k=1), top_k=1)) == pytest.approx(4.0)


def test_it_is_hugging_faces_loss_over_several_layers():
    layers = (random_logits(7), random_logits(7) * 3)
    joined = torch.cat(layers)
    expected = load_balancing_loss_func(layers, num_experts=4, top_k=2)
    found = load_balancing_loss(joined, expert_counts(joined, top_k=2), top_k=2)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)


def test_gradient_is_that_of_the_probabilities_with_the_counts_held():
    logits = random_logits(5)
    counts = expert_counts(logits, top_k=2)
    assert not counts.requires_grad
    # E * sum_e f_e / M * p_te (onehot - p_t): differentiated by hand, with M = 5 and f = counts / 5
    weight = 4 * counts.double() / 25
    probability = logits.detach().softmax(-1)
    by_hand = probability * (weight - (probability * weight).sum(-1, keepdim=True))
    load_balancing_loss(logits, counts, top_k=2).backward()
    torch.testing.assert_close(logits.grad, by_hand, rtol=0, atol=1e-7)


@pytest.mark.parametrize("cuts", [(3, 8), (1, 10), (5, 5, 1)])
def test_shares_of_the_parts_add_up_in_value_and_gradient(cuts: tuple[int, ...]):
    logits = random_logits(11)
    counts = expert_counts(logits, top_k=2)
    whole = load_balancing_loss(logits, counts, top_k=2)
    (gradient,) = torch.autograd.grad(whole, logits)
    parts = logits.split(cuts)
    assert torch.equal(sum(expert_counts(p, top_k=2) for p in parts), counts)
    shares = sum(load_balancing_loss(p, counts, top_k=2) for p in parts)
    assert float(shares.detach()) == pytest.approx(float(whole.detach()), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(shares, logits)[0], gradient, rtol=0, atol=1e-7)


def test_no_tokens_cost_nothing():
    logits = torch.zeros(0, 4, requires_grad=True)
    counts = expert_counts(logits, top_k=2)
    assert counts.tolist() == [0.0] * 4
    loss = load_balancing_loss(logits, counts, top_k=2)
    loss.backward()
    assert float(loss.detach()) == 0.0
