"""Intervals and accuracies against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, t

from rlhf_core.statistics import PairAccuracy, accuracy_with_ties, difference_interval, mean_interval, wilson_interval, win_rate_interval

# Two-sided 95%: z = 1.959964, z^2 = 3.841459.
CONFIDENCE = 0.95


def test_wilson_of_eight_in_ten():
    # centre = 0.8 + 3.841459 / 20 = 0.992073; scale = 1.384146
    # half = 1.959964 * sqrt(0.8 * 0.2 / 10 + 3.841459 / 400) = 1.959964 * sqrt(0.0256036) = 0.313614
    # low = 0.678459 / 1.384146 = 0.490162, high = 1.305687 / 1.384146 = 0.943318
    assert wilson_interval(8, 10, CONFIDENCE) == pytest.approx((0.490162, 0.943318), abs=2e-6)


def test_wilson_of_half_a_success_for_a_tie():
    # One trial, a tie: p = 0.5. centre = 0.5 + 1.920729 = 2.420729, scale = 4.841459, so the middle is 0.5.
    # half = 1.959964 * sqrt(0.25 + 0.960365) = 1.959964 * 1.100166 = 2.156286; / 4.841459 = 0.445380
    assert wilson_interval(0.5, 1, CONFIDENCE) == pytest.approx((0.054620, 0.945380), abs=2e-6)


def test_wilson_at_the_ends():
    # p = 1: low = n / (n + z^2) = 10 / 13.841459 = 0.722467
    assert wilson_interval(10, 10, CONFIDENCE) == (pytest.approx(0.722467, abs=1e-6), 1.0)
    assert wilson_interval(0, 10, CONFIDENCE) == (0.0, pytest.approx(1 - 0.722467, abs=1e-6))
    assert wilson_interval(0, 0, CONFIDENCE) == (0.0, 1.0)


@given(st.integers(1, 5000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.5, 0.9, 0.95, 0.999]))
def test_wilson_is_scipys_for_whole_successes(counts, confidence):
    successes, n = counts
    expected = binomtest(successes, n).proportion_ci(confidence, method="wilson")
    assert wilson_interval(successes, n, confidence) == pytest.approx((expected.low, expected.high), abs=1e-9)


@given(st.integers(1, 500).flatmap(lambda n: st.tuples(st.integers(0, 2 * n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(counts):
    halves, n = counts
    low, high = wilson_interval(halves / 2, n, CONFIDENCE)
    assert 0 <= low <= halves / 2 / n <= high <= 1
    assert wilson_interval(n - halves / 2, n, CONFIDENCE) == pytest.approx((1 - high, 1 - low), abs=1e-9)


@pytest.mark.parametrize(("successes", "n", "confidence"), [(-0.5, 10, 0.95), (10.5, 10, 0.95), (math.nan, 10, 0.95), (5, 10, 1.0)])
def test_wilson_refuses_what_is_no_count(successes, n, confidence):
    with pytest.raises(ValueError, match="expected a number between"):
        wilson_interval(successes, n, confidence)


def test_win_rate_without_ties_is_a_share():
    assert win_rate_interval(8, 0, 10, CONFIDENCE) == wilson_interval(8, 10, CONFIDENCE)


def test_ties_are_half_wins_and_speak_for_neither_side():
    # 8 of the 10 that were decided: 0.490162 to 0.943318 (above). With 10 ties: (5 + 10 * 0.490162) / 20 and (5 + 10 * 0.943318) / 20.
    assert win_rate_interval(8, 10, 20, CONFIDENCE) == pytest.approx((0.495081, 0.721659), abs=2e-6)
    # A half stays a half: the ends are on the same side of it with ties and without.
    for wins, losses in ((30, 12), (22, 20), (9, 1)):
        alone = win_rate_interval(wins, 0, wins + losses, CONFIDENCE)
        among = win_rate_interval(wins, 500, wins + losses + 500, CONFIDENCE)
        assert [a > 0.5 for a in alone] == [a > 0.5 for a in among]


def test_a_win_rate_that_nothing_was_compared_for_is_unknown():
    assert win_rate_interval(0, 0, 0, CONFIDENCE) == (0.0, 1.0)
    assert win_rate_interval(0, 7, 7, CONFIDENCE) == (0.5, 0.5)  # all tied: it is a half, and which way the next one goes is open


def test_accuracy_counts_ties_as_half_and_reports_them():
    # right, wrong, tie, right: (1 + 0 + 0.5 + 1) / 4 = 0.625
    assert accuracy_with_ties([1.0, 0.0, 0.3, 2.0], [0.0, 1.0, 0.3, -5.0]) == PairAccuracy(value=0.625, correct=2.5, ties=1, n=4)


def test_accuracy_of_a_constant_scorer_is_a_half():
    accuracy = accuracy_with_ties([0.0] * 9, [0.0] * 9)
    assert (accuracy.value, accuracy.ties) == (0.5, 9)


def test_accuracy_without_pairs_is_unknown():
    accuracy = accuracy_with_ties([], [])
    assert math.isnan(accuracy.value) and accuracy.n == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_accuracy_refuses_scores_without_an_order(bad):
    with pytest.raises(ValueError, match="expected finite numbers"):
        accuracy_with_ties([1.0, bad], [0.0, 0.0])


def test_accuracy_refuses_half_a_pair():
    with pytest.raises(ValueError, match="as many rejected as chosen"):
        accuracy_with_ties([1.0], [])


def test_mean_interval_by_hand():
    # 1, 2, 3, 4: mean 2.5, s^2 = (2.25 + 0.25 + 0.25 + 2.25) / 3 = 1.6667, s / sqrt(4) = 0.645497
    # t with 3 degrees of freedom at 0.975 = 3.182446; half = 2.054260
    assert mean_interval([1, 2, 3, 4], CONFIDENCE) == pytest.approx((0.445740, 4.554260), abs=2e-6)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=40).filter(lambda v: max(v) - min(v) > 1e-3))
def test_mean_interval_is_scipys(values):
    n, mean = len(values), sum(values) / len(values)
    s = math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1))
    assert mean_interval(values, 0.9) == pytest.approx(t.interval(0.9, n - 1, loc=mean, scale=s / math.sqrt(n)), rel=1e-6, abs=1e-6)


def test_mean_interval_of_one_value_is_unbounded():
    assert mean_interval([3.0], CONFIDENCE) == (-math.inf, math.inf)


def test_mean_interval_refuses_nan():
    with pytest.raises(ValueError, match="expected finite numbers"):
        mean_interval([1.0, math.nan], CONFIDENCE)


def test_difference_of_56_in_70_and_48_in_80():
    # Wilson: 0.8 in 0.691834 to 0.876953, 0.6 in 0.490455 to 0.700382.
    # low = 0.2 - sqrt(0.108166^2 + 0.100382^2) = 0.2 - 0.147569, high = 0.2 + sqrt(0.076953^2 + 0.109545^2) = 0.2 + 0.133873.
    # Newcombe's own table has 0.0524 and 0.3339.
    assert difference_interval((56, 70), (48, 80), CONFIDENCE) == pytest.approx((0.0524, 0.3339), abs=5e-5)


def test_difference_of_equal_shares_holds_zero_and_mirrors():
    low, high = difference_interval((30, 50), (300, 500), CONFIDENCE)
    assert low < 0 < high
    assert difference_interval((300, 500), (30, 50), CONFIDENCE) == pytest.approx((-high, -low), abs=1e-12)


def test_difference_with_an_empty_group_is_refused():
    with pytest.raises(ValueError, match="nothing to compare"):
        difference_interval((0, 0), (1, 2), CONFIDENCE)


def test_torch_is_imported_only_once_there_is_something_to_judge():
    code = "import sys, tasks.gate_reward; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
