"""Losses of direct alignment: numbers by hand, gradients, and what must leave them as they are."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.algorithms.preference_losses import (
    PREFERENCE_LOSSES,
    UNPAIRED_LOSSES,
    PairLogprobs,
    apo_zero_unpaired,
    kto,
    kto_baseline,
    orpo,
    robust,
    sigmoid,
    simpo,
)
from rlhf_core.config import REFERENCE_FREE, DpoConfig, KtoConfig

OPTIONS = {"robust": {"label_smoothing": 0.2}, "simpo": {"simpo_margin": 0.5}}
LOSSES = {name: partial(loss, beta=0.5, **OPTIONS.get(name, {})) for name, loss in PREFERENCE_LOSSES.items()}
LOSSES["conservative"] = partial(sigmoid, beta=0.5, label_smoothing=0.1)
LN3 = math.log(3)
# Sums -2 and -6 over 4 and 2 tokens, reference -4 and -5: log ratios 2 and -1, per token 1/2 and -1/2, means -1/2 and -3.
BY_HAND = (-2.0, -6.0, -4.0, -5.0, 4, 2)


def pairs(*columns: float) -> PairLogprobs:
    return PairLogprobs(*(torch.tensor([c], dtype=torch.float64) for c in columns))


def random_pairs(count: int = 6, *, seed: int = 0) -> PairLogprobs:
    generator = torch.Generator().manual_seed(seed)
    logprobs = -6 * torch.rand(4, count, dtype=torch.float64, generator=generator) - 0.5
    lengths = torch.randint(1, 9, (2, count), generator=generator)
    return PairLogprobs(*logprobs, *lengths)


def sig(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_the_menu_is_that_of_the_configuration():
    assert set(PREFERENCE_LOSSES) == set(DpoConfig.model_fields["loss"].annotation.__args__)
    assert set(UNPAIRED_LOSSES) == set(KtoConfig.model_fields["loss"].annotation.__args__)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sigmoid", -math.log(sig(1.5))),  # h = 0.5 * (2 + 1)
        ("conservative", -0.9 * math.log(sig(1.5)) - 0.1 * math.log(sig(-1.5))),
        ("robust", (-0.8 * math.log(sig(1.5)) + 0.2 * math.log(sig(-1.5))) / 0.6),  # 1 - 2 * 0.2
        ("hinge", 0.0),  # 1 - 1.5 < 0
        ("ipo", 0.0),  # 1/2 + 1/2 is just 1 / (2 * 0.5)
        ("simpo", -math.log(sig(1.0))),  # 0.5 * (-1/2 + 3) - 0.5 * 0.5
        ("apo_zero", 1 - sig(1.0) + sig(-0.5)),  # rewards 0.5 * 2 and 0.5 * -1
        ("apo_down", sig(1.0) + 1 - sig(1.5)),
    ],
)
def test_direct_losses_by_hand(name: str, expected: float):
    assert LOSSES[name](pairs(*BY_HAND)).losses.item() == pytest.approx(expected, abs=1e-14)


def test_hinge_and_ipo_by_hand_away_from_their_zero():
    # Log ratios 1 and 0.5 over 2 and 1 tokens: h = 0.5 * 0.5 = 1/4 and 1 - 1/4; per token 1/2 - 1/2 = 0 against 1.
    given_pairs = pairs(-3.0, -2.0, -4.0, -2.5, 2, 1)
    assert LOSSES["hinge"](given_pairs).losses.item() == pytest.approx(0.75, abs=1e-14)
    assert LOSSES["ipo"](given_pairs).losses.item() == pytest.approx(1.0, abs=1e-14)


def test_orpo_by_hand():
    # Means ln 1/2 and ln 1/4, odds 1 and 1/3: log odds ratio ln 3, sigmoid 3/4. -ln(1/2) - 0.5 * ln(3/4)
    losses = orpo(pairs(-2 * math.log(2), -3 * math.log(4), 0.0, 0.0, 2, 3), beta=0.5).losses
    assert losses.item() == pytest.approx(math.log(2) - 0.5 * math.log(0.75), abs=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_rewards_are_beta_times_what_the_loss_compares(name: str):
    chosen, rejected = {"ipo": (0.25, -0.25), "simpo": (-0.25, -1.5), "orpo": (-0.25, -1.5)}.get(name, (1.0, -0.5))
    made = LOSSES[name](pairs(*BY_HAND))
    assert (made.chosen_rewards.item(), made.rejected_rewards.item()) == pytest.approx((chosen, rejected), abs=1e-14)


def test_dpo_ipo_sums_over_the_response_against_means_per_token():
    """The same means over twice the tokens are another pair for DPO, and the same for IPO, SimPO and ORPO, and for the normalised DPO."""
    once, twice = pairs(-2, -6, -4, -5, 4, 2), pairs(-4, -12, -8, -10, 8, 4)
    for name in ("ipo", "simpo", "orpo"):
        torch.testing.assert_close(LOSSES[name](once), LOSSES[name](twice), rtol=0, atol=1e-14)
    torch.testing.assert_close(LOSSES["sigmoid"](once.per_token()), LOSSES["sigmoid"](twice.per_token()), rtol=0, atol=1e-14)
    assert LOSSES["sigmoid"](twice).losses.item() == pytest.approx(-math.log(sig(3.0)), abs=1e-14)  # 0.5 * (4 + 2)
    # Normalised: 0.5 * (2/4 + 1/2)
    assert LOSSES["sigmoid"](once.per_token()).losses.item() == pytest.approx(-math.log(sig(0.5)), abs=1e-14)


@pytest.mark.parametrize("name", LOSSES)
def test_direct_losses_gradient_agrees_with_finite_differences(name: str):
    given_pairs = random_pairs()
    leaves = [side.clone().requires_grad_() for side in given_pairs[:2]]
    assert torch.autograd.gradcheck(lambda c, r: LOSSES[name](PairLogprobs(c, r, *given_pairs[2:])).losses, leaves)


@pytest.mark.parametrize("name", LOSSES)
def test_a_step_downhill_raises_the_chosen_over_the_rejected(name: str):
    """At the reference, where training starts; apo_down only lowers the rejected there."""
    start = random_pairs()
    chosen, rejected = (side.clone().requires_grad_() for side in start[:2])
    LOSSES[name](PairLogprobs(chosen, rejected, *start[:2], *(torch.full((6,), 3) for _ in range(2)))).losses.sum().backward()
    assert (rejected.grad > 0).all() and (chosen.grad < rejected.grad).all()
    assert (chosen.grad < 0).all() or name == "apo_down"


def test_apo_down_gradient_by_hand():
    # At the reference: 1/2 (1/4 - 1/4) = 0 for the chosen, 1/2 * 1/4 for the rejected. With rewards 0 and -ln 3, sigmoid' = 3/16 in the
    # second term: 1/2 (1/4 - 3/16) lowers the chosen too, less than the 1/2 * 3/16 of the rejected.
    for moved, expected in ((0.0, (0.0, 1 / 8)), (-2 * LN3, (1 / 32, 3 / 32))):
        chosen, rejected = torch.tensor([0.0], requires_grad=True), torch.tensor([moved], requires_grad=True)
        zero, one = torch.zeros(1), torch.ones(1)
        LOSSES["apo_down"](PairLogprobs(chosen, rejected, zero, zero, one, one)).losses.sum().backward()
        assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("name", LOSSES)
def test_the_reference_counts_where_the_loss_has_one_and_nowhere_else(name: str):
    given_pairs = random_pairs()
    moved = given_pairs._replace(ref_chosen_logprobs=given_pairs.ref_chosen_logprobs + 1.0)
    assert torch.equal(LOSSES[name](given_pairs).losses, LOSSES[name](moved).losses) == (name in REFERENCE_FREE)


@pytest.mark.parametrize("name", LOSSES)
def test_direct_losses_are_the_same_however_the_batch_is_cut(name: str):
    whole = random_pairs(10)
    cut = [PairLogprobs(*columns) for columns in zip(*(column.split(3) for column in whole), strict=True)]
    torch.testing.assert_close(torch.cat([LOSSES[name](part).losses for part in cut]), LOSSES[name](whole).losses, rtol=0, atol=0)


@settings(max_examples=50, derandomize=True)
@given(flipped=st.floats(0, 0.45), h=st.floats(-20, 20))
def test_robust_under_flipped_labels_is_in_expectation_dpo_under_clean_ones(flipped: float, h: float):
    right, wrong = (robust(pairs(x, 0, 0, 0, 1, 1), beta=1.0, label_smoothing=flipped).losses for x in (h, -h))
    clean = sigmoid(pairs(h, 0, 0, 0, 1, 1), beta=1.0).losses
    assert ((1 - flipped) * right + flipped * wrong).item() == pytest.approx(clean.item(), abs=1e-9)


def test_conservative_dpo_is_least_where_the_model_believes_the_label_with_its_probability():
    # d/dh = 0 where sigmoid(h) = 1 - eps = 3/4, h = ln 3
    chosen = torch.tensor([LN3], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(1)
    sigmoid(PairLogprobs(chosen, zero, zero, zero, zero + 1, zero + 1), beta=1.0, label_smoothing=0.25).losses.sum().backward()
    assert chosen.grad.item() == pytest.approx(0.0, abs=1e-15)


def test_simpo_margin_is_gamma_over_beta():
    # The means 1/2 apart just meet a margin of 1/2, whatever beta: ln 2
    for beta in (0.5, 2.0, 10.0):
        assert simpo(pairs(-1, -2, 0, 0, 2, 2), beta=beta, simpo_margin=0.5).losses.item() == pytest.approx(math.log(2), abs=1e-14)


def test_losses_stay_finite_at_certain_and_at_hopeless_responses():
    for dtype in (torch.float32, torch.float64):
        columns = ([0.0, -1e4, -1e-8, -1.0], [-1e4, 0.0, -1e-9, -1.0], [-1.0] * 4, [-1.0] * 4, [1] * 4, [1] * 4)
        extreme = PairLogprobs(*(torch.tensor(c, dtype=dtype) for c in columns))
        for name, loss in LOSSES.items():
            chosen, rejected = (side.clone().requires_grad_() for side in extreme[:2])
            losses = loss(PairLogprobs(chosen, rejected, *extreme[2:])).losses
            losses.sum().backward()
            for numbers in (losses, chosen.grad, rejected.grad):
                assert numbers.isfinite().all(), (name, dtype)


# Single responses

GOOD, BAD = torch.tensor([True]), torch.tensor([False])


def single(loss, log_ratio: float, desirable: torch.Tensor, kl: float) -> float:
    logprobs = torch.tensor([log_ratio - 5.0], dtype=torch.float64)
    options = {"beta": 0.5, "kl": torch.tensor(kl, dtype=torch.float64), "desirable_weight": 2.0, "undesirable_weight": 3.0}
    return loss(logprobs, torch.tensor([-5.0], dtype=torch.float64), desirable, **options).losses.item()


def test_kto_by_hand():
    # 0.5 * (2 ln 3 + 1 - 1) = ln 3, sigmoid 3/4: 2 * (1 - 3/4) for a good response, 3 * (1 - 1/4) for a bad one
    log_ratio = 2 * LN3 + 1
    assert single(kto, log_ratio, GOOD, 1.0) == pytest.approx(0.5, abs=1e-14)
    assert single(kto, log_ratio, BAD, 1.0) == pytest.approx(2.25, abs=1e-14)


def test_apo_zero_unpaired_by_hand_looks_at_no_baseline():
    for kl in (0.0, 7.0):
        assert single(apo_zero_unpaired, 2 * LN3, GOOD, kl) == pytest.approx(0.5, abs=1e-14)  # 2 * (1 - 3/4)
        assert single(apo_zero_unpaired, 2 * LN3, BAD, kl) == pytest.approx(2.25, abs=1e-14)  # 3 * 3/4


def test_apo_zero_is_its_unpaired_form_on_both_sides():
    both = random_pairs()
    options = {"beta": 0.5, "kl": torch.tensor(0.0), "desirable_weight": 1.0, "undesirable_weight": 1.0}
    good = apo_zero_unpaired(both.chosen_logprobs, both.ref_chosen_logprobs, GOOD, **options).losses
    bad = apo_zero_unpaired(both.rejected_logprobs, both.ref_rejected_logprobs, BAD, **options).losses
    torch.testing.assert_close(good + bad, LOSSES["apo_zero"](both).losses, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", UNPAIRED_LOSSES)
def test_unpaired_losses_gradient_raises_the_good_lowers_the_bad_and_agrees_with_finite_differences(name: str):
    given_pairs = random_pairs()
    desirable = torch.tensor([True, False] * 3)
    options = {"beta": 0.5, "kl": torch.tensor(0.3), "desirable_weight": 1.0, "undesirable_weight": 0.7}
    logprobs = given_pairs.chosen_logprobs.clone().requires_grad_()

    def losses(x: torch.Tensor) -> torch.Tensor:
        return UNPAIRED_LOSSES[name](x, given_pairs.ref_chosen_logprobs, desirable, **options).losses

    assert torch.autograd.gradcheck(losses, [logprobs])
    losses(logprobs).sum().backward()
    assert torch.equal(logprobs.grad < 0, desirable)


def test_the_baseline_is_the_mean_log_ratio_held_at_zero_without_gradient():
    logprobs = torch.tensor([-1.0, -4.0], requires_grad=True)
    assert kto_baseline(logprobs, torch.tensor([-3.0, -5.0])).item() == 1.5  # (2 + 1) / 2
    assert kto_baseline(logprobs, torch.tensor([0.0, -5.0])).item() == 0.0  # (-1 + 1) / 2
    assert kto_baseline(logprobs, torch.tensor([0.0, 0.0])).item() == 0.0  # not -2.5
    assert not kto_baseline(logprobs, torch.tensor([-3.0, -5.0])).requires_grad
