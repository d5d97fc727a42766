"""Calibration error, Brier score and temperature, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.gate.calibration import CalibrationError, calibrate, calibration_error, fit_temperature, reliability


def margin(claimed: float) -> float:
    """With which a pair is claimed with this probability."""
    return math.log(claimed / (1 - claimed))


# Claimed with 0.72: three right, one wrong. Claimed with 0.96: two, both wrong.
MARGINS = np.array([*[margin(0.72)] * 3, -margin(0.72), *[-margin(0.96)] * 2])
POINTS = (MARGINS > 0).astype(float)


def test_error_and_brier_score():
    # |3/4 - 0.72| * 4/6 + |0 - 0.96| * 2/6 = 0.02 + 0.32; Brier (3 * 0.28^2 + 0.72^2 + 2 * 0.96^2) / 6 = 2.5968 / 6.
    # log loss (3 * -log 0.72 - log 0.28 - 2 log 0.04) / 6 = (0.985513 + 1.272966 + 6.437752) / 6.
    found = calibrate(MARGINS, POINTS, np.arange(6), 0.95)
    assert found["ece_of_sample"] == pytest.approx(0.34) and found["brier"] == pytest.approx(0.4328)
    assert found["log_loss"] == pytest.approx(1.449372, abs=1e-6)
    assert (
        found["ece_low"] <= found["ece"] < 0.34 and found["ece"] <= found["ece_high"] and found["brier_low"] < 0.4328 < found["brier_high"]
    )


def test_bins():
    bins = reliability(MARGINS, POINTS, np.arange(6), 0.95)
    assert [b["n"] for b in bins] == [0, 0, 0, 0, 4, 0, 0, 0, 0, 2]
    assert (bins[4]["from"], bins[4]["to"], bins[4]["accuracy"]) == (0.7, 0.75, 0.75) and bins[4]["confidence"] == pytest.approx(0.72)
    assert (bins[9]["accuracy"], bins[9]["low"]) == (0.0, 0.0) and bins[0]["accuracy"] is None


def test_a_tie_is_claimed_with_a_half_and_is_half_right():
    assert calibration_error(np.zeros(4), np.full(4, 0.5), np.arange(4), 0.95) == CalibrationError(0.0, 0.0, 0.0, 0.0)


def test_temperature():
    # Margins of 2, three right and one wrong: sigmoid(2 / T) = 3/4, T = 2 / log 3 = 1.820478; then the claim is right.
    margins = np.array([2.0, 2.0, 2.0, -2.0])
    assert fit_temperature(margins) == pytest.approx(1.820478, abs=1e-6)
    found = calibration_error(margins / fit_temperature(margins), (margins > 0).astype(float), np.arange(4), 0.95)
    assert found.sample == pytest.approx(0.0, abs=1e-9) and found.value == found.low == 0.0


def test_temperature_at_its_ends():
    assert fit_temperature(np.array([1.0, 3.0])) == pytest.approx(0.01)  # all right: the surer the better
    assert fit_temperature(np.array([-1.0, -3.0])) == pytest.approx(100.0)
    assert fit_temperature(np.zeros(0)) is None


def test_the_bias_of_one_bin_by_hand():
    """One bin, 8 pairs claimed with 0.72, 7 right: d = 7/8 - 0.72 = 0.155; its variance 8/7 * (7 * 0.125^2 + 0.875^2) / 64 = 0.015625.

    E|N(u, 0.125^2)| = 0.155 at u = 0.13797: 0.125 * 0.797885 * exp(-0.60919) + 0.13797 * (1 - 2 * Phi(-1.10378)) = 0.05424 + 0.10077
    """
    margins = np.array([*[margin(0.72)] * 7, -margin(0.72)])
    found = calibration_error(margins, (margins > 0).astype(float), np.arange(8), 0.95)
    u, s = found.value, 0.125
    assert (found.sample, u) == (pytest.approx(0.155), pytest.approx(0.13797, abs=1e-5))
    assert s * math.sqrt(2 / math.pi) * math.exp(-(u**2) / (2 * s**2)) + u * math.erf(u / s / math.sqrt(2)) == pytest.approx(
        0.155, abs=1e-6
    )
    # The upper end: a deviation of the folded normal times 2.364624 (t, 7 degrees of freedom) below its mean is what was found.
    u = found.high
    mean = s * math.sqrt(2 / math.pi) * math.exp(-(u**2) / (2 * s**2)) + u * math.erf(u / s / math.sqrt(2))
    assert mean - 2.364624 * math.sqrt(u**2 + s**2 - mean**2) == pytest.approx(0.155, abs=1e-5)


def test_pairs_of_one_prompt_are_no_news():
    """The same pairs five times over, in the same clusters: nothing changes."""
    rng = np.random.default_rng(0)
    claims = rng.uniform(0.5, 1.0, 60)
    margins = np.log(claims / (1 - claims)) * np.where(rng.random(60) < claims, 1, -1)
    once = calibration_error(margins, (margins > 0).astype(float), np.arange(60), 0.95)
    five = calibration_error(np.tile(margins, 5), np.tile(margins > 0, 5).astype(float), np.tile(np.arange(60), 5), 0.95)
    assert (five.value, five.low, five.high) == pytest.approx((once.value, once.low, once.high), abs=1e-9)


def test_the_interval_of_an_error_contains_it():
    rng = np.random.default_rng(1)
    for _ in range(100):
        claims = rng.uniform(0.5, 1.0, 40)
        margins = np.log(claims / (1 - claims)) * np.where(rng.random(40) < claims, 1, -1)
        found = calibration_error(margins, (margins > 0).astype(float), np.arange(40), 0.95)
        assert 0 <= found.low <= found.value <= min(found.high, found.sample) <= 1
