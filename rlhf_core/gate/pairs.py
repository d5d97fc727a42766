"""Scored pairs as arrays: accuracy over all pairs and by slice, and a candidate compared with another model on the same pairs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from scipy.special import bdtr

from rlhf_core.statistics.clusters import cluster_codes, difference_interval, share_interval

PARTS = 3  # of lengths


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
        """Return the pairs at given positions, or where a mask is True."""
        arrays = {f.name: getattr(self, f.name)[which] for f in fields(self) if f.name != "labels"}
        return replace(self, **arrays, labels={name: values[which] for name, values in self.labels.items()})

    @property
    def margins(self) -> np.ndarray:
        """Score of the chosen minus score of the rejected response, [N]."""
        return self.chosen - self.rejected

    @property
    def points(self) -> np.ndarray:
        """Points [N]: 1 if the chosen response has the higher score, 0.5 for a tie, else 0."""
        return pair_points(self.chosen, self.rejected)

    @property
    def clusters(self) -> np.ndarray:
        """Cluster codes [N], equal for pairs of one prompt."""
        return cluster_codes(self.prompts)


def pair_points(chosen: np.ndarray, rejected: np.ndarray) -> np.ndarray:
    """Points [N] of pairs: 1 where the chosen response has the higher score, 0.5 for a tie, else 0."""
    return (chosen > rejected) + 0.5 * (chosen == rejected)


def summarize(pairs: Pairs, confidence: float) -> dict[str, Any]:
    """Accuracy with its interval over prompts, a tie counting half. Without pairs the accuracy is None and the interval 0 to 1."""
    return summarize_points(pairs.points, pairs.clusters, confidence)


def summarize_points(points: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """`summarize` of points [N], in clusters [N] by their codes."""
    if not len(points):
        counts = {"ties": 0, "n": 0, "prompts": 0, "prompts_effective": 0.0}
        return {"accuracy": None, "low": 0.0, "high": 1.0, **counts, "design_effect": None, "n_effective": 0.0}
    interval = share_interval(points, clusters, confidence)
    return {
        "accuracy": float(points.mean()),
        "low": interval.low,
        "high": interval.high,
        "ties": int((points == 0.5).sum()),
        "n": len(points),
        "prompts": interval.clusters,
        "prompts_effective": interval.clusters_effective,
        "design_effect": interval.design_effect,
        "n_effective": interval.n_effective,
    }


def slice_values(pairs: Pairs, column: str) -> np.ndarray | None:
    """Return the value of each pair in a column, [N], None where the pair has none. Returns None if no pair has the column.

    source; prompt_length, response_length (of the pair's longer one): thirds of the pairs, named by their tokens; length_order: which
    response is longer; other names are columns of the data.
    """
    if column == "source":
        return pairs.sources
    if column == "prompt_length":
        return thirds(pairs.prompt_tokens)
    if column == "response_length":
        return thirds(np.maximum(pairs.chosen_tokens, pairs.rejected_tokens))
    if column == "length_order":
        return _length_order(pairs)
    return pairs.labels.get(column)


def thirds(tokens: np.ndarray) -> np.ndarray:
    """Names [N] such as "5 to 9 tokens" that divide the pairs into three parts of about equal size.

    Equal lengths share a part, so there may be fewer parts.
    """
    borders = np.unique(np.quantile(tokens, [k / PARTS for k in range(1, PARTS)], method="lower")) if len(tokens) else np.array([])
    part = np.searchsorted(borders, tokens, side="left")
    names = np.empty(len(tokens), dtype=object)
    for k in np.unique(part):
        inside = tokens[part == k]
        low, high = int(inside.min()), int(inside.max())
        names[part == k] = f"{low} to {high} tokens" if low < high else f"{low} tokens"
    return names


def _length_order(pairs: Pairs) -> np.ndarray:
    order = np.sign(pairs.chosen_tokens - pairs.rejected_tokens)
    return np.array(["chosen shorter", "same length", "chosen longer"], dtype=object)[order + 1]


def slice_accuracies(pairs: Pairs, columns: list[str], *, confidence: float, min_pairs: int) -> list[dict[str, Any]]:
    """Accuracy for every value of every column, in the columns' order; lengths ascending, other values by name."""
    found = []
    for column in columns:
        values = slice_values(pairs, column)
        if values is None:
            continue
        named = sorted({v for v in values if v is not None}, key=lambda v: (_first_number(v) if "length" in column else 0, str(v)))
        for value in named:
            measured = summarize(pairs.select(values == value), confidence)
            kept = {key: measured[key] for key in ("accuracy", "low", "high", "ties", "n", "prompts")}
            found.append({"column": column, "value": str(value), **kept, "judged": measured["n"] >= min_pairs})
    return found


def _first_number(name: str) -> int:
    first = name.split(" ", 1)[0]
    return int(first) if first.isdigit() else 0


def worst_slice(slices: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the judged slice with the lowest accuracy; of equal ones the first."""
    return min((s for s in slices if s["judged"]), key=lambda s: s["accuracy"], default=None)


def mcnemar_exact(first_only: int, second_only: int) -> float:
    """Two-sided p-value for the pairs that exactly one of two models orders rightly; 1 if there are none.

    p = min(1, 2 * P(X <= min(first_only, second_only))), X binomial with first_only + second_only trials and 1/2
    Source: McNemar 1947, https://doi.org/10.1007/BF02295996, in its exact form

    Pairs of one prompt count as independent here, so p is too small where prompts have several pairs. The gate decides by the interval of
    `compare`.
    """
    n = first_only + second_only
    return min(1.0, 2 * float(bdtr(min(first_only, second_only), n, 0.5))) if n else 1.0


def compare(candidate: np.ndarray, incumbent: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """Accuracies of two models, their difference with its interval over prompts, and McNemar's test, from points [N] on the same pairs.

    Where one model has a tie and the other doesn't, the model with more points counts as right.
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
