from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.logprobs import token_entropy, token_logprobs

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


def test_half_precision_logits_are_computed_in_float32():
    logits = 4 * torch.randn(64, 50, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.arange(64) % 50
    logprobs, entropy = token_logprobs(logits, ids, temperature=0.9), token_entropy(logits, temperature=0.9)
    assert logprobs.dtype == entropy.dtype == torch.float32
    exact = (logits.double() / 0.9).log_softmax(-1)
    torch.testing.assert_close(logprobs.double(), exact[torch.arange(64), ids], rtol=0, atol=4e-6)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact).sum(-1), rtol=0, atol=4e-6)


def test_backward_keeps_no_copy_of_the_vocabulary_beside_the_logits():
    logits = torch.randn(8, 1000, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        token_logprobs(logits, torch.zeros(8, dtype=torch.long), temperature=1.0)
    large = [t for t in kept if t.numel() >= logits.numel()]
    assert large, "expected the logits among the saved tensors"
    assert {t.data_ptr() for t in large} == {logits.data_ptr()}


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
