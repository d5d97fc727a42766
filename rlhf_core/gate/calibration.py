"""Calibration of margins: P(chosen is better) = sigmoid(margin / temperature), compared with how often chosen is scored higher."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import expit, ndtr

from rlhf_core.statistics.clusters import mean_interval, mean_spread, share_interval

BINS = 10  # of confidence, from 0.5 to 1
HALVINGS = 40  # bisection steps
HIGHEST = 100.0  # temperature; its inverse is the lowest


def fit_temperature(margins: np.ndarray) -> float | None:
    """Return the temperature with the lowest log loss, mean log(1 + exp(-margin / T)), between 0.01 and 100.

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
    """Accuracy in bins of equal width of the confidence max(P, 1 - P).

    Args:
        margins: [N], divided by the temperature. points: [N], 1 for the right order, 0.5 for a tie.
    """
    claimed, at = _claims(margins)
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


@dataclass(frozen=True)
class CalibrationError:
    """A bias-corrected calibration error with its interval.

    value: bias-corrected. low, high: the interval, which contains the value. sample: the uncorrected error, which is biased upwards.
    """

    value: float
    low: float
    high: float
    sample: float


def calibration_error(margins: np.ndarray, points: np.ndarray, clusters: np.ndarray, confidence: float) -> CalibrationError:
    """Expected calibration error, sum over bins of n_b / n * |accuracy_b - confidence_b|, the bins of `reliability`.

    Let d_b be the mean over all pairs of (point - claim) inside bin b. The sample's error, sum |d_b|, is positive even for a calibrated
    model, because absolute values don't cancel. Suppose that the errors of the d_b are normal with covariance C over clusters, and that the
    true gaps are r d_b. C is estimated as v_r of `mean_spread` is. Then the expected sample error is M(r) = sum E|N(r d_b, C_bb)|, a sum of
    means of folded normals, with standard deviation S(r). The value is r * sum |d_b| for the r with M(r) = sum |d_b|, or 0 if M(0) is
    larger. The ends of the interval solve M(r) + t S(r) = sum |d_b| and M(r) - t S(r) = sum |d_b|, t Student's quantile with the degrees of
    freedom of `mean_spread`.

    Source: Naeini et al. 2015, https://doi.org/10.1609/aaai.v29i1.9602, in the form of Guo et al. 2017. On the bias of a binned
    error: Kumar, Liang and Ma 2019, https://arxiv.org/abs/1909.10155, section 5, for the squared one; see also Roelofs et al. 2022,
    https://arxiv.org/abs/2012.08668. The interval inverts a test, as Wilson's does; docs/statistics.md has its coverage.

    Args:
        margins: [N], divided by the temperature. points: [N]. clusters: [N], codes from 0. One cluster gives the interval 0 to 1.
    """
    gaps, n = _gaps(margins, points, clusters), len(margins)
    found = np.abs(gaps.sum(axis=0)) / n
    total = float(found.sum())
    if len(gaps) < 2:
        return CalibrationError(total, 0.0, 1.0, total)
    shares = np.bincount(clusters)[:, None] / n
    residuals = (gaps - shares * gaps.sum(axis=0)) / np.sqrt(1 - shares)
    covariance = residuals.T @ residuals / n**2
    signs = np.sign(gaps.sum(axis=0))
    t = mean_spread(points - _claims(margins)[0], clusters).quantile(confidence)
    value, low, high = (total * _share_of_gaps(found, covariance * np.outer(signs, signs), total, k) for k in (0.0, t, -t))
    return CalibrationError(min(1.0, value), min(1.0, low), min(1.0, high), total)


def _claims(margins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Confidence [N] and bin [N] of each pair."""
    claimed = expit(np.abs(margins))
    return claimed, np.minimum(((claimed - 0.5) * 2 * BINS).astype(int), BINS - 1)


def _gaps(margins: np.ndarray, points: np.ndarray, clusters: np.ndarray) -> np.ndarray:
    """Sums of point minus claim by cluster and bin, [clusters, BINS]."""
    claimed, at = _claims(margins)
    m = int(clusters.max()) + 1
    return np.bincount(clusters * BINS + at, weights=points - claimed, minlength=m * BINS).reshape(m, BINS)


def _share_of_gaps(gaps: np.ndarray, covariance: np.ndarray, total: float, k: float) -> float:
    """Return the r with M(r) + k S(r) = total, found by bisection; 0 if the sum exceeds the total at r = 0.

    Args:
        gaps: [BINS], not negative. covariance: [BINS, BINS] of their errors.
    """

    def sum_at(r: float) -> float:
        mean, deviation = _of_distances(r * gaps, covariance)
        return mean + k * deviation

    if sum_at(0.0) >= total:
        return 0.0
    low, high = 0.0, 1.0
    while sum_at(high) < total:
        low, high = high, 2 * high
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if sum_at(middle) < total else (low, middle)
    return (low + high) / 2


def _of_distances(means: np.ndarray, covariance: np.ndarray) -> tuple[float, float]:
    """Mean and standard deviation of sum |x_b| for normal x.

    The covariance of two bins is weighted by the certainty of their signs.

    E|N(u, s^2)| = s sqrt(2 / pi) exp(-u^2 / 2 s^2) + u (1 - 2 Phi(-u / s)) (Leone, Nelson and Nottingham 1961, Technometrics 3, 543-550)
    """
    deviations = np.sqrt(np.diag(covariance))
    ratios = np.divide(means, deviations, out=np.full(len(means), np.inf), where=deviations > 0)
    certainty = 1 - 2 * ndtr(-ratios)
    folded = deviations * math.sqrt(2 / math.pi) * np.exp(-(ratios**2) / 2) + means * certainty
    own = means**2 + deviations**2 - folded**2
    between = certainty @ (covariance - np.diag(deviations**2)) @ certainty
    return float(folded.sum()), math.sqrt(max(0.0, float(own.sum() + between)))


def calibrate(margins: np.ndarray, points: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """Calibration error, Brier score (mean (1 - P(chosen is better))^2, Brier 1950), log loss and bins; for margins see `reliability`."""
    error = calibration_error(margins, points, clusters, confidence)
    losses = expit(-margins) ** 2
    brier_low, brier_high = mean_interval(losses, clusters, confidence)
    return {
        "ece": error.value,
        "ece_low": error.low,
        "ece_high": error.high,
        "ece_of_sample": error.sample,
        "brier": float(losses.mean()),
        "brier_low": brier_low,
        "brier_high": brier_high,
        "log_loss": float(np.logaddexp(0.0, -margins).mean()),
        "bins": reliability(margins, points, clusters, confidence),
    }
