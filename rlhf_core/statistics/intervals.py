"""Intervals and tests for shares and means, and the accuracy of a scorer on pairs. All examples have the same weight."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import bdtr, nctdtrinc, ndtr, ndtri, stdtr, stdtrit

POWER = 0.8  # probability of detecting a difference or gain that is called detectable
ROUNDING = 1e-9  # relative spread of differences below which they count as equal
BISECTIONS = 60  # steps of the search for an interval's end, down to rounding


@dataclass(frozen=True)
class PairAccuracy:
    """How often a scorer ranks the chosen response above the rejected one.

    correct: pairs in the right order, ties as half. value: their share; NaN without pairs.
    """

    value: float
    correct: float
    ties: int
    n: int


def accuracy_with_ties(chosen_scores: Sequence[float], rejected_scores: Sequence[float]) -> PairAccuracy:
    """Accuracy over pairs, independent of how they were batched.

    Raises:
        ValueError: the lengths differ, or a score is NaN or infinite and so can't be ordered.
    """
    chosen, rejected = np.asarray(chosen_scores, dtype=float), np.asarray(rejected_scores, dtype=float)
    if chosen.shape != rejected.shape:
        raise ValueError(
            f"scores: expected as many rejected as chosen ones, got {len(rejected)} and {len(chosen)}; pass both scores of each pair"
        )
    if not (np.isfinite(chosen).all() and np.isfinite(rejected).all()):
        raise ValueError("scores: expected finite numbers, got NaN or infinity; find out why the pair could not be scored")
    ties = int((chosen == rejected).sum())
    correct = float((chosen > rejected).sum()) + 0.5 * ties
    return PairAccuracy(correct / len(chosen) if len(chosen) else math.nan, correct, ties, len(chosen))


def wilson_interval(successes: float, n: float, confidence: float) -> tuple[float, float]:
    """Score interval (low, high) of a share.

    Source: Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953

    With p = successes / n and z the (1 + confidence) / 2 quantile of the normal distribution:
    (p + z^2 / 2n +- z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Args:
        successes: a half-integer if ties count half; the interval is then slightly too wide, because a tie varies less than a
            success or a failure.
        n: independent trials, or the effective number of dependent ones; 0 gives (0, 1).
    Raises:
        ValueError: successes is not between 0 and n, or confidence not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}; 0.95 is usual")
    if not 0 <= successes <= n:
        raise ValueError(f"successes: expected a number between 0 and n={n}, got {successes}; count each trial once")
    if n == 0:
        return 0.0, 1.0
    p, z = successes / n, float(ndtri((1 + confidence) / 2))
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    # At p = 0 and p = 1 the formula's ends are exactly 0 and 1; rounding must not move them.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def paired_interval(ahead: float, behind: float, n: float, confidence: float) -> tuple[float, float]:
    """Score interval (low, high) of (ahead - behind) / n over n independent prompts; on each, one side is ahead or both are equal.

    The ends are the differences d between -1 and 1 at which the score statistic is z and -z:
    (ahead - behind - n d) / sqrt(n (2 q + d (1 - d))),  q the maximum likelihood share of `behind` given d:
    q = (sqrt(B^2 - 8 n C) - B) / 4n,  B = -ahead - behind + (2n - ahead + behind) d,  C = -behind d (1 - d)
    Source: Tango 1998, Statistics in Medicine 17, 891-908, https://www.niph.go.jp/soshiki/gijutsu/staffs/tango/sm_eng2.html. The
    interval allows for a random number of ties. docs/statistics.md has its coverage and that of alternatives.

    Args:
        n: all prompts, ties included; 0 gives (-1, 1). Effective numbers need not be whole.
    Raises:
        ValueError: ahead and behind don't fit into n, or confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}; 0.95 is usual")
    if min(ahead, behind) < 0 or ahead + behind > n:
        raise ValueError(f"counts: expected ahead and behind of at most n={n} together, got {ahead} and {behind}; count each prompt once")
    if n == 0:
        return -1.0, 1.0
    z, value = float(ndtri((1 + confidence) / 2)), (ahead - behind) / n
    return _tango_end(ahead, behind, n, z, (-1.0, value)), _tango_end(ahead, behind, n, -z, (value, 1.0))


def _tango_end(ahead: float, behind: float, n: float, target: float, between: tuple[float, float]) -> float:
    """The difference at which the score statistic equals `target`, found by bisection since the statistic decreases in the difference."""
    low, high = between
    for _ in range(BISECTIONS):
        d = (low + high) / 2
        b, c = -ahead - behind + (2 * n - ahead + behind) * d, -behind * d * (1 - d)
        q = (math.sqrt(max(b * b - 8 * n * c, 0.0)) - b) / (4 * n)
        excess = ahead - behind - n * d
        if excess > target * math.sqrt(max(n * (2 * q + d * (1 - d)), 0.0)):
            low = d
        else:
            high = d
    return (low + high) / 2


def points_interval(points: Sequence[float], confidence: float) -> tuple[float, float]:
    """Interval (low, high) of the mean of points over independent prompts: 1 for a win, 0.5 for a tie, 0 for a loss.

    The mean is (1 + (wins - losses) / n) / 2, so the ends follow from `paired_interval`. (0, 1) without points.

    Raises:
        ValueError: a point has another value, or confidence is not between 0 and 1.
    """
    wins, ties, losses = (sum(p == value for p in points) for value in (1.0, 0.5, 0.0))
    if wins + ties + losses != len(points):
        other = next(p for p in points if p not in (0.0, 0.5, 1.0))
        raise ValueError(f"points: expected 1, 0.5 or 0 for each prompt, got {other}; pass one comparison per prompt")
    low, high = paired_interval(wins, losses, len(points), confidence)
    return (1 + low) / 2, (1 + high) / 2


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two shares over the same prompts, first minus second, with its interval.

    value: NaN without prompts. p_value: of `sign_test`.
    both, first_only, second_only, neither: numbers of prompts by which side succeeds.
    """

    value: float
    low: float
    high: float
    p_value: float
    both: int
    first_only: int
    second_only: int
    neither: int


