from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.logprobs import sampler_logprobs, token_entropy, token_logprobs, token_logprobs_and_entropy

LN3 = math.log(3.0)


@pytest.mark.parametrize(
    ("temperature", "probabilities"),
    [
        (1.0, (1 / 4, 3 / 4)),  # e^0 : e^ln3 = 1 : 3
        (0.5, (1 / 10, 9 / 10)),  # e^0 : e^(2 ln3) = 1 : 9
    ],
)
def test_logprobs_and_entropy_by_hand_at_the_sampling_temperature(temperature, probabilities):
    logits = torch.tensor([[0.0, LN3], [0.0, LN3]], dtype=torch.float64)
    logprobs = token_logprobs(logits, torch.tensor([0, 1]), temperature=temperature)
    expected = torch.tensor([math.log(p) for p in probabilities], dtype=torch.float64)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-14)
    entropy = -sum(p * math.log(p) for p in probabilities)
    torch.testing.assert_close(token_entropy(logits, temperature=temperature), expected.new_full((2,), entropy), rtol=0, atol=1e-14)


def test_logprob_gradient_is_one_hot_less_probability_over_temperature():
    # d log p_1 / d z = (onehot_1 - p) / temperature = ((0, 1) - (1/10, 9/10)) / 0.5 = (-0.2, 0.2)
    logits = torch.tensor([[0.0, LN3]], dtype=torch.float64, requires_grad=True)
    token_logprobs(logits, torch.tensor([1]), temperature=0.5).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.2, 0.2]], dtype=torch.float64), rtol=0, atol=1e-14)


def test_gradients_agree_with_finite_differences():
    logits = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    ids = torch.tensor([0, 6, 3, 3])
    assert torch.autograd.gradcheck(lambda z: token_logprobs(z, ids, temperature=0.7), logits)
    assert torch.autograd.gradcheck(lambda z: token_entropy(z, temperature=0.7), logits)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_both_at_once_are_what_each_is_alone(temperature):
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(9, 11, dtype=torch.float64, generator=generator)
    logits[4, 2:5] = -torch.inf
    ids, weights = torch.randint(5, 11, (9,), generator=generator), torch.randn(9, dtype=torch.float64, generator=generator)
    alone, together = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    expected = token_logprobs(alone, ids, temperature=temperature)
    (expected * weights).sum().backward()
    logprobs, entropy = token_logprobs_and_entropy(together, ids, temperature=temperature)
    (logprobs * weights).sum().backward()
    close = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(logprobs, expected, **close)
    torch.testing.assert_close(entropy, token_entropy(logits, temperature=temperature), **close)
    torch.testing.assert_close(together.grad, alone.grad, **close)
    assert not entropy.requires_grad


def test_half_precision_logits_are_computed_in_float32():
    logits = 4 * torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.arange(64) % 50
    logprobs, entropy = token_logprobs(logits, ids, temperature=0.9), token_entropy(logits, temperature=0.9)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = (logits.double() / 0.9).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact[torch.arange(64), ids], rtol=0, atol=4e-6)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=4e-6)


def test_backward_keeps_one_tensor_of_the_vocabularys_size():
    logits = torch.randn(8, 1000, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, torch.zeros(8, dtype=torch.long), temperature=1.0)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert len({t.data_ptr() for t in large}) == 1


def test_huge_and_forbidden_logits_stay_finite():
    logits = torch.tensor([[5.0e4, 5.0e4, -torch.inf]], requires_grad=True)  # two tokens with probability 1/2, one forbidden
    logprobs, entropy = token_logprobs(logits, torch.tensor([1]), temperature=1.0), token_entropy(logits, temperature=1.0)
    torch.testing.assert_close(entropy, torch.tensor([math.log(2.0)]), rtol=0, atol=1e-6)
    torch.testing.assert_close(logprobs, torch.tensor([-math.log(2.0)]), rtol=0, atol=5e-3)  # float32 around 50,000 has steps of 0.004
    (logprobs + entropy).sum().backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.5, 0.5, 0.0]]), rtol=0, atol=5e-3)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    row=st.lists(st.floats(-20, 20), min_size=1, max_size=8),
    temperature=st.floats(0.1, 5.0),
    shift=st.floats(-50, 50),
)
def test_probabilities_sum_to_one_and_entropy_is_their_mean_surprise(row, temperature, shift):
    logits = torch.tensor([row] * len(row), dtype=torch.float64)
    logprobs = token_logprobs(logits, torch.arange(len(row)), temperature=temperature)
    assert logprobs.exp().sum().item() == pytest.approx(1.0, abs=1e-12)
    entropy = token_entropy(logits[:1], temperature=temperature).item()
    assert entropy == pytest.approx(-(logprobs.exp() * logprobs).sum().item(), abs=1e-11)
    assert -1e-12 <= entropy <= math.log(len(row)) + 1e-12
    torch.testing.assert_close(
        token_logprobs(logits + shift, torch.arange(len(row)), temperature=temperature), logprobs, rtol=0, atol=1e-10
    )


