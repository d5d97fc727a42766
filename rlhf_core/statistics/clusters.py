"""Intervals over pairs in clusters: pairs of one prompt share responses, so they aren't independent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit

from rlhf_core.statistics.intervals import paired_interval, wilson_interval

DRAWS = 400  # of a bootstrap: its 95% ends then rest on 10 draws each
OUTERMOST = 10 / DRAWS  # the outermost quantile that is read from the draws


@dataclass(frozen=True)
class ShareInterval:
    """Interval of a share over clusters.

    design_effect: variance relative to that of independent trials; NaN where it can't be estimated.
    n_effective: number of independent trials with the same precision.
    clusters: their number.
    """

    low: float
    high: float
    design_effect: float
    n_effective: float
    clusters: int


def cluster_codes(names: np.ndarray) -> np.ndarray:
    """[n] of 0 to m - 1, equal where the names are."""
    return np.unique(names, return_inverse=True)[1]


def share_interval(points: np.ndarray, clusters: np.ndarray, confidence: float) -> ShareInterval:
    """Wilson's interval of a mean of points between 0 and 1, with the effective number of trials.

    With y_i the points of cluster i, n_i its trials, m clusters, p = sum y_i / n:
    v = m / (m - 1) * sum (y_i - n_i p)^2 / n^2,  d = max(1, v n / (p (1 - p))),  n_effective = n / d * (z / t)^2
    z is the normal quantile and t Student's with m - 1 degrees of freedom. Where every cluster has one trial it is Wilson's own. At p = 0
    and 1 nothing varies and the clusters count as one trial each, as does a single cluster, which shows no spread.
    Source: Rao and Scott 1992, Biometrics 48, 577-585; the degrees of freedom: Korn and Graubard 1998, Survey Methodology 24, 193-201

    Args:
        points: [n], 1 for a success, 0.5 for a tie. clusters: [n], codes from 0.
    """
    n, m = len(points), int(clusters.max()) + 1 if len(clusters) else 0
    successes = float(points.sum())
    if m == n:
        return ShareInterval(*wilson_interval(successes, n, confidence), 1.0, n, m)
    p = successes / n
    if m == 1 or p in (0.0, 1.0):
        return ShareInterval(*wilson_interval(p * m, m, confidence), math.nan, m, m)
    residuals = np.bincount(clusters, weights=points - p)
    variance = m / (m - 1) * float((residuals**2).sum()) / n**2
    design_effect = max(1.0, variance * n / (p * (1 - p)))
    quantile = (1 + confidence) / 2
    n_effective = n / design_effect * (float(ndtri(quantile)) / float(stdtrit(m - 1, quantile))) ** 2
    return ShareInterval(*wilson_interval(p * n_effective, n_effective, confidence), design_effect, n_effective, m)


def accuracy_needed(threshold: float, n_effective: float, confidence: float) -> float:
    """The share whose interval begins at the threshold: Wilson's lower end is where p - threshold = z sqrt(threshold (1 - threshold) / n).

    Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953
    """
    return threshold + float(ndtri((1 + confidence) / 2)) * math.sqrt(threshold * (1 - threshold) / n_effective)


def mean_interval(values: np.ndarray, clusters: np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's interval of a mean over clusters: mean +- t sqrt(v), v as in `share_interval`, m - 1 degrees of freedom.

    (-inf, inf) with fewer than two clusters.
    """
    m = int(clusters.max()) + 1 if len(clusters) else 0
    if m < 2:
        return -math.inf, math.inf
    mean = float(values.mean())
    residuals = np.bincount(clusters, weights=values - mean)
    variance = m / (m - 1) * float((residuals**2).sum()) / len(values) ** 2
    half = float(stdtrit(m - 1, (1 + confidence) / 2)) * math.sqrt(variance)
    return mean - half, mean + half


def difference_interval(differences: np.ndarray, clusters: np.ndarray, confidence: float) -> tuple[float, float]:
    """Score interval of a mean of differences between -1 and 1 over clusters: `paired_interval` with the effective number of trials.

    n_effective is as in `share_interval`, with the variance of the differences in the place of p (1 - p). Where all differences are equal
    the clusters count as one trial each. A difference of a half counts half for the side that is ahead. Student's interval is unsuitable:
    its width goes to 0 with the number of pairs on which the two differ. (-inf, inf) with fewer than two clusters.

    Args:
        differences: [n], of two models' points on each pair. clusters: [n], codes from 0.
    """
    n, m = len(differences), int(clusters.max()) + 1 if len(clusters) else 0
    if m < 2:
        return -math.inf, math.inf
    ahead, behind = float(differences[differences > 0].sum()), -float(differences[differences < 0].sum())
    alone = float(differences.var()) / n
    if m == n:
        n_effective = float(n)
    elif alone == 0:
        n_effective = float(m)
    else:
        residuals = np.bincount(clusters, weights=differences - differences.mean())
        variance = m / (m - 1) * float((residuals**2).sum()) / n**2
        quantile = (1 + confidence) / 2
        n_effective = n / max(1.0, variance / alone) * (float(ndtri(quantile)) / float(stdtrit(m - 1, quantile))) ** 2
    share = n_effective / n
    return paired_interval(ahead * share, behind * share, max(n_effective, (ahead + behind) * share), confidence)


def bootstrap(statistic: Callable[[np.ndarray], float], clusters: np.ndarray, *, draws: int = DRAWS) -> np.ndarray:
    """The statistic of `draws` samples of as many clusters, drawn with replacement; always the same draws for the same clusters.

    Source: Davison and Hinkley 1997, Bootstrap Methods and their Application, section 3.8

    Args:
        statistic: of positions [k], those of the drawn clusters' members.
    """
    m = int(clusters.max()) + 1
    order = np.argsort(clusters, kind="stable")
    starts = np.searchsorted(clusters[order], np.arange(m + 1))
    members = [order[starts[c] : starts[c + 1]] for c in range(m)]
    rng = np.random.default_rng(0)
    return np.array([statistic(np.concatenate([members[c] for c in rng.integers(m, size=m)])) for _ in range(draws)])


def percentile_interval(drawn: np.ndarray, confidence: float) -> tuple[float, float]:
    """Interval (low, high) between quantiles of a bootstrap's draws. Draws that aren't finite are left out.

    Beyond the quantile OUTERMOST few draws are left, and the distance from the median grows like a normal quantile.
    """
    known = drawn[np.isfinite(drawn)]
    if not len(known):
        return -math.inf, math.inf
    tail = (1 - confidence) / 2
    read = max(tail, OUTERMOST)
    low, middle, high = np.quantile(known, [read, 0.5, 1 - read])
    stretch = float(ndtri(tail)) / float(ndtri(read)) if read > tail else 1.0
    return float(middle + stretch * (low - middle)), float(middle + stretch * (high - middle))
