"""Intervals over prompts, by hand and by simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri

from rlhf_core.statistics.clusters import (
    accuracy_needed,
    bootstrap,
    cluster_codes,
    difference_interval,
    mean_interval,
    mean_spread,
    percentile_interval,
    share_interval,
)
from rlhf_core.statistics.intervals import wilson_interval


def test_share_over_three_prompts():
    # Points 1 1 | 1 0 | 0 0: p = 0.5, residuals 1, 0, -1, v = 3/2 * 2 / 36 = 1/12; independent pairs have 0.25 / 6 = 1/24, so d = 2.
    # t with 2 degrees of freedom is 4.302653, (1.959964 / 4.302653)^2 = 0.207503, and 6 / 2 * 0.207503 = 0.622508 pairs are left.
    # z^2 = 3.841459: centre 0.5 + 3.841459 / 1.245016 = 3.585471, scale 1 + 3.841459 / 0.622508 = 7.170941,
    # half 1.959964 * sqrt(0.25 / 0.622508 + 3.841459 / (4 * 0.387516)) = 3.326088: (3.585471 -+ 3.326088) / 7.170941.
    found = share_interval(np.array([1, 1, 1, 0, 0, 0.0]), np.array([0, 0, 1, 1, 2, 2]), 0.95)
    assert found.design_effect == pytest.approx(2.0) and found.clusters == 3
    assert found.n_effective == pytest.approx(0.622508, abs=1e-6)
    assert (found.low, found.high) == pytest.approx((0.036171, 0.963829), abs=2e-6)


def test_one_pair_a_prompt_is_wilsons_interval():
    found = share_interval(np.array([1.0] * 90 + [0.5] * 2 + [0.0] * 8), np.arange(100), 0.95)
    assert (found.low, found.high) == wilson_interval(91, 100, 0.95) and (found.design_effect, found.n_effective) == (1.0, 100)


def test_pairs_that_balance_each_other_make_the_gate_no_more_lenient():
    # Each of 100 prompts has one right and one wrong pair: the share doesn't vary at all over prompts, and still counts as 200 pairs
    # would, but for t with 99 degrees of freedom (1.984217) in the place of z: 200 * (1.959964 / 1.984217)^2 = 195.140.
    found = share_interval(np.tile([1.0, 0.0], 100), np.repeat(np.arange(100), 2), 0.95)
    assert found.design_effect == 1.0 and found.n_effective == pytest.approx(195.140, abs=1e-3)


@pytest.mark.parametrize("points", [0.0, 1.0])
def test_nothing_varies(points):
    found = share_interval(np.full(12, points), np.repeat(np.arange(4), 3), 0.95)
    assert (found.low, found.high) == wilson_interval(4 * points, 4, 0.95) and math.isnan(found.design_effect)


def test_one_prompt_and_none():
    assert share_interval(np.array([1.0, 0.0]), np.array([0, 0]), 0.95).n_effective == 1
    assert share_interval(np.zeros(0), np.zeros(0, dtype=int), 0.95).low == 0.0


def test_it_covers_where_wilsons_interval_does_not():
    """Prompts are easy (0.95) or hard (0.65), with 8 pairs each that share most of their luck: the truth is 0.8."""
    rng = np.random.default_rng(7)
    clusters = np.repeat(np.arange(60), 8)
    covered, plain = 0, 0
    for _ in range(400):
        easy = rng.choice([0.95, 0.65], size=60)
        shared, own = rng.random(60), rng.random((60, 8))
        luck = np.where(rng.random((60, 8)) < 0.6, shared[:, None], own)
        points = (luck < easy[:, None]).ravel().astype(float)
        found = share_interval(points, clusters, 0.95)
        covered += found.low <= 0.8 <= found.high
        low, high = wilson_interval(points.sum(), len(points), 0.95)
        plain += low <= 0.8 <= high
    assert covered / 400 > 0.92 and plain / 400 < 0.85


def test_spread_over_prompts_of_different_sizes_by_hand():
    # 1 1 | 0 | 1: mean 3/4, deviations 1/4 1/4 | -3/4 | 1/4, s^2 = 0.1875, sums 0.5, -0.75, 0.25, w = 0.5, 0.25, 0.25.
    # v_r = (0.25 / 0.5 + 0.5625 / 0.75 + 0.0625 / 0.75) / 16 = 0.0833333. rho = 1/16 / 0.1875 = 1/3.
    # v_m = 0.1875 / 4 * (1 + 1/3 * (6 / 4 - 1)) = 0.0546875. V = 2 * 4/3, 1, 1: df = (14/3)^2 / (82/9) - 1 = 1.390244.
    found = mean_spread(np.array([1, 1, 0, 1.0]), np.array([0, 0, 1, 2]))
    assert (found.variance, found.degrees_of_freedom) == pytest.approx((1 / 12, 196 / 82 - 1))
    # 1 0 | 1 1 | 0 0 | 0.5: sums 0, 1, -1, 0, rho = (-0.5 + 0.5 + 0.5) / 6 / (1.5 / 7) = 7/18, and v_r is larger than v_m.
    found = mean_spread(np.array([1, 0, 1, 1, 0, 0, 0.5]), np.array([0, 0, 1, 1, 2, 2, 3]))
    assert found.variance == pytest.approx(2 / (5 / 7) / 49)
    # 1 1 | 0 0 | 1 0 1 0 1 0 1 0: the large prompt shows no deviation, and the two small ones tell what it may have: v_m is larger.
    # s^2 = 0.25, products 2 * 0.25, 2 * 0.25 and 8 * -2 / 56: rho = (1 - 2/7) / 12 / 0.25 = 5/21, v_m = 0.25 / 12 * (1 + 5/21 * 5).
    found = mean_spread(np.array([1, 1, 0, 0] + [1, 0] * 4, dtype=float), np.array([0, 0, 1, 1, *[2] * 8]))
    assert found.variance == pytest.approx(0.25 / 12 * (1 + 25 / 21))


def test_equal_prompts_have_one_degree_of_freedom_less_than_prompts():
    rng = np.random.default_rng(3)
    found = mean_spread((rng.random(120) < 0.8).astype(float), np.repeat(np.arange(20), 6))
    assert found.degrees_of_freedom == pytest.approx(19)


def test_all_right_counts_uneven_prompts_as_fewer():
    # Sizes 8, 1, 1, 1, 1: 12^2 / (64 + 4) = 2.117647 prompts.
    found = share_interval(np.ones(12), np.array([0] * 8 + [1, 2, 3, 4]), 0.95)
    assert found.n_effective == found.clusters_effective == pytest.approx(144 / 68)
    assert (found.low, found.high) == wilson_interval(144 / 68, 144 / 68, 0.95)


SIZES = {
    "one prompt with a third": np.array([90] + [1] * 177),
    "lognormal": np.maximum(1, np.round(4 * np.exp(1.5 * ndtri((np.arange(150) + 0.5) / 150)))).astype(int),
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_uneven_prompts_are_covered(sizes):
    """With the variance m / (m - 1) * sum r_i^2 / n^2 and m - 1 degrees of freedom the accuracies are covered in 0.89 of cases."""
    rng = np.random.default_rng(5)
    clusters = np.repeat(np.arange(len(sizes)), sizes)
    covered, above, differences, means = 0, 0, 0, 0
    for _ in range(500):
        shared = math.sqrt(0.3) * rng.standard_normal(len(sizes))[clusters]
        luck = ndtr(shared + math.sqrt(0.7) * rng.standard_normal(len(clusters)))
        found = share_interval((luck < 0.8).astype(float), clusters, 0.95)
        covered += found.low <= 0.8 <= found.high
        above += found.low > 0.8
        low, high = difference_interval((luck < 0.15).astype(float) - (luck > 0.9), clusters, 0.95)
        differences += low <= 0.05 <= high
        low, high = mean_interval(luck, clusters, 0.95)
        means += low <= 0.5 <= high
    assert min(covered, differences, means) / 500 >= 0.94 and above / 500 <= 0.035


def test_mean_over_two_prompts():
    # Mean 0.25, residuals of the prompts 1.5 and -1.5, v = 2 * 4.5 / 16 = 0.5625; t with 1 degree of freedom 12.706205: 0.25 -+ 9.529654.
    low, high = mean_interval(np.array([1, 1, 0, -1.0]), np.array([0, 0, 1, 1]), 0.95)
    assert (low, high) == pytest.approx((-9.279654, 9.779654), abs=1e-5)
    assert mean_interval(np.array([1.0, 2.0]), np.array([0, 0]), 0.95) == (-math.inf, math.inf)


def test_bootstrap_draws_whole_prompts_and_agrees_with_students_interval_of_a_mean():
    rng = np.random.default_rng(1)
    clusters = np.repeat(np.arange(200), 3)
    values = np.repeat(rng.normal(size=200), 3)
    drawn = bootstrap(lambda which: float(values[which].mean()), clusters, draws=2000)
    assert percentile_interval(drawn, 0.95) == pytest.approx(mean_interval(values, clusters, 0.95), abs=0.015)
    assert drawn.tolist() == bootstrap(lambda which: float(values[which].mean()), clusters, draws=2000).tolist()
    sizes = bootstrap(lambda which: float(len(np.unique(which)) % 3), clusters, draws=20)
    assert set(sizes) == {0.0}


def test_codes():
    assert cluster_codes(np.array(["b", "a", "b"], dtype=object)).tolist() == [1, 0, 1]


def test_an_interval_surer_than_its_draws_can_tell_grows_as_a_normal_one():
    # At 95% the quantiles 0.025 and 0.975 themselves, read between draws; at 99.9% 3.290527 / 1.959964 times as far from the median.
    drawn = np.arange(401.0)
    assert percentile_interval(drawn, 0.95) == pytest.approx((10, 390))
    assert percentile_interval(drawn, 0.999) == pytest.approx((200 - 190 * 1.678871, 200 + 190 * 1.678871), rel=1e-5)


def test_accuracy_needed_is_where_the_interval_begins_at_the_threshold():
    # 0.75 + 1.959964 * sqrt(0.1875 / 1000) = 0.776838; Wilson's lower end of 776.838 of 1000 is 0.75.
    needed = accuracy_needed(0.75, 1000, 0.95)
    assert needed == pytest.approx(0.776838, abs=1e-6)
    assert wilson_interval(1000 * needed, 1000, 0.95)[0] == pytest.approx(0.75)
