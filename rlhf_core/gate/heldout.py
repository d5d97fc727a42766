"""Computes figures of gate.json from stored scores of held-out pairs, without loading a model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlhf_core.config import GateConfig
from rlhf_core.data.judge import find_judge
from rlhf_core.gate.calibration import calibrate, fit_temperature
from rlhf_core.gate.pairs import Pairs, slice_accuracies, summarize, worst_slice
from rlhf_core.statistics.clusters import bootstrap, cluster_codes, percentile_interval

# Keys of gate.json that are null where nothing was measured.
MEASURED = (
    *("accuracy", "low", "high", "ties", "n", "prompts", "prompts_effective", "design_effect", "n_effective"),
    *("worst_slice", "calibration", "length", "probes", "incumbent", "anchor", "judge", "ensemble", "look"),
)


@dataclass(frozen=True)
class Heldout:
    """The pairs of one split with their rows of the use preference, and the standard deviations [N] of their scores over an ensemble's
    members.
    """

    pairs: Pairs
    rows: list[dict]
    chosen_std: np.ndarray
    rejected_std: np.ndarray


def measure_scores(test: Heldout, validation_margins: np.ndarray, config: GateConfig) -> dict[str, Any]:
    """Contents of gate.json that the stored scores determine.

    Args:
        validation_margins: of the validation pairs, to which the temperature is fitted.
    """
    pairs, confidence = test.pairs, config.confidence
    gate = {**nothing_measured(config), **summarize(pairs, confidence)}
    sources = sorted(set(pairs.sources.tolist()))
    by_source = {s: summarize(pairs.select(pairs.sources == s), confidence) for s in sources}
    gate["by_source"] = {s: {k: m[k] for k in ("accuracy", "low", "high", "ties", "n")} for s, m in by_source.items()}
    if not len(pairs):
        return gate
    slices = slice_accuracies(pairs, config.slices, confidence=confidence, min_pairs=config.min_slice_pairs)
    temperature = fit_temperature(validation_margins)
    before = calibrate(pairs.margins, pairs.points, pairs.clusters, confidence)
    calibrated = before if temperature is None else calibrate(pairs.margins / temperature, pairs.points, pairs.clusters, confidence)
    gate |= {
        "slices": slices,
        "worst_slice": worst_slice(slices),
        "calibration": {
            "temperature": temperature,
            "temperature_pairs": len(validation_margins),
            "before": before,
            "after": calibrated,
        },
        "length": measure_length(test, confidence),
    }
    return gate


def distinct_responses(test: Heldout) -> tuple[list[tuple[list, str]], np.ndarray]:
    """Return each distinct response as (conversation, text), and its position in the concatenation of all chosen and all rejected ones."""
    texts = [row[side] for side in ("chosen", "rejected") for row in test.rows]
    prompts = np.tile(test.pairs.prompts, 2)
    first = {key: i for i, key in reversed(list(enumerate(zip(prompts, texts, strict=True))))}
    positions = np.array(sorted(first.values()))
    messages = [row["messages"] for row in test.rows]
    return [(messages[i % len(messages)], texts[i]) for i in positions], positions


def measure_length(test: Heldout, confidence: float) -> dict[str, Any]:
    """Return the length bias of the scores, over the distinct responses of the pairs (`length_bias`)."""
    pairs = test.pairs
    _, which = distinct_responses(test)
    scores, tokens = np.concatenate([pairs.chosen, pairs.rejected]), np.concatenate([pairs.chosen_tokens, pairs.rejected_tokens])
    return length_bias(pairs, scores[which], tokens[which], np.tile(pairs.clusters, 2)[which], confidence)


def measure_ensemble(test: Heldout) -> dict[str, float | None]:
    """Mean disagreement of an ensemble's members, over all pairs, over those in the right order and over the others."""
    of_pair = (test.chosen_std + test.rejected_std) / 2
    right = test.pairs.points == 1

    def mean(values: np.ndarray) -> float | None:
        return float(values.mean()) if len(values) else None

    return {"disagreement": mean(of_pair), "disagreement_right": mean(of_pair[right]), "disagreement_wrong": mean(of_pair[~right])}


def measure_judge(test: Heldout, judges: dict[str, str], confidence: float) -> dict[str, Any] | None:
    """Rank correlation of scores with the judge, on responses whose source has a judge; None where no source has one."""
    responses, which = distinct_responses(test)
    sources = np.tile(test.pairs.sources, 2)[which]
    known = np.array([source in judges for source in sources])
    if not known.any():
        return None
    judged = [
        find_judge(judges[source])(messages, text) for (messages, text), source, has in zip(responses, sources, known, strict=True) if has
    ]
    met = np.array([j.met / len(j.aspects) for j in judged])
    scores = np.concatenate([test.pairs.chosen, test.pairs.rejected])[which][known]
    return against_judge(scores, met, cluster_codes(np.tile(test.pairs.prompts, 2)[which][known]), confidence)


def nothing_measured(config: GateConfig) -> dict[str, Any]:
    """gate.json before any measurement, without needed, passed and message."""
    empty = {"checks": [], "by_source": {}, "slices": [], "external": [], "llm_judges": []}
    return {**dict.fromkeys(MEASURED), **empty, "threshold": config.min_accuracy, "confidence": config.confidence}


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson's correlation of the ranks, ties having their mean rank; NaN if a or b is constant."""
    ranks = mean_ranks(a), mean_ranks(b)
    spreads = [float(r.std()) for r in ranks]
    if not len(a) or 0.0 in spreads:
        return math.nan
    return float(((ranks[0] - ranks[0].mean()) * (ranks[1] - ranks[1].mean())).mean() / (spreads[0] * spreads[1]))


def spearman_interval(a: np.ndarray, b: np.ndarray, clusters: np.ndarray, confidence: float) -> tuple[float, float]:
    """Percentile interval of a bootstrap over clusters."""
    return percentile_interval(bootstrap(lambda which: spearman(a[which], b[which]), clusters), confidence)


def mean_ranks(values: np.ndarray) -> np.ndarray:
    """[n] ranks from 1, ties having their mean rank."""
    _, position, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[position]


def kendall(a: np.ndarray, b: np.ndarray) -> float:
    """tau-b: (concordant - discordant pairs) / sqrt((pairs that differ in a) * (pairs that differ in b)); NaN where either is 0.

    The time grows with the number of distinct values of b, of which a judge has few.
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
    """Rank correlation of scores and judgements of distinct responses [K].

    Args:
        judged: [K] share of the judge's criteria that a response meets.
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
    """Length bias: accuracy where the shorter response is chosen, and the correlation of score and length.

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
