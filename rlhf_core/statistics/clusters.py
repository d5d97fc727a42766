"""Intervals over clusters of dependent pairs: pairs of one prompt share responses, so they aren't independent."""

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
    clusters: number of clusters. clusters_effective: number of equal clusters with the same precision, or fewer.
    """

    low: float
    high: float
    design_effect: float
    n_effective: float
    clusters: int
    clusters_effective: float


@dataclass(frozen=True)
class MeanSpread:
    """Variance of a mean over clusters, and the degrees of freedom of its estimate."""

    variance: float
    degrees_of_freedom: float

    def quantile(self, confidence: float) -> float:
        """Student's quantile for a two-sided interval."""
        return float(stdtrit(self.degrees_of_freedom, (1 + confidence) / 2))


def cluster_codes(names: np.ndarray) -> np.ndarray:
    """Codes [n] from 0 to m - 1, equal where the names are."""
    return np.unique(names, return_inverse=True)[1]


def mean_spread(values: np.ndarray, clusters: np.ndarray) -> MeanSpread:
    """Variance of a mean over at least two clusters of any sizes.

    With n_i values and the sum r_i of deviations from the mean in cluster i, w_i = n_i / n, and the variance s^2 of all values:
    v_r = sum r_i^2 / (1 - w_i) / n^2,  v_m = s^2 / n (1 + rho (sum n_i^2 / n - 1)),  variance = max(v_r, v_m)
    df = max(1, (sum V_i)^2 / sum V_i^2 - 1),  V_i = n_i (1 + (n_i - 1) rho)
    rho, from 0 to 1, is the correlation of two values of a cluster, a mean over clusters weighted by n_i. v_r holds for any dependence, but
    a cluster with a large share makes it uncertain, and r_i^2 is too small there on average; v_m then learns from the other clusters too.
    Clusters of equal size have v_r, with m - 1 degrees of freedom.
    Sources: v_r: Bell and McCaffrey 2002, Survey Methodology 28, 169-181; v_m: Kish 1965, Survey Sampling, section 5.4; df: Satterthwaite
    1946, https://doi.org/10.2307/3002019, with rho as in Imbens and Kolesar 2016, https://doi.org/10.1162/REST_a_00552

    Args:
        values: [n]. clusters: [n], codes from 0.
    """
    n, sizes = len(values), np.bincount(clusters).astype(float)
    deviations = values - values.mean()
    sums = np.bincount(clusters, weights=deviations)
    alone = float((deviations**2).mean())
    correlation, several = 0.0, sizes > 1
    if alone > 0 and several.any():
        products = (sums**2 - np.bincount(clusters, weights=deviations**2))[several] / (sizes[several] - 1)  # n_i times a pair's mean
        correlation = min(1.0, max(0.0, float(products.sum() / sizes[several].sum()) / alone))
    robust = float((sums**2 / (1 - sizes / n)).sum()) / n**2
    modelled = alone / n * (1 + correlation * (float((sizes**2).sum()) / n - 1))
    parts = sizes * (1 + (sizes - 1) * correlation)
    return MeanSpread(max(robust, modelled), max(1.0, effective_clusters(parts) - 1))


def effective_clusters(weights: np.ndarray) -> float:
    """Number of equal weights with the same ratio of sum of squares to squared sum: (sum w)^2 / sum w^2 (Kish 1965)."""
    return float(weights.sum() ** 2 / (weights**2).sum())


def share_interval(points: np.ndarray, clusters: np.ndarray, confidence: float) -> ShareInterval:
    """Wilson's interval of a mean of points between 0 and 1, with the effective number of trials.

    With the variance v of `mean_spread`, n trials and their share p:
    d = max(1, v n / (p (1 - p))),  n_effective = n / d * (z / t)^2
    z is the normal quantile and t Student's. Where every cluster has one trial it is Wilson's own. At p = 0 and 1 nothing varies, and
    the clusters count as one trial each (if they have equal sizes, else as fewer), as does a single cluster, which shows no spread.
    Source: Rao and Scott 1992, Biometrics 48, 577-585; the degrees of freedom: Korn and Graubard 1998, Survey Methodology 24, 193-201

    Args:
        points: [n], 1 for a success, 0.5 for a tie. clusters: [n], codes from 0.
    """
    n, m = len(points), int(clusters.max()) + 1 if len(clusters) else 0
    successes = float(points.sum())
    if m == n:
        return ShareInterval(*wilson_interval(successes, n, confidence), 1.0, n, m, m)
    p = successes / n
    if m == 1 or p in (0.0, 1.0):
        trials = effective_clusters(np.bincount(clusters))
        return ShareInterval(*wilson_interval(p * trials, trials, confidence), math.nan, trials, m, trials)
    spread = mean_spread(points, clusters)
    design_effect = max(1.0, spread.variance * n / (p * (1 - p)))
    n_effective = n / design_effect * (float(ndtri((1 + confidence) / 2)) / spread.quantile(confidence)) ** 2
    interval = wilson_interval(p * n_effective, n_effective, confidence)
    return ShareInterval(*interval, design_effect, n_effective, m, spread.degrees_of_freedom + 1)


def accuracy_needed(threshold: float, n_effective: float, confidence: float) -> float:
    """Return the share whose interval begins at the threshold.

    Wilson's lower end is where p - threshold = z sqrt(threshold (1 - threshold) / n).

    Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953
    """
    return threshold + float(ndtri((1 + confidence) / 2)) * math.sqrt(threshold * (1 - threshold) / n_effective)


def mean_interval(values: np.ndarray, clusters: np.ndarray, confidence: float) -> tuple[float, float]:
    """Student's interval of a mean over clusters: mean +- t sqrt(v), with v and degrees of freedom from `mean_spread`.

    The interval is (-inf, inf) with fewer than two clusters.
    """
    if len(clusters) == 0 or clusters.max() == 0:
        return -math.inf, math.inf
    mean, spread = float(values.mean()), mean_spread(values, clusters)
    half = spread.quantile(confidence) * math.sqrt(spread.variance)
    return mean - half, mean + half


def difference_interval(differences: np.ndarray, clusters: np.ndarray, confidence: float) -> tuple[float, float]:
    """Score interval of a mean of differences between -1 and 1 over clusters: `paired_interval` with the effective number of trials.

    n_effective is as in `share_interval`, with the variance of the differences in the place of p (1 - p). Where all differences are equal
    the clusters count as one trial each, or fewer. A difference of a half counts half for the side that is ahead. Student's interval is
    unsuitable: its width goes to 0 with the number of pairs on which the two differ. (-inf, inf) with fewer than two clusters.

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
        n_effective = effective_clusters(np.bincount(clusters))
    else:
        spread = mean_spread(differences, clusters)
        ratio = float(ndtri((1 + confidence) / 2)) / spread.quantile(confidence)
        n_effective = n / max(1.0, spread.variance / alone) * ratio**2
    share = n_effective / n
    return paired_interval(ahead * share, behind * share, max(n_effective, (ahead + behind) * share), confidence)


def bootstrap(statistic: Callable[[np.ndarray], float], clusters: np.ndarray, *, draws: int = DRAWS) -> np.ndarray:
    """Return the statistic on `draws` resamples of as many clusters, drawn with replacement; equal clusters always give equal draws.

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
