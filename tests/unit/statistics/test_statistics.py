"""Intervals and accuracies against numbers worked out by hand."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest, nct, t, ttest_1samp

from rlhf_core.statistics.intervals import (
    PairAccuracy,
    accuracy_with_ties,
    detectable_difference,
    detectable_mean_difference,
    difference_of_intervals,
    holm,
    interval_p_value,
    mean_interval,
    paired_difference,
    paired_interval,
    paired_means,
    points_interval,
    sign_test,
    wilson_interval,
)

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


def test_paired_interval_has_its_ends_where_the_score_statistic_is_z():
    # At each end (ahead - behind - n d)^2 = z^2 n (2 q + d (1 - d)).
    z, n, ahead, behind = 1.959964, 60, 14, 5
    for d in paired_interval(ahead, behind, n, CONFIDENCE):
        b, c = -ahead - behind + (2 * n - ahead + behind) * d, -behind * d * (1 - d)
        q = (-b + math.sqrt(b * b - 4 * 2 * n * c)) / (2 * 2 * n)
        assert (ahead - behind - n * d) ** 2 == pytest.approx(z**2 * n * (2 * q + d * (1 - d)), rel=1e-5)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [((1, 7, 21), (-0.5172, -0.0260)), ((0, 0, 10), (-0.2775, 0.2775)), ((10, 0, 10), (0.7225 * 2 - 1, 1.0)), ((0, 0, 0), (-1.0, 1.0))],
)
def test_paired_interval_of_known_counts(counts, expected):
    """The first: Fagerland, Lydersen and Laake 2014, https://doi.org/10.1002/sim.6148. Without ties it is Wilson's on another scale."""
    assert paired_interval(*counts, CONFIDENCE) == pytest.approx(expected, abs=1e-4)


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_paired_interval_mirrors_holds_its_point_and_stays_in_range(ahead, behind, even):
    n = ahead + behind + even
    low, high = paired_interval(ahead, behind, n, CONFIDENCE)
    assert -1 <= low <= high <= 1
    assert paired_interval(behind, ahead, n, CONFIDENCE) == pytest.approx((-high, -low), abs=1e-9)
    if n:
        assert low - 1e-12 <= (ahead - behind) / n <= high + 1e-12


def test_paired_interval_refuses_counts_that_do_not_fit():
    with pytest.raises(ValueError, match="expected ahead and behind of at most n=5 together, got 4 and 2"):
        paired_interval(4, 2, 5, CONFIDENCE)


def test_win_rate_interval_is_half_the_difference_of_wins_and_losses():
    low, high = paired_interval(3, 1, 6, CONFIDENCE)
    assert points_interval([1, 1, 1, 0.5, 0.5, 0], CONFIDENCE) == pytest.approx(((1 + low) / 2, (1 + high) / 2))
    assert points_interval([], CONFIDENCE) == (0.0, 1.0)
    with pytest.raises(ValueError, match=r"got 0\.25"):
        points_interval([1, 0.25], CONFIDENCE)


def test_the_number_of_ties_makes_a_win_rate_less_certain():
    """Half of the prompts tied: with their number fixed the interval would be as wide as that of 60 prompts, on half of the scale."""
    low, high = points_interval([1.0] * 55 + [0.5] * 60 + [0.0] * 5, CONFIDENCE)
    fixed_low, fixed_high = ((30 + 60 * end) / 120 for end in wilson_interval(55, 60, CONFIDENCE))
    assert high - low > 1.3 * (fixed_high - fixed_low)


def test_paired_difference_counts_the_four_cells():
    first = [True, True, True, False, False, True]
    second = [True, False, False, True, False, True]
    found = paired_difference(first, second, CONFIDENCE)
    assert (found.both, found.first_only, found.second_only, found.neither) == (2, 2, 1, 1)
    assert found.value == pytest.approx(1 / 6) and (found.low, found.high) == paired_interval(2, 1, 6, CONFIDENCE)
    assert math.isnan(paired_difference([], [], CONFIDENCE).value)
    with pytest.raises(ValueError, match="got 1 and 2"):
        paired_difference([True, False], [True], CONFIDENCE)


