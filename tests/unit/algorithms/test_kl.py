from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.kl import KL_ESTIMATORS, adaptive_kl_coef, k1, k2, k3, kl_loss_term

NAN = float("nan")
# Three distributions over a vocabulary of five, so that every expectation is a sum over it and not an estimate.
THETA = torch.tensor([0.3, -0.7, 1.1, 0.0, -0.2], dtype=torch.float64)
REFERENCE = torch.tensor([-0.4, 0.5, 0.6, -1.0, 0.2], dtype=torch.float64).log_softmax(0)
OLD = torch.tensor([0.9, -0.1, 0.2, -0.5, 0.4], dtype=torch.float64).log_softmax(0)


def reverse_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs.exp() * (logprobs - ref_logprobs)).sum()


def gradient(expectation) -> torch.Tensor:
    """d expectation(log p) / d theta."""
    theta = THETA.clone().requires_grad_()
    return torch.autograd.grad(expectation(theta.log_softmax(0)), theta)[0]


REVERSE_KL_GRADIENT = gradient(lambda logprobs: reverse_kl(logprobs, REFERENCE))


def term(logprobs: torch.Tensor, old_logprobs: torch.Tensor, estimator: str) -> torch.Tensor:
    return kl_loss_term(logprobs[None], old_logprobs[None], REFERENCE[None], estimator=estimator)[0]


def test_estimators_by_hand():
    # p = 1/2, q = 1/4: log p - log q = ln 2, q/p = 1/2.   p = 1/4, q = 1/2: -ln 2 and 2.
    logprobs = torch.tensor([[0.5, 0.25]], dtype=torch.float64).log()
    ref_logprobs = torch.tensor([[0.25, 0.5]], dtype=torch.float64).log()
    ln2 = math.log(2.0)
    expected = {
        "k1": [ln2, -ln2],
        "k2": [ln2**2 / 2, ln2**2 / 2],
        "k3": [0.5 - 1 + ln2, 2 - 1 - ln2],
    }
    assert set(expected) == set(KL_ESTIMATORS)
    for name, numbers in expected.items():
        actual = KL_ESTIMATORS[name](logprobs, ref_logprobs)
        torch.testing.assert_close(actual, torch.tensor([numbers], dtype=torch.float64), rtol=0, atol=1e-14, msg=name)


def test_k3_keeps_its_digits_where_policy_and_reference_nearly_agree():
    # x = 1e-4 in float32: k3 = e^x - 1 - x = x^2 / 2 + x^3 / 6 = 5.0002e-9; computed as exp(x) - 1 - x nothing of it would be left.
    value = k3(torch.tensor([[0.0]]), torch.tensor([[1e-4]]))
    assert value.item() == pytest.approx(5.0002e-9, rel=0.03)


def test_k1_and_k3_are_unbiased_and_k2_is_not_over_the_whole_vocabulary():
    logprobs = THETA.log_softmax(0)
    kl = reverse_kl(logprobs, REFERENCE)
    mean = {name: (logprobs.exp() * estimate(logprobs, REFERENCE)).sum() for name, estimate in KL_ESTIMATORS.items()}
    torch.testing.assert_close(mean["k1"], kl, rtol=0, atol=1e-14)
    torch.testing.assert_close(mean["k3"], kl, rtol=0, atol=1e-14)
    assert abs(mean["k2"] - kl) > 1e-3


def test_k2_is_right_to_second_order():
    # With theta_q + epsilon * d its error is of order epsilon^3: halving epsilon divides it by about 8, and KL itself only by 4.
    direction = THETA - THETA.mean()
    errors = []
    for epsilon in (0.02, 0.01):
        logprobs = (REFERENCE + epsilon * direction).log_softmax(0)
        errors.append(((logprobs.exp() * k2(logprobs, REFERENCE)).sum() - reverse_kl(logprobs, REFERENCE)).abs().item())
    assert errors[0] / errors[1] == pytest.approx(8.0, rel=0.05)


def test_k1_and_k3_sampled_means_are_the_kl():
    logprobs = THETA.log_softmax(0)
    tokens = torch.multinomial(logprobs.exp(), 200_000, replacement=True, generator=torch.Generator().manual_seed(0))
    kl = reverse_kl(logprobs, REFERENCE).item()
    for estimate in (k1, k3):
        drawn = estimate(logprobs[tokens], REFERENCE[tokens])
        standard_error = drawn.std().item() / math.sqrt(len(tokens))
        assert standard_error < kl / 100, "too few samples to tell anything"
        assert abs(drawn.mean().item() - kl) < 4 * standard_error
    assert k3(logprobs[tokens], REFERENCE[tokens]).std() < k1(logprobs[tokens], REFERENCE[tokens]).std()


def test_k2_in_the_loss_has_the_gradient_of_the_reverse_kl_on_policy():
    actual = gradient(lambda logprobs: (logprobs.detach().exp() * term(logprobs, logprobs.detach(), "k2")).sum())
    torch.testing.assert_close(actual, REVERSE_KL_GRADIENT, rtol=0, atol=1e-14)


