"""Does a margin mean what it says? P(chosen is better) = sigmoid(margin / temperature), against how often it is."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from scipy.special import expit

from rlhf_core.gate.clusters import basic_interval, bootstrap, mean_interval, share_interval

BINS = 10  # of confidence, from a half to 1
HALVINGS = 40  # of the range in which the temperature is looked for
HIGHEST = 100.0  # temperature; its inverse is the lowest


def fit_temperature(margins: np.ndarray) -> float | None:
    """The temperature with the lowest log loss, mean log(1 + exp(-margin / T)), between 0.01 and 100.

    With b = 1 / T the loss is convex in b, and its derivative -mean(margin * sigmoid(-b margin)) has one zero. None without pairs.
    Source: Guo et al. 2017, section 4.2, https://arxiv.org/abs/1706.04599
    """
    if not len(margins):
        return None

    def slope(b: float) -> float:
        return -float((margins * expit(-b * margins)).mean())

    low, high = 1 / HIGHEST, HIGHEST
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / math.sqrt(low * high)


def reliability(margins: np.ndarray, points: np.ndarray, clusters: np.ndarray, confidence: float) -> list[dict[str, Any]]:
    """Bins of equal width of the confidence max(P, 1 - P) with how often the preferred response is the chosen one.

    Args:
        margins: [N], divided by the temperature. points: [N], 1 for the right order, 0.5 for a tie.
    """
    claimed = expit(np.abs(margins))
    at = np.minimum(((claimed - 0.5) * 2 * BINS).astype(int), BINS - 1)
    found = []
    for k in range(BINS):
        inside = at == k
        row: dict[str, Any] = {"from": 0.5 + k / (2 * BINS), "to": 0.5 + (k + 1) / (2 * BINS), "n": int(inside.sum())}
        if row["n"]:
            interval = share_interval(points[inside], np.unique(clusters[inside], return_inverse=True)[1], confidence)
            row |= {"confidence": float(claimed[inside].mean()), "accuracy": float(points[inside].mean())}
            row |= {"low": interval.low, "high": interval.high}
        else:
            row |= dict.fromkeys(("confidence", "accuracy", "low", "high"))
        found.append(row)
    return found


def expected_calibration_error(margins: np.ndarray, points: np.ndarray) -> float:
    """sum over bins of n_b / n * |accuracy_b - confidence_b|, the bins of `reliability`.

    Source: Naeini et al. 2015, https://doi.org/10.1609/aaai.v29i1.9602; in this form Guo et al. 2017
    """
    claimed = expit(np.abs(margins))
    at = np.minimum(((claimed - 0.5) * 2 * BINS).astype(int), BINS - 1)
    gaps = np.bincount(at, weights=points - claimed, minlength=BINS)
    return float(np.abs(gaps).sum() / len(margins))


def calibrate(margins: np.ndarray, points: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """Calibration error, Brier score (mean (1 - P(chosen is better))^2, Brier 1950), log loss and bins; margins as in `reliability`.

    The calibration error of a sample is too high (distances don't cancel), and so are its bootstrap's: hence the mirrored interval.
    """
    ece = expected_calibration_error(margins, points)
    drawn = bootstrap(lambda which: expected_calibration_error(margins[which], points[which]), clusters)
    ece_low, ece_high = basic_interval(ece, drawn, confidence)
    losses = expit(-margins) ** 2
    brier_low, brier_high = mean_interval(losses, clusters, confidence)
    return {
        "ece": ece,
        "ece_low": max(0.0, ece_low),
        "ece_high": min(1.0, ece_high),
        "brier": float(losses.mean()),
        "brier_low": brier_low,
        "brier_high": brier_high,
        "log_loss": float(np.logaddexp(0.0, -margins).mean()),
        "bins": reliability(margins, points, clusters, confidence),
    }
