"""Exact paired tests: p-values counted by hand, sizes by enumeration, gains that are found."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom, multinomial

from rlhf_core.statistics.exact_test import UNCERTAIN, p_value, prompts_needed, smallest_gain


def test_the_sign_test_counts_decided_comparisons_only():
    assert p_value(4, 0, 1000) == pytest.approx(1 / 16)
    # P(X >= 3) of 4: (4 + 1) / 16
    assert p_value(3, 1, 4) == p_value(3, 1, 9000) == pytest.approx(5 / 16)
    assert p_value(0, 0, 50) == p_value(0, 7, 50) == 1


def test_without_ties_a_margin_is_a_binomial_test_of_its_share():
    # Ahead minus behind of at most 0.2 is a share of 0.6; all decided, so that hardly another number of decided ones is possible.
    exact = binom.sf(719, 1000, 0.6)
    assert exact <= p_value(720, 280, 1000, margin=0.2) <= 1.001 * exact + UNCERTAIN
    assert p_value(600, 400, 1000, margin=0.2) == pytest.approx(binom.sf(599, 1000, 0.6), rel=0.01)


@pytest.mark.parametrize("margin", [0.0, 0.1, -0.1])
@pytest.mark.parametrize("decided", [0.3, 0.9])
def test_the_p_value_is_at_most_a_level_no_more_often_than_that(margin, decided):
    """Every outcome of 30 prompts at the edge of the hypothesis, with its chance."""
    n, shares = 30, ((decided + margin) / 2, (decided - margin) / 2, 1 - decided)
    outcomes = [(a, b, n - a - b) for a in range(n + 1) for b in range(n + 1 - a)]
    chances = multinomial.pmf(outcomes, n, shares)
    p_values = np.array([p_value(a, b, n, margin=margin) for a, b, _ in outcomes])
    for level in (0.05, 0.01, 0.00133):
        assert chances[p_values <= level].sum() <= level
    assert chances[p_values <= 0.05].sum() > 0.001  # and it isn't useless


def test_more_wins_never_raise_the_p_value():
    for margin in (0.0, 0.05):
        found = [p_value(a, 200 - a, 400, margin=margin) for a in range(201)]
        assert all(a >= b for a, b in itertools.pairwise(found))


@pytest.mark.parametrize("margin", [0.0, 0.05])
def test_the_smallest_gain_is_detected_with_the_stated_power(margin):
    gain = smallest_gain(100, 200, 0.00133, margin=margin, power=0.8)
    ahead = (1 + gain / 0.5) / 2  # of a decided comparison
    power = sum(binom.pmf(a, 100, ahead) for a in range(101) if p_value(a, 100 - a, 200, margin=margin) <= 0.00133)
    assert power == pytest.approx(0.8, abs=1e-6) and gain > margin


def test_more_prompts_find_smaller_gains_and_too_few_find_none():
    found = [smallest_gain(n, n, 0.00133) for n in (20, 100, 1000, 4000)]
    assert all(a > b for a, b in itertools.pairwise(found))
    assert smallest_gain(9, 9, 0.00133) is None  # 2^-9 = 0.00195
    assert not math.isnan(smallest_gain(10, 10, 0.00133))


@pytest.mark.parametrize(("counts", "margin"), [((5, 6, 10), 0.0), ((-1, 6, 10), 0.0), ((1, 1, 10), 1.0)])
def test_counts_and_margins_that_cannot_be_are_refused(counts, margin):
    with pytest.raises(ValueError, match="expected"):
        p_value(*counts, margin=margin)


@pytest.mark.parametrize("margin", [0.0, 0.02])
@pytest.mark.parametrize("gain", [0.06, 0.15])
def test_the_stated_number_of_prompts_detects_the_gain(margin, gain):
    needed = prompts_needed(gain, 0.5, 0.00133, margin=margin, power=0.8)
    assert smallest_gain(round(0.5 * needed), needed, 0.00133, margin=margin, power=0.8) == pytest.approx(gain, rel=0.02)


def test_no_number_of_prompts_shows_what_is_no_gain():
    assert prompts_needed(0.0, 0.5, 0.01) is None and prompts_needed(-0.1, 0.5, 0.01) is None
    assert prompts_needed(0.02, 0.5, 0.01, margin=0.02) is None and prompts_needed(-0.01, 0.5, 0.01, margin=-0.02) is None
