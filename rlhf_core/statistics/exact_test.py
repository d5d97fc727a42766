"""Exact tests of two sides compared on the same prompts, and the gains that they detect. Each prompt has one comparison and counts once."""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from scipy.special import bdtrc, betaincinv, gammaln, ndtri, xlog1py, xlogy

UNCERTAIN = 1e-7  # probability that the true share of decided comparisons is outside of the interval that is searched
POINTS = 101  # grid points in that interval
DEVIATIONS = 8  # standard deviations of the number of decided comparisons that are summed over; beyond them P < 1e-14

EXACT = 20_000  # number of prompts above which the normal approximation is close enough
CORRECTIONS = 4


def p_value(ahead: int, behind: int, n: int, *, margin: float = 0.0) -> float:
    """Conservative one-sided p-value of "(share ahead) - (share behind) is at most `margin`".

    margin 0: the sign test, P(X >= ahead) with X ~ binomial(ahead + behind, 1/2). Ties carry no information. For two shares over the same
    prompts this is McNemar's exact test.

    Another margin: P(A - B >= ahead - behind) of a multinomial with P(ahead) - P(behind) = margin, the largest over the unknown
    P(ahead) + P(behind) within its Clopper-Pearson interval of confidence 1 - UNCERTAIN, plus UNCERTAIN.
    Source: Berger and Boos 1994, https://doi.org/10.1080/01621459.1994.10476836

    Args:
        ahead, behind: prompts on which one side or the other is ahead. n: all compared prompts.
    Raises:
        ValueError: the counts don't fit into n, or margin isn't between -1 and 1.
    """
    if min(ahead, behind) < 0 or ahead + behind > n:
        raise ValueError(f"counts: expected ahead and behind of at most n={n} together, got {ahead} and {behind}; count each prompt once")
    if not -1 < margin < 1:
        raise ValueError(f"margin: expected a number between -1 and 1, got {margin}; it is a difference of shares")
    if margin == 0:
        return float(bdtrc(ahead - 1, ahead + behind, 0.5)) if ahead else 1.0
    return min(1.0, _largest_tail(ahead - behind, ahead + behind, n, margin) + UNCERTAIN)


def _largest_tail(lead: int, decided: int, n: int, margin: float) -> float:
    """The largest tail probability over d, where D ~ binomial(n, d) prompts are decided and A ~ binomial(D, (1 + margin / d) / 2) of these
    are ahead.

    P(A - B >= lead) is maximized over d within its Clopper-Pearson interval.
    """
    if n == 0:
        return 1.0
    low = betaincinv(decided, n - decided + 1, UNCERTAIN / 2) if decided else 0.0
    high = betaincinv(decided + 1, n - decided, 1 - UNCERTAIN / 2) if decided < n else 1.0
    shares = np.linspace(max(low, abs(margin)), max(high, abs(margin)), POINTS)[:, None]  # [POINTS, 1]
    reach = DEVIATIONS / 2 * math.sqrt(n)
    first, last = max(0, math.floor(n * shares[0, 0] - reach)), min(n, math.ceil(n * shares[-1, 0] + reach))
    counts = np.arange(first, last + 1)[None, :]  # [1, numbers of decided comparisons]
    log_chance = gammaln(n + 1) - gammaln(counts + 1) - gammaln(n - counts + 1) + xlogy(counts, shares) + xlog1py(n - counts, -shares)
    needed = np.ceil((counts + lead) / 2).astype(int)
    ahead = np.where(
        needed <= 0, 1.0, np.where(needed > counts, 0.0, bdtrc(np.clip(needed - 1, 0, counts), counts, (1 + margin / shares) / 2))
    )
    return float((np.exp(log_chance) * ahead).sum(1).max())


def smallest_gain(decided: int, n: int, level: float, *, margin: float = 0.0, power: float = 0.8) -> float | None:
    """The smallest difference (share ahead) - (share behind) that a test detects at this level and power, if `decided` of n prompts are
    decided.

    None means that no outcome on so few prompts is significant.
    """
    needed = bisect_left(range(decided + 1), True, key=lambda ahead: p_value(ahead, decided - ahead, n, margin=margin) <= level)
    if needed > decided:
        return None
    chance = float(betaincinv(needed, decided - needed + 1, power)) if needed else 0.0  # P(X >= needed) = power
    return (2 * chance - 1) * decided / n


def prompts_needed(gain: float, decided: float, level: float, *, margin: float = 0.0, power: float = 0.8) -> int | None:
    """Approximate number of prompts at which a test at this level detects a difference (share ahead) - (share behind) of `gain`.

    None means that the gain isn't above 0 and the margin, so that no number of prompts suffices.

    ((z(1 - level) sqrt(d - margin^2) + z(power) sqrt(d - gain^2)) / (gain - margin))^2, d = `decided`, the share of prompts that are
    decided. Source, of margin 0: Connor 1987, Biometrics 43(1), as in
    https://powerandsamplesize.com/Calculators/Compare-Paired-Proportions/McNemar-Z-test-1-Sided. This normal
    approximation is too low for an exact test; up to EXACT prompts it is corrected with `smallest_gain`.
    """
    if gain <= max(margin, 0.0):
        return None
    under, over = (math.sqrt(max(decided - value**2, 0.0)) for value in (margin, gain))
    n = math.ceil(((float(ndtri(1 - level)) * under + float(ndtri(power)) * over) / (gain - margin)) ** 2)
    for _ in range(CORRECTIONS if n <= EXACT else 0):
        found = smallest_gain(round(decided * n), n, level, margin=margin, power=power)
        n = 2 * n if found is None else math.ceil(n * ((found - margin) / (gain - margin)) ** 2)
    return n