def test_sign_test_by_hand():
    # 8 of 10: P(X <= 2) = (1 + 10 + 45) / 1024 and P(X <= 1) = (1 + 10) / 1024, their sum is 2 P(X <= 2) - P(X = 2)
    assert sign_test(8, 2) == sign_test(2, 8) == pytest.approx(67 / 1024)
    assert (sign_test(5, 5), sign_test(0, 0), sign_test(5, 0)) == (pytest.approx(1.0), 1.0, pytest.approx(1 / 32))
    assert sign_test(160, 123) == pytest.approx(binomtest(123, 283).pvalue - binom.pmf(123, 283, 0.5))


def test_paired_means_are_a_t_test_of_the_differences():
    first, second = [1.0, 2.0, 4.0, math.nan, 3.0], [0.5, 2.5, 2.0, 1.0, 2.0]
    found = paired_means(first, second, CONFIDENCE)
    differences = [0.5, -0.5, 2.0, 1.0]
    assert (found.value, found.n) == (0.75, 4) and (found.low, found.high) == mean_interval(differences, CONFIDENCE)
    assert found.p_value == pytest.approx(ttest_1samp(differences, 0).pvalue)
    assert (paired_means([1], [0], CONFIDENCE).p_value, paired_means([], [], CONFIDENCE).p_value) == (1.0, 1.0)


def test_equal_differences_are_a_sign_test_for_nothing_shows_their_scatter():
    # 0.85 - 0.80 and 0.90 - 0.85 differ by rounding alone, and would be 10^15 standard errors from 0.
    found = paired_means([0.85, 0.9], [0.8, 0.85], CONFIDENCE)
    assert (found.p_value, found.varied) == (0.25, False)  # 0.5^2
    assert paired_means([1.0] * 10, [0.0] * 10, CONFIDENCE).p_value == pytest.approx(0.5**10)
    assert (paired_means([1, 1], [1, 1], CONFIDENCE).p_value, paired_means([1, 1], [0, 0.01], CONFIDENCE).varied) == (1.0, True)


def test_holm_by_hand():
    # Sorted 0.01, 0.02, 0.03, 0.04: 4 * 0.01, 3 * 0.02, 2 * 0.03, and 1 * 0.04 not below the one before it.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_p_value_of_an_interval_is_that_of_its_width():
    assert interval_p_value(1.959964, 0.0, 2 * 1.959964, CONFIDENCE) == pytest.approx(0.05, abs=1e-6)
    assert (interval_p_value(0.0, 0.0, 0.0, CONFIDENCE), interval_p_value(0.1, 0.1, 0.1, CONFIDENCE)) == (1.0, 0.0)


def test_a_detectable_difference_has_two_quantiles():
    # Standard error 0.1: (1.959964 + 0.841621) * 0.1
    assert detectable_difference(-0.1959964, 0.1959964, CONFIDENCE) == pytest.approx(0.2801585, abs=1e-6)


def test_a_detectable_mean_difference_is_found_with_its_power():
    n, deviation = 4, 0.5
    half = deviation * float(t.ppf(0.975, n - 1))
    gain = detectable_mean_difference(-half, half, n, CONFIDENCE)
    assert nct.sf(t.ppf(0.975, n - 1), n - 1, gain / deviation) == pytest.approx(0.8, abs=1e-6)
    assert detectable_mean_difference(-half, half, n, CONFIDENCE, tests=3) > gain


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
    # Newcombe's own table of independent shares has 0.0524 and 0.3339.
    first, second = ((k / n, *wilson_interval(k, n, CONFIDENCE)) for k, n in ((56, 70), (48, 80)))
    low, high = difference_of_intervals(first, second)
    assert (low, high) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert difference_of_intervals(second, first) == pytest.approx((-high, -low), abs=1e-12)


def test_torch_is_imported_only_once_there_is_something_to_judge():
    code = "import sys, tasks.gate_reward; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