def test_k3_as_a_loss_weighted_by_the_live_ratio_has_the_gradient_of_the_reverse_kl_on_and_off_policy():
    on_policy = gradient(lambda logprobs: (logprobs.detach().exp() * term(logprobs, logprobs.detach(), "k3")).sum())
    off_policy = gradient(lambda logprobs: (OLD.exp() * term(logprobs, OLD, "k3")).sum())
    torch.testing.assert_close(on_policy, REVERSE_KL_GRADIENT, rtol=0, atol=1e-14)
    torch.testing.assert_close(off_policy, REVERSE_KL_GRADIENT, rtol=0, atol=1e-14)


def test_raw_k3_as_a_loss_has_the_gradient_of_the_forward_kl_instead():
    raw = gradient(lambda logprobs: (logprobs.detach().exp() * k3(logprobs, REFERENCE)).sum())
    forward = gradient(lambda logprobs: (REFERENCE.exp() * (REFERENCE - logprobs)).sum())
    torch.testing.assert_close(raw, forward, rtol=0, atol=1e-14)
    assert (raw - REVERSE_KL_GRADIENT).abs().max() > 1e-2


def test_k1_as_a_loss_has_no_gradient_in_expectation_and_is_refused():
    nothing = gradient(lambda logprobs: (logprobs.detach().exp() * k1(logprobs, REFERENCE)).sum())
    torch.testing.assert_close(nothing, torch.zeros_like(nothing), rtol=0, atol=1e-14)
    with pytest.raises(ValueError, match="expected k2 or k3, got k1"):
        term(OLD, OLD, "k1")
    with pytest.raises(ValueError, match="expected k2 or k3, got k4"):
        term(OLD, OLD, "k4")


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_loss_terms_take_gradients_for_the_policy_alone(estimator):
    logprobs, old_logprobs, ref_logprobs = (-torch.rand(3, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))).unbind()
    for tensor in (logprobs, old_logprobs, ref_logprobs):
        tensor.requires_grad_()
    kl_loss_term(logprobs, old_logprobs, ref_logprobs, estimator=estimator).sum().backward()
    assert logprobs.grad.abs().min() > 0
    assert old_logprobs.grad is None and ref_logprobs.grad is None
    leaf = logprobs.detach().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kl_loss_term(x, old_logprobs, ref_logprobs, estimator=estimator), leaf)


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize("rubbish", [NAN, float("inf"), -float("inf"), 1e4])
def test_masked_nan_in_a_loss_term_changes_neither_value_nor_gradient(estimator, rubbish):
    mask = torch.tensor([[True, True, False]])
    rows = [torch.tensor([[a, b, rubbish]], dtype=torch.float64) for a, b in ((-1.0, -2.0), (-1.1, -1.9), (-0.7, -2.5))]
    rows[0].requires_grad_()
    short = [row[:, :2].detach().clone() for row in rows]
    short[0].requires_grad_()
    padded = kl_loss_term(*rows, mask, estimator=estimator)
    plain = kl_loss_term(*short, estimator=estimator)
    padded.sum().backward()
    plain.sum().backward()
    assert torch.equal(padded, torch.nn.functional.pad(plain, (0, 1)))
    assert torch.equal(rows[0].grad, torch.nn.functional.pad(short[0].grad, (0, 1)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(logprob=st.floats(-30, 0), ref_logprob=st.floats(-30, 0))
def test_k2_and_k3_are_never_negative_and_all_are_zero_only_without_a_difference(logprob, ref_logprob):
    a, b = torch.tensor([[logprob]], dtype=torch.float64), torch.tensor([[ref_logprob]], dtype=torch.float64)
    assert k2(a, b) >= 0 and k3(a, b) >= 0
    assert k1(a, b).item() == -k1(b, a).item() == logprob - ref_logprob
    if abs(logprob - ref_logprob) > 1e-3:
        assert k2(a, b) > 0 and k3(a, b) > 0
    for estimate in (k1, k2, k3):
        assert estimate(a, a).item() == 0.0


# The coefficient


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),  # on target
        (6.6, 0.101),  # 10 % above: 0.1 * (1 + 0.1 * 100 / 1000)
        (5.4, 0.099),  # 10 % below
        (60.0, 0.102),  # far above: as 20 %
        (0.0, 0.098),  # far below: as 20 %
        (-3.0, 0.098),  # k1 can be negative
    ],
)
def test_adaptive_kl_coef_by_hand(kl, expected):
    assert adaptive_kl_coef(0.1, kl, target=6.0, horizon=1000, samples=100) == pytest.approx(expected, abs=1e-15)


def test_adaptive_kl_coef_settles_on_the_target():
    # A policy whose KL is 1 / coefficient: for a target of 4 the coefficient has to come to 1/4, from either side.
    for coef in (0.01, 10.0):
        for _ in range(1000):
            coef = adaptive_kl_coef(coef, 1 / coef, target=4.0, horizon=1000, samples=100)
        assert coef == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("kl", [float("nan"), float("inf"), -float("inf")])
def test_adaptive_kl_coef_refuses_a_kl_that_is_not_finite(kl):
    with pytest.raises(ValueError, match="expected a finite KL"):
        adaptive_kl_coef(0.1, kl, target=6.0, horizon=1000, samples=100)


def test_adaptive_kl_coef_stays_positive_or_the_horizon_is_refused():
    assert adaptive_kl_coef(0.1, 0.0, target=6.0, horizon=21, samples=100) > 0
    with pytest.raises(ValueError, match="expected more than a fifth of a step's 100 samples, got 20"):
        adaptive_kl_coef(0.1, 0.0, target=6.0, horizon=20, samples=100)