def test_no_tokens_give_no_numbers():
    assert token_logprobs(torch.zeros(0, 5), torch.zeros(0, dtype=torch.long), temperature=0.5).shape == (0,)
    assert token_entropy(torch.zeros(0, 5), temperature=0.5).shape == (0,)


# What the sampler draws from

QUARTERS = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64).log()


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 1.0, 0.8),  # 0.5 + 0.3
        (None, 0.7, 0.8),  # 0.5 is not enough, with 0.3 it is
        (None, 0.5 - 1e-9, 0.5),
        (3, 0.85, 0.95),  # of the three, 0.8 / 0.95 = 0.842 is not enough; of all four it would not be either
        (2, 0.6, 0.5),  # of the two, 0.5 / 0.8 = 0.625 is enough; of all four 0.5 would not be
        (9, 1.0, 1.0),
        (None, 1.0, 1.0),
    ],
)
def test_sampler_logprobs_by_hand(top_k: int | None, top_p: float, kept: float):
    found = sampler_logprobs(QUARTERS, torch.tensor([0]), temperature=1.0, top_k=top_k, top_p=top_p)
    assert float(found) == pytest.approx(math.log(0.5 / kept), abs=1e-12)


def test_the_temperature_comes_before_the_filter():
    # At temperature 1/2 probabilities are squared: 25, 9, 2.25, 0.25 of 36.5. 25 / 36.5 = 0.685 is above 0.6, though 0.5 isn't.
    found = sampler_logprobs(QUARTERS, torch.tensor([0]), temperature=0.5, top_k=None, top_p=0.6)
    assert float(found) == pytest.approx(0.0, abs=1e-12)


def test_ties_at_the_border_of_top_k_stay():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]], dtype=torch.float64)
    expected = 2.0 - math.log(math.exp(2) + 2 * math.exp(1))
    assert float(sampler_logprobs(logits, torch.tensor([0]), temperature=1.0, top_k=2, top_p=1.0)) == pytest.approx(expected)


def test_a_sampled_token_outside_of_the_filter_stays_finite():
    # 0.05 beside the kept 0.5: 0.05 / 0.55
    found = sampler_logprobs(QUARTERS, torch.tensor([3]), temperature=1.0, top_k=1, top_p=1.0)
    assert float(found) == pytest.approx(math.log(0.05 / 0.55), abs=1e-12)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(row=st.lists(st.floats(-20, 20), min_size=2, max_size=12), top_k=st.integers(1, 12), top_p=st.floats(0.05, 1.0))
def test_a_filter_only_takes_tokens_away(row: list[float], top_k: int, top_p: float):
    logits, ids = torch.tensor([row] * len(row), dtype=torch.float64), torch.arange(len(row))
    plain = token_logprobs(logits, ids, temperature=0.7)
    found = sampler_logprobs(logits, ids, temperature=0.7, top_k=top_k, top_p=top_p)
    assert (found >= plain - 1e-12).all()
    assert (found <= 1e-12).all()


def test_sampler_logprobs_without_a_filter_are_the_log_probabilities():
    logits = torch.randn(5, 9, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    ids = torch.arange(5)
    torch.testing.assert_close(
        sampler_logprobs(logits, ids, temperature=0.7, top_k=None, top_p=1.0),
        token_logprobs(logits, ids, temperature=0.7),
        rtol=0,
        atol=1e-14,
    )
    assert sampler_logprobs(logits[:0], ids[:0], temperature=0.7, top_k=2, top_p=0.5).shape == (0,)
