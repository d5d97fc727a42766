"""Calibration error, Brier score and temperature, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.gate.calibration import calibrate, expected_calibration_error, fit_temperature, reliability


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
    assert found["ece"] == pytest.approx(0.34) and found["brier"] == pytest.approx(0.4328)
    assert found["log_loss"] == pytest.approx(1.449372, abs=1e-6)
    assert found["ece_low"] <= 0.34 <= found["ece_high"] and found["brier_low"] < 0.4328 < found["brier_high"]


def test_bins():
    bins = reliability(MARGINS, POINTS, np.arange(6), 0.95)
    assert [b["n"] for b in bins] == [0, 0, 0, 0, 4, 0, 0, 0, 0, 2]
    assert (bins[4]["from"], bins[4]["to"], bins[4]["accuracy"]) == (0.7, 0.75, 0.75) and bins[4]["confidence"] == pytest.approx(0.72)
    assert (bins[9]["accuracy"], bins[9]["low"]) == (0.0, 0.0) and bins[0]["accuracy"] is None


def test_a_tie_is_claimed_with_a_half_and_is_half_right():
    assert expected_calibration_error(np.zeros(4), np.full(4, 0.5)) == 0.0


def test_temperature():
    # Margins of 2, three right and one wrong: sigmoid(2 / T) = 3/4, T = 2 / log 3 = 1.820478; then the claim is right.
    margins = np.array([2.0, 2.0, 2.0, -2.0])
    assert fit_temperature(margins) == pytest.approx(1.820478, abs=1e-6)
    assert expected_calibration_error(margins / fit_temperature(margins), (margins > 0).astype(float)) == pytest.approx(0.0, abs=1e-9)


def test_temperature_at_its_ends():
    assert fit_temperature(np.array([1.0, 3.0])) == pytest.approx(0.01)  # all right: the surer the better
    assert fit_temperature(np.array([-1.0, -3.0])) == pytest.approx(100.0)
    assert fit_temperature(np.zeros(0)) is None
