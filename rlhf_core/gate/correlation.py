"""Rank correlations, with intervals over prompts."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlhf_core.gate.clusters import bootstrap, percentile_interval
from rlhf_core.gate.pairs import Pairs, summarize


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation of the ranks, equal values sharing the mean of theirs; NaN where one of them doesn't vary."""
    ranks = mean_ranks(a), mean_ranks(b)
    spreads = [float(r.std()) for r in ranks]
    if not len(a) or 0.0 in spreads:
        return math.nan
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean() / (spreads[0] * spreads[1]))


def spearman_interval(a: np.ndarray, b: np.ndarray, clusters: np.ndarray, confidence: float) -> tuple[float, float]:
    """A bootstrap's percentiles over clusters."""
    return percentile_interval(bootstrap(lambda which: spearman(a[which], b[which]), clusters), confidence)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """[n] ranks from 1, equal values sharing the mean of theirs."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[position]


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """tau-b: (concordant - discordant pairs) / sqrt((pairs that differ in a) * (pairs that differ in b)); NaN where either is 0.

    Takes time in proportion to the number of different values of b, of which a judge has few.
    Source: Kendall 1945, https://doi.org/10.1093/biomet/33.3.239
    """
    surplus, seen = 0, np.zeros(0)
    for level in np.unique(b):
        here = a[b == level]
        below = np.searchsorted(seen, here, side="left").sum()
        above = len(seen) * len(here) - np.searchsorted(seen, here, side="right").sum()
        surplus += int(below) - int(above)
        seen = np.sort(np.concatenate([seen, here]))
    differing = [_differing_pairs(values) for values in (a, b)]
    return surplus / math.sqrt(differing[0] * differing[1]) if all(differing) else math.nan


def _differing_pairs(values: np.ndarray) -> int:
    counts = np.unique(values, return_counts=True)[1]
    return (len(values) ** 2 - int((counts**2).sum())) // 2


def against_judge(scores: np.ndarray, judged: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """How far the reward ranks distinct responses [K] as the judge does.

    Args:
        judged: [K], the share of the judge's criteria that a response meets.
    """
    low, high = spearman_interval(scores, judged, clusters, confidence)
    return {
        "spearman": spearman(scores, judged),
        "spearman_low": low,
        "spearman_high": high,
        "kendall": kendall(scores, judged),
        "n": len(scores),
        "prompts": int(clusters.max()) + 1,
    }


def length_bias(pairs: Pairs, scores: np.ndarray, tokens: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """Whether longer responses please the reward model more than they please those who chose.

    Args:
        scores, tokens, clusters: [K], of the distinct responses of the pairs.
    """
    shorter = summarize(pairs.select(pairs.chosen_tokens < pairs.rejected_tokens), confidence)
    low, high = spearman_interval(scores, tokens, clusters, confidence)
    differing = pairs.chosen_tokens != pairs.rejected_tokens
    longer = np.sign(pairs.chosen_tokens - pairs.rejected_tokens)[differing]
    preferred = np.sign(pairs.margins)[differing]
    return {
        "shorter": {key: shorter[key] for key in ("accuracy", "low", "high", "n")},
        "correlation": {"value": spearman(scores, tokens), "low": low, "high": high, "n": len(scores)},
        "chosen_longer": _share(longer > 0),
        "preferred_longer": _share(preferred * longer > 0),
    }


def _share(truth: np.ndarray) -> float | None:
    return float(truth.mean()) if len(truth) else None
