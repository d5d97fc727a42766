from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.algorithms.distillation import DIVERGENCES, forward_kl, jsd, reverse_kl, sampled_reverse_kl, weighted, with_rest

NAN = float("nan")
# Distributions over a vocabulary of five, so that every expectation is a sum over it and not an estimate.
THETA = torch.tensor([0.3, -0.7, 1.1, 0.0, -0.2], dtype=torch.float64)
TEACHER = torch.tensor([-0.4, 0.5, 0.6, -1.0, 0.2], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([0.9, -0.1, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(0)
EACH = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": partial(jsd, beta=0.3)}

logits = st.lists(st.floats(-8, 8), min_size=5, max_size=5).map(lambda x: torch.tensor(x, dtype=torch.float64).log_softmax(0))


def test_divergences_by_hand():
    # p = (1/2, 1/2), q = (1/4, 3/4); with beta 1/3: m = q/3 + 2p/3 = (5/12, 7/12).
    p, q = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    expected = {
        "reverse_kl": 0.5 * math.log(2) + 0.5 * math.log(2 / 3),
        "forward_kl": 0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2),
        "jsd": (0.25 * math.log(3 / 5) + 0.75 * math.log(9 / 7)) / 3 + 2 * (0.5 * math.log(6 / 5) + 0.5 * math.log(6 / 7)) / 3,
    }
    assert expected.keys() == DIVERGENCES.keys()
    for name, number in expected.items():
        options = {"beta": 1 / 3} if name == "jsd" else {}
        torch.testing.assert_close(
            DIVERGENCES[name](p, q, **options), torch.tensor([number], dtype=torch.float64), rtol=0, atol=1e-14, msg=name
        )


def test_sampled_reverse_kl_by_hand_with_gradient():
    # p = 1/2, p_old = 1/4, q = 1/8: ratio 2, log p - log q = ln 4, loss 2 ln 4; its gradient is the same, since d ratio / d log p = ratio.
    p = torch.tensor([[math.log(0.5), NAN]], dtype=torch.float64, requires_grad=True)
    old, teacher = torch.tensor([[0.25, NAN]]).double().log(), torch.tensor([[0.125, NAN]]).double().log()
    loss = sampled_reverse_kl(p, old, teacher, torch.tensor([[True, False]]))
    assert loss.tolist() == [pytest.approx([2 * math.log(4), 0.0])]
    loss.sum().backward()
    assert p.grad.tolist() == [pytest.approx([2 * math.log(4), 0.0])]


@pytest.mark.parametrize("old", [None, OLD], ids=["on policy", "off policy"])
def test_the_sampled_loss_has_value_and_gradient_of_the_reverse_kl_in_expectation(old):
    theta = THETA.clone().requires_grad_()
    logprobs = theta.log_softmax(0)
    old = logprobs.detach() if old is None else old
    every = torch.ones(1, 5, dtype=torch.bool)
    estimate = (old.exp() * sampled_reverse_kl(logprobs[None], old[None], TEACHER[None], every)[0]).sum()
    exact = reverse_kl(logprobs, TEACHER)
    torch.testing.assert_close(estimate, exact)
    torch.testing.assert_close(*(torch.autograd.grad(value, theta, retain_graph=True)[0] for value in (estimate, exact)))


@pytest.mark.parametrize("name", EACH)
def test_the_gradients_agree_with_finite_differences(name):
    teacher = torch.stack([TEACHER, OLD])
    theta = torch.stack([THETA, TEACHER]).requires_grad_()
    assert torch.autograd.gradcheck(lambda theta: EACH[name](theta.log_softmax(-1), teacher), theta)


@given(logits, logits)
def test_divergences_are_zero_for_equal_distributions_and_never_negative(p, q):
    for name, divergence in EACH.items():
        assert float(divergence(p, p)) == pytest.approx(0.0, abs=1e-12), name
        assert float(divergence(p, q)) >= -1e-12, name


@given(logits, logits)
def test_the_jsd_is_bounded_and_swaps_its_sides_with_beta(p, q):
    """Of a fair mixture by ln 2, of any by the entropy of the mixing."""
    for beta in (0.1, 0.5, 0.8):
        assert float(jsd(p, q, beta=beta)) <= -beta * math.log(beta) - (1 - beta) * math.log(1 - beta) + 1e-12
        assert float(jsd(p, q, beta=beta)) == pytest.approx(float(jsd(q, p, beta=1 - beta)), abs=1e-12)


def test_the_jsd_goes_to_the_forward_and_the_reverse_kl():
    logprobs, small = THETA.log_softmax(0), 1e-6
    assert float(jsd(logprobs, TEACHER, beta=small)) / small == pytest.approx(float(forward_kl(logprobs, TEACHER)), rel=1e-4)
    assert float(jsd(logprobs, TEACHER, beta=1 - small)) / small == pytest.approx(float(reverse_kl(logprobs, TEACHER)), rel=1e-4)


def test_the_rest_by_hand_with_gradient():
    # p = (1/2, 1/4) of a distribution: the rest is 1/4. d log p_rest / d log p_k = -p_k / p_rest = -2 and -1.
    logprobs = torch.tensor([[0.5, 0.25]]).double().log().requires_grad_()
    rest = with_rest(logprobs)
    torch.testing.assert_close(rest.detach().exp(), torch.tensor([[0.5, 0.25, 0.25]]).double())
    (grad,) = torch.autograd.grad(rest[0, 2], logprobs)
    torch.testing.assert_close(grad, torch.tensor([[-2.0, -1.0]]).double())


def test_tokens_that_have_all_probability_leave_a_finite_rest():
    for logprobs in (THETA.log_softmax(0).float(), torch.tensor([0.0, -200.0])):
        logprobs.requires_grad_()
        rest = with_rest(logprobs)
        assert float(rest[-1].detach().exp()) <= 1.1e-7
        assert torch.isfinite(torch.autograd.grad(reverse_kl(rest, rest.detach() - 0.5), logprobs)[0]).all()


@given(logits, logits)
def test_the_divergence_of_the_likeliest_tokens_grows_to_that_of_all(p, q):
    order = q.argsort(descending=True)
    for name, divergence in EACH.items():
        values = [float(divergence(*(with_rest(x[order[:k]]) for x in (p, q)))) for k in (1, 2, 3, 4)] + [float(divergence(p, q))]
        assert all(a <= b + 1e-6 for a, b in zip([0.0, *values[:-1]], values, strict=True)), (name, values)
        assert float(divergence(*(with_rest(p[order[:2]]),) * 2)) == pytest.approx(0.0, abs=1e-9)


def test_several_teachers_are_one_geometric_or_arithmetic_mean():
    """Weights 3 and 1: of the reverse KL the gradient is that from exp(3/4 log q1 + 1/4 log q2), of the forward KL from 3/4 q1 + 1/4 q2."""
    geometric = (0.75 * TEACHER + 0.25 * OLD).log_softmax(0)
    arithmetic = (0.75 * TEACHER.exp() + 0.25 * OLD.exp()).log()
    for divergence, one in ((reverse_kl, geometric), (forward_kl, arithmetic)):
        theta = THETA.clone().requires_grad_()
        logprobs = theta.log_softmax(0)
        several = weighted([divergence(logprobs, TEACHER), divergence(logprobs, OLD)], [3.0, 1.0])
        alone = divergence(logprobs, one)
        torch.testing.assert_close(*(torch.autograd.grad(value, theta, retain_graph=True)[0] for value in (several, alone)))
