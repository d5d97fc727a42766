from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import pad

from rlhf_core.algorithms.kl import kl_loss_term
from rlhf_core.algorithms.policy_losses import aggregate, ppo_clip
from rlhf_core.config import RlConfig

NAN = float("nan")
MODES = [mode for mode in RlConfig.model_fields["loss_aggregation"].annotation.__args__ if mode != "auto"]
HORIZON = 10
# Rows of 3, 1 and 0 tokens: 4 tokens, 2 sequences.
LOSS = torch.tensor([[1.0, 2.0, 6.0], [5.0, NAN, float("inf")], [NAN, NAN, NAN]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, False, False], [False, False, False]])


def share(token_loss: torch.Tensor, response_mask: torch.Tensor, mode: str, step_mask: torch.Tensor) -> torch.Tensor:
    """The loss of a part of the step whose masks are step_mask."""
    counts = {"num_loss_tokens": int(step_mask.sum()), "num_sequences": int(step_mask.any(1).sum()), "horizon": HORIZON}
    return aggregate(token_loss, response_mask, mode=mode, **counts)


@pytest.mark.parametrize(
    ("mode", "expected", "gradients"),
    [
        ("token_mean", 14 / 4, [1 / 4, 1 / 4, 1 / 4, 1 / 4]),  # (1 + 2 + 6 + 5) / 4
        ("sequence_mean", 4.0, [1 / 6, 1 / 6, 1 / 6, 1 / 2]),  # (9/3 + 5/1) / 2
        ("constant_horizon", 0.7, [1 / 20, 1 / 20, 1 / 20, 1 / 20]),  # (9/10 + 5/10) / 2
    ],
)
def test_loss_by_hand_with_gradient_and_masked_nan(mode, expected, gradients):
    token_loss = LOSS.clone().requires_grad_()
    loss = share(token_loss, MASK, mode, MASK)
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-14)
    torch.testing.assert_close(token_loss.grad[MASK], torch.tensor(gradients, dtype=torch.float64), rtol=0, atol=1e-14)
    assert torch.equal(token_loss.grad[~MASK], torch.zeros(5, dtype=torch.float64))


def test_modes_of_the_configuration_are_known_and_others_refused():
    for mode in MODES:
        share(LOSS, MASK, mode, MASK)
    with pytest.raises(ValueError, match="expected token_mean, sequence_mean or constant_horizon, got mean"):
        share(LOSS, MASK, "mean", MASK)


def test_in_the_constant_horizon_a_token_weighs_the_same_whatever_the_lengths():
    # One response of 3 tokens and one of 1, then with the second grown to 3: the first one's share stays 9 / 20.
    longer = torch.tensor([[True] * 3, [True] * 3, [False] * 3])
    first = [share(LOSS[:1], MASK[:1], "constant_horizon", step_mask).item() for step_mask in (MASK, longer)]
    assert first == [9 / 20, 9 / 20]
    assert share(LOSS[:1], MASK[:1], "token_mean", MASK) != share(LOSS[:1], MASK[:1], "token_mean", longer)


@pytest.mark.parametrize("mode", MODES)
def test_a_part_or_a_step_without_tokens_adds_zero_with_zero_gradient(mode):
    nothing = torch.full((2, 3), NAN, requires_grad=True)
    empty = torch.zeros(2, 3, dtype=torch.bool)
    for step_mask in (MASK, empty):
        loss = share(nothing, empty, mode, step_mask)
        (gradient,) = torch.autograd.grad(loss, nothing)
        assert loss.item() == 0 and not gradient.any()


def test_a_mean_of_microbatch_means_would_be_another_loss():
    # What the global denominators are for. Parts: row 0 (3 tokens) and row 1 (1 token).
    # Mean of the parts' token means: (9/3 + 5/1) / 2 = 4, against 14/4 = 3.5.
    parts = [share(LOSS[i : i + 1], MASK[i : i + 1], "token_mean", MASK[i : i + 1]) for i in (0, 1)]
    assert torch.stack(parts).mean().item() == pytest.approx(4.0, abs=1e-14)
    assert share(LOSS, MASK, "token_mean", MASK).item() == pytest.approx(3.5, abs=1e-14)


def step_loss(logprobs: torch.Tensor, constants: tuple[torch.Tensor, ...], response_mask: torch.Tensor, mode: str, step_mask: torch.Tensor):
    """Policy loss and KL term of one part, as the trainer puts them together."""
    old_logprobs, ref_logprobs, advantages = constants
    token_loss, _ = ppo_clip(logprobs, old_logprobs, advantages, response_mask, clip_low=0.2, clip_high=0.2)
    return share(
        token_loss + 0.3 * kl_loss_term(logprobs, old_logprobs, ref_logprobs, response_mask, estimator="k3"), response_mask, mode, step_mask
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    cuts=st.sets(st.integers(1, 7), max_size=5),
    padding=st.integers(0, 3),
    mode=st.sampled_from(MODES),
)
def test_the_step_has_the_same_loss_and_gradient_however_it_is_cut_into_microbatches_and_ranks(seed, cuts, padding, mode):
    generator = torch.Generator().manual_seed(seed)
    logprobs, *constants = (torch.randn(4, 8, 5, dtype=torch.float64, generator=generator) * 0.3).unbind()
    step_mask = torch.rand(8, 5, generator=generator) < 0.5
    whole = step_loss(logprobs.requires_grad_(), constants, step_mask, mode, step_mask)
    (gradient,) = torch.autograd.grad(whole, logprobs)

    pieces = logprobs.detach().clone().requires_grad_()
    borders = [0, *sorted(cuts), 8]
    total = 0.0
    for i, j in pairwise(borders):
        wide = [pad(x[i:j], (0, padding), value=NAN) for x in (pieces, *constants)]
        part = step_loss(wide[0], tuple(wide[1:]), pad(step_mask[i:j], (0, padding)), mode, step_mask)
        part.backward()  # accumulates, as an engine does over micro-batches and sums over ranks
        total += part.item()
    assert total == pytest.approx(whole.item(), abs=1e-13)
    torch.testing.assert_close(pieces.grad, gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("mode", MODES)
def test_gradient_agrees_with_finite_differences(mode):
    token_loss = torch.randn(3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: share(x, MASK, mode, MASK), token_loss)