def paired_difference(first: Sequence[bool], second: Sequence[bool], confidence: float) -> PairedDifference:
    """How much more often the first side succeeds than the second, position by position, with the interval of `paired_interval`.

    Raises:
        ValueError: the lengths differ, or confidence is not between 0 and 1.
    """
    if len(first) != len(second):
        raise ValueError(
            f"pairs: expected as many of the second as of the first, got {len(second)} and {len(first)}; pass both values of each prompt"
        )
    pairs = Counter((bool(a), bool(b)) for a, b in zip(first, second, strict=True))
    both, first_only, second_only, neither = (pairs[key] for key in ((True, True), (True, False), (False, True), (False, False)))
    low, high = paired_interval(first_only, second_only, len(first), confidence)
    value = (first_only - second_only) / len(first) if len(first) else math.nan
    return PairedDifference(value, low, high, sign_test(first_only, second_only), both, first_only, second_only, neither)


def sign_test(ahead: int, behind: int) -> float:
    """Two-sided mid-p value of "as often ahead as behind"; ties carry no information.

    With k = min(ahead, behind), m = ahead + behind and X ~ binomial(m, 1/2): 2 P(X <= k) - P(X = k); 1 where m is 0.
    For two shares over the same prompts this is McNemar's test.
    Source: Fagerland, Lydersen and Laake 2013, https://doi.org/10.1186/1471-2288-13-91
    """
    least, m = min(ahead, behind), ahead + behind
    return float(bdtr(least, m, 0.5) + (bdtr(least - 1, m, 0.5) if least else 0.0)) if m else 1.0


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Student's t interval (low, high) of a mean: mean +- t * s / sqrt(n), s with n - 1 in its denominator.

    Fewer than two values have no known spread: the result is (-inf, inf), which JSON writers turn into null.

    Raises:
        ValueError: a value is NaN or infinite, or confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}; 0.95 is usual")
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        raise ValueError("values: expected finite numbers, got NaN or infinity; drop and count missing values first")
    n = len(array)
    if n < 2:
        return -math.inf, math.inf
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * float(array.std(ddof=1)) / math.sqrt(n)
    mean = float(array.mean())
    return mean - half, mean + half


