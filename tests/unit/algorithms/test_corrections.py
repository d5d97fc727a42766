from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import pad

from rlhf_core.algorithms.corrections import importance_weights
from rlhf_core.config import CorrectionConfig

NAN = float("nan")
KINDS = CorrectionConfig.model_fields["kind"].annotation.__args__
# Ratios 4, 1/4, 1 and, after a masked one, 1/2, 1/2: products 1 and 1/4, geometric means 1 and 1/2.
RATIO = torch.tensor([[4.0, 0.25, 1.0], [NAN, 0.5, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [False, True, True]])
ROLLOUT = torch.tensor([[-5.0, -1.0, -0.5], [NAN, -2.0, -3.0]], dtype=torch.float64)


def weigh(kind: str, *, low: float = 0.3, high: float = 2.0, ratio: torch.Tensor = RATIO) -> tuple[torch.Tensor, dict[str, float]]:
    return importance_weights(ROLLOUT + ratio.log(), ROLLOUT, MASK, kind=kind, low=low, high=high)


@pytest.mark.parametrize(
    ("kind", "low", "high", "expected", "corrected"),
    [
        ("none", 0.3, 2.0, [1, 1, 1, 1, 1], 0),
        ("tis", 0.3, 2.0, [2, 0.25, 1, 0.5, 0.5], 1 / 5),  # the 4 is truncated; nothing is truncated from below
        ("icepop", 0.3, 2.0, [0, 0, 1, 0.5, 0.5], 2 / 5),  # 4 and 1/4 are outside, the others keep their ratio
        ("sequence_tis", 0.3, 0.9, [0.9, 0.9, 0.9, 0.25, 0.25], 3 / 5),  # products: min(4 * 1/4 * 1, 0.9) and 1/2 * 1/2
        ("sequence_mask", 0.6, 2.0, [1, 1, 1, 0, 0], 2 / 5),  # means: 1 is inside, (1/4)^(1/2) = 1/2 is below
        ("sequence_mask", 0.3, 0.9, [0, 0, 0, 1, 1], 3 / 5),  # 1 is above; 1/2 is inside, the product 1/4 would not be
    ],
)
def test_each_correction_by_hand(kind, low, high, expected, corrected):
    weights, metrics = weigh(kind, low=low, high=high)
    torch.testing.assert_close(weights[MASK], torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)
    assert metrics["corrected_fraction"] == pytest.approx(corrected, abs=1e-14)
    assert (weights[~MASK] == 1).all()


@pytest.mark.parametrize("kind", KINDS)
def test_mismatch_by_hand_whatever_the_kind(kind):
    # |log ratio|: 2 ln 2, 2 ln 2, 0, ln 2, ln 2; ratios: 6.25 in all; log ratios: -2 ln 2 in all
    _, metrics = weigh(kind)
    assert metrics["mismatch_mean"] == pytest.approx(6 * math.log(2) / 5, abs=1e-14)
    assert metrics["mismatch_max"] == pytest.approx(2 * math.log(2), abs=1e-14)
    assert metrics["ratio_mean"] == pytest.approx(6.25 / 5, abs=1e-14)
    assert metrics["mismatch_kl"] == pytest.approx((6.25 - 5 + 2 * math.log(2)) / 5, abs=1e-14)


def test_the_mismatch_estimates_the_kl_of_the_sampling_engine_from_the_trainer():
    # Over all 4 words, each as often as the engine samples it: 1/2, 1/4, 1/8, 1/8 against a trainer that has them in the other order.
    engine = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64)
    words = torch.tensor([[0, 0, 0, 0, 1, 1, 2, 3]])
    trainer = engine.flip(0)
    _, metrics = importance_weights(
        trainer.log()[words], engine.log()[words], torch.ones_like(words, dtype=torch.bool), kind="none", low=0.5, high=2
    )
    # 1/2 ln 4 + 1/4 ln 2 - 1/8 ln 2 - 1/8 ln 4 = 7/8 ln 2
    assert metrics["mismatch_kl"] == pytest.approx(7 / 8 * math.log(2), abs=1e-14)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_probabilities_have_weight_one(kind):
    weights, metrics = weigh(kind, ratio=torch.ones_like(RATIO))
    assert (weights == 1).all()
    assert metrics == {"mismatch_mean": 0, "mismatch_max": 0, "ratio_mean": 1, "mismatch_kl": 0, "corrected_fraction": 0}


@pytest.mark.parametrize("kind", KINDS)
def test_masked_entries_padding_and_other_rows_change_no_weight(kind):
    weights, metrics = weigh(kind)
    old = (ROLLOUT + RATIO.log()).where(MASK, 1e6)
    again, same = importance_weights(
        pad(old, (0, 2), value=NAN), pad(ROLLOUT, (0, 2), value=1.0), pad(MASK, (0, 2)), kind=kind, low=0.3, high=2.0
    )
    assert torch.equal(again, pad(weights, (0, 2), value=1.0)) and same == metrics
    rows = [importance_weights(old[i : i + 1], ROLLOUT[i : i + 1], MASK[i : i + 1], kind=kind, low=0.3, high=2.0)[0] for i in (0, 1)]
    assert torch.equal(torch.cat(rows), weights)


@pytest.mark.parametrize("kind", KINDS)
def test_without_tokens_there_is_no_mismatch(kind):
    nothing = torch.full((2, 3), NAN)
    weights, metrics = importance_weights(nothing, nothing, torch.zeros(2, 3, dtype=torch.bool), kind=kind, low=0.5, high=2.0)
    assert (weights == 1).all() and all(map(math.isnan, metrics.values()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_huge_ratio_never_becomes_a_huge_weight_unless_nothing_is_corrected(kind):
    # e^800 is no float64. Only icepop and the mask drop it; the truncating ones hold it at high.
    old = ROLLOUT + torch.tensor([[800.0, 0, 0], [0, 0, 0]])
    weights, _ = importance_weights(old, ROLLOUT, MASK, kind=kind, low=0.3, high=2.0)
    first = {"none": 1.0, "tis": 2.0, "icepop": 0.0, "sequence_tis": 2.0, "sequence_mask": 0.0}[kind]
    assert weights[0, 0] == first and (weights[1] == 1).all()


def test_weights_are_constants_in_the_precision_that_came_in():
    old = torch.zeros(1, 2, requires_grad=True)
    weights, _ = importance_weights(old, torch.full((1, 2), -0.1), torch.ones(1, 2, dtype=torch.bool), kind="tis", low=0.5, high=2.0)
    assert not weights.requires_grad and weights.dtype == torch.float32


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="sequence_tis or sequence_mask, got geometric"):
        weigh("geometric")
