"""A candidate against the incumbent, on the same pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.special import bdtr

from rlhf_core.gate.clusters import difference_interval


def mcnemar_exact(first_only: int, second_only: int) -> float:
    """Two-sided p-value: the pairs that only one of two has right, against a fair coin; 1 where there are none.

    p = min(1, 2 * P(X <= min(first_only, second_only))), X binomial with first_only + second_only trials and 1/2
    Source: McNemar 1947, https://doi.org/10.1007/BF02295996, in its exact form

    Pairs of one prompt count as independent here, so that p is too small where prompts have several: the gate decides by
    `compare`'s interval.
    """
    n = first_only + second_only
    return min(1.0, 2 * float(bdtr(min(first_only, second_only), n, 0.5))) if n else 1.0


def compare(candidate: np.ndarray, incumbent: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """Of points [N] on the same pairs: accuracies, their difference with its interval over prompts, and McNemar's test.

    Where one has a tie and the other not, the one with more points is the one that has the pair right.
    """
    differences = candidate - incumbent
    low, high = difference_interval(differences, clusters, confidence)
    candidate_only, incumbent_only = int((differences > 0).sum()), int((differences < 0).sum())
    return {
        "n": len(differences),
        "accuracy": float(incumbent.mean()),
        "candidate_accuracy": float(candidate.mean()),
        "difference": float(differences.mean()),
        "low": low,
        "high": high,
        "candidate_only": candidate_only,
        "incumbent_only": incumbent_only,
        "p_value": mcnemar_exact(candidate_only, incumbent_only),
    }