@dataclass(frozen=True)
class MeanDifference:
    """Difference of two means over the same prompts, first minus second, with its interval and the p-value of Student's paired t test.

    value: NaN without prompts. n: prompts on which both are known.
    """

    value: float
    low: float
    high: float
    p_value: float
    n: int

    @property
    def varied(self) -> bool:
        """Whether the differences vary; an interval of width 0 doesn't show their spread."""
        return self.high > self.low


def paired_means(first: Sequence[float], second: Sequence[float], confidence: float) -> MeanDifference:
    """Mean of the differences by position; positions with NaN or infinity are dropped and not counted in n.

    If all n differences are equal, the p-value is that of `sign_test` (1 for differences of 0); with fewer than two it is 1. Shares over a
    few hundred prompts are multiples of one step, so two or three of their differences are often equal by chance.

    Raises:
        ValueError: the lengths differ, or confidence is not between 0 and 1.
    """
    if len(first) != len(second):
        raise ValueError(
            f"pairs: expected as many of the second as of the first, got {len(second)} and {len(first)}; pass both values of each prompt"
        )
    both = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    known = both[np.isfinite(both)]
    low, high = mean_interval(known, confidence)
    n, value = len(known), float(known.mean()) if len(known) else math.nan
    if n < 2:
        return MeanDifference(value, low, high, 1.0, n)
    if float(np.ptp(known)) <= ROUNDING * float(np.abs(known).max()):
        return MeanDifference(value, value, value, sign_test(n, 0) if value else 1.0, n)
    p_value = 2 * float(stdtr(n - 1, -abs(value) / float(known.std(ddof=1)) * math.sqrt(n)))
    return MeanDifference(value, low, high, p_value, n)


def interval_p_value(value: float, low: float, high: float, confidence: float) -> float:
    """Two-sided p-value of "the value is 0", taking the estimate as normal with the interval's width."""
    z = float(ndtri((1 + confidence) / 2))
    if not high > low:
        return float(value == 0)
    return 2 * float(ndtr(-abs(value) * 2 * z / (high - low)))


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values corrected for several tests: the probability that any true hypothesis gets one below a is at most a.

    The k-th smallest of m becomes the largest of (m - j + 1) * p_j over j <= k, at most 1. The tests may depend on each other.
    Source: Holm 1979, Scandinavian Journal of Statistics 6, 65-70, https://www.jstor.org/stable/4615733
    """
    corrected, largest = [1.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        corrected[i] = largest
    return corrected


def detectable_difference(low: float, high: float, confidence: float, *, tests: int = 1) -> float:
    """Return the true difference that such a sample detects with probability POWER, with Bonferroni's correction for `tests`.

    (z(1 - a / 2 tests) + z(POWER)) * s, a = 1 - confidence and s the standard error from the interval's width.
    """
    a = 1 - confidence
    deviation = (high - low) / 2 / float(ndtri(1 - a / 2))
    return (float(ndtri(1 - a / 2 / tests)) + float(ndtri(POWER))) * deviation


def detectable_mean_difference(low: float, high: float, n: int, confidence: float, *, tests: int = 1) -> float:
    """Return the true mean of n values that Student's interval detects with probability POWER, from the noncentral t distribution.

    The true mean, in standard errors, at which a t statistic with n - 1 degrees of freedom is above its critical value with probability
    POWER. Source: Owen 1965, https://doi.org/10.1093/biomet/52.3-4.437
    """
    a = 1 - confidence
    deviation = (high - low) / 2 / float(stdtrit(n - 1, 1 - a / 2))
    return float(nctdtrinc(n - 1, 1 - POWER, stdtrit(n - 1, 1 - a / 2 / tests))) * deviation


def difference_of_intervals(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float]:
    """Interval (low, high) of the difference of two quantities, first minus second, from each one's (value, low, high).

    low = d - sqrt((v1 - low1)^2 + (high2 - v2)^2), high = d + sqrt((high1 - v1)^2 + (v2 - low2)^2), d = v1 - v2
    Source: Zou and Donner 2008, https://doi.org/10.1002/sim.3095; both intervals have the same confidence, the quantities are independent.
    """
    (v1, low1, high1), (v2, low2, high2) = first, second
    return v1 - v2 - math.hypot(v1 - low1, high2 - v2), v1 - v2 + math.hypot(high1 - v1, v2 - low2)
