"""Scored pairs as arrays, and how many are in the right order."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rlhf_core.gate.clusters import cluster_codes, share_interval


@dataclass(frozen=True)
class Pairs:
    """N pairs and their scores.

    chosen, rejected: [N] scores, finite. chosen_tokens, rejected_tokens: [N], of the responses alone. prompt_tokens: [N].
    prompts: [N] names, equal for pairs of one prompt. sources: [N] names.
    labels: name of a column -> [N] values, for slices; None where a pair has none.
    """

    chosen: np.ndarray
    rejected: np.ndarray
    chosen_tokens: np.ndarray
    rejected_tokens: np.ndarray
    prompt_tokens: np.ndarray
    prompts: np.ndarray
    sources: np.ndarray
    labels: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.chosen)

    def select(self, which: np.ndarray) -> Pairs:
        """Those at the given positions, or where it is True."""
        arrays = {f.name: getattr(self, f.name)[which] for f in fields(self) if f.name != "labels"}
        return replace(self, **arrays, labels={name: values[which] for name, values in self.labels.items()})

    @property
    def margins(self) -> np.ndarray:
        return self.chosen - self.rejected

    @property
    def points(self) -> np.ndarray:
        """[N] 1 where chosen is above rejected, 0.5 for a tie."""
        return pair_points(self.chosen, self.rejected)

    @property
    def clusters(self) -> np.ndarray:
        return cluster_codes(self.prompts)


def pair_points(chosen: np.ndarray, rejected: np.ndarray) -> np.ndarray:
    return (chosen > rejected) + 0.5 * (chosen == rejected)


def summarize(pairs: Pairs, confidence: float) -> dict[str, Any]:
    """Accuracy, ties as half, with its interval over prompts; without pairs the accuracy is None and the interval 0 to 1."""
    if not len(pairs):
        return {"accuracy": None, "low": 0.0, "high": 1.0, "ties": 0, "n": 0, "prompts": 0, "design_effect": None, "n_effective": 0.0}
    points = pairs.points
    interval = share_interval(points, pairs.clusters, confidence)
    return {
        "accuracy": float(points.mean()),
        "low": interval.low,
        "high": interval.high,
        "ties": int((points == 0.5).sum()),
        "n": len(pairs),
        "prompts": interval.clusters,
        "design_effect": interval.design_effect,
        "n_effective": interval.n_effective,
    }
