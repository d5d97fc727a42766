"""Intervals for shares and means, and the accuracy of a scorer on pairs. Everything here weighs each example the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri, stdtrit


@dataclass(frozen=True)
class PairAccuracy:
    """How often a scorer puts chosen above rejected.

    value: share of pairs in the right order, a tie counted as half; NaN without pairs.
    correct: pairs in the right order, ties as half.
    """

    value: float
    correct: float
    ties: int
    n: int


def accuracy_with_ties(chosen_scores: Sequence[float], rejected_scores: Sequence[float]) -> PairAccuracy:
    """Accuracy over pairs, each pair weighing the same whatever batch it was scored in.

    Raises:
        ValueError: the lengths differ, or a score is NaN or infinite: it has no place in an order.
    """
    chosen, rejected = np.asarray(chosen_scores, dtype=float), np.asarray(rejected_scores, dtype=float)
    if chosen.shape != rejected.shape:
        raise ValueError(f"scores: expected as many rejected as chosen ones, got {len(rejected)} and {len(chosen)}; pass both of each pair")
    if not (np.isfinite(chosen).all() and np.isfinite(rejected).all()):
        raise ValueError("scores: expected finite numbers, got NaN or infinity; find out why the pair could not be scored")
    ties = int((chosen == rejected).sum())
    correct = float((chosen > rejected).sum()) + 0.5 * ties
    return PairAccuracy(correct / len(chosen) if len(chosen) else math.nan, correct, ties, len(chosen))


def wilson_interval(successes: float, n: int, confidence: float) -> tuple[float, float]:
    """Score interval of a share, (low, high), by Wilson 1927, https://doi.org/10.1080/01621459.1927.10502953

    With p = successes / n and z the (1 + confidence) / 2 quantile of the normal distribution:
    (p + z^2 / 2n +- z * sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Args:
        successes: may be a half-integer, where ties count half. A tie varies less than a success or a failure, so the
            interval is then a little wider than it has to be.
        n: independent trials; 0 gives (0, 1), for nothing is known.
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
    # The formula's ends are exactly 0 and 1 at p = 0 and p = 1; rounding must not move them.
    low = 0.0 if successes == 0 else (centre - half) / scale
    high = 1.0 if successes == n else (centre + half) / scale
    return low, high


def win_rate_interval(wins: int, ties: int, n: int, confidence: float) -> tuple[float, float]:
    """Interval (low, high) of a win rate over n comparisons, a tie being half a win.

    Wilson's interval of the wins among the comparisons that were decided, moved to the win rate: (ties / 2 + (n - ties) * end) / n.
    As in the sign test, ties speak for neither side: above a half is above a half with them or without. To count them as half
    successes would make the interval wider than what varies.

    Args:
        wins: without the ties.
    """
    if n == 0:
        return 0.0, 1.0
    decided = n - ties
    low, high = (end * decided for end in wilson_interval(wins, decided, confidence))
    return (ties / 2 + low) / n, (ties / 2 + high) / n


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, float]:
    """Student's t interval (low, high) of a mean: mean +- t * s / sqrt(n), s with n - 1 in its denominator.

    Fewer than two values say nothing about their spread: the result is (-inf, inf), which JSON writers turn into null.

    Raises:
        ValueError: a value is NaN or infinite, or confidence is not between 0 and 1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: expected a number between 0 and 1, got {confidence}; 0.95 is usual")
    array = np.asarray(values, dtype=float)
    if not np.isfinite(array).all():
        raise ValueError("values: expected finite numbers, got NaN or infinity; leave out what could not be measured, and count it")
    n = len(array)
    if n < 2:
        return -math.inf, math.inf
    half = float(stdtrit(n - 1, (1 + confidence) / 2)) * float(array.std(ddof=1)) / math.sqrt(n)
    mean = float(array.mean())
    return mean - half, mean + half


def difference_interval(first: tuple[float, int], second: tuple[float, int], confidence: float) -> tuple[float, float]:
    """Interval (low, high) of the difference of two shares, first minus second, from their Wilson intervals.

    low = d - sqrt((p1 - low1)^2 + (high2 - p2)^2), high = d + sqrt((high1 - p1)^2 + (p2 - low2)^2), d = p1 - p2
    Source: Newcombe 1998, method 10, Statistics in Medicine 17, 873-890

    Two models that answered the same prompts are treated as independent, which usually makes the interval too wide.

    Args:
        first, second: (successes, n) of each group.
    Raises:
        ValueError: a group is empty, or a count or the confidence is out of range.
    """
    if min(first[1], second[1]) < 1:
        raise ValueError(f"n: expected at least 1 in each group, got {first[1]} and {second[1]}; there is nothing to compare")
    return difference_of_intervals(
        (first[0] / first[1], *wilson_interval(*first, confidence)), (second[0] / second[1], *wilson_interval(*second, confidence))
    )


def difference_of_intervals(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float]:
    """Interval (low, high) of the difference of two quantities, first minus second, from each one's (value, low, high).

    low = d - sqrt((v1 - low1)^2 + (high2 - v2)^2), high = d + sqrt((high1 - v1)^2 + (v2 - low2)^2), d = v1 - v2
    Source: Zou and Donner 2008, Statistics in Medicine 27, 1693-1702; both intervals of one confidence, the quantities independent.
    """
    (v1, low1, high1), (v2, low2, high2) = first, second
    return v1 - v2 - math.hypot(v1 - low1, high2 - v2), v1 - v2 + math.hypot(high1 - v1, v2 - low2)
