"""Scores external pairs with the reward model, and held-out pairs with promoted models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import ExternalPairsConfig, IncumbentConfig
from rlhf_core.config.gate import SUBSET
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.places import locate
from rlhf_core.engines.deepspeed.ranks import on_rank_zero
from rlhf_core.gate.heldout import Heldout
from rlhf_core.gate.pairs import compare, pair_points
from rlhf_core.gate.rewardbench import section_rows, unscored_subsets
from rlhf_core.gate.steps import HeldoutSteps, first_error_points
from rlhf_core.models.folder import check_kind
from rlhf_core.models.vision import sees
from rlhf_core.preparation.sources import load_source
from rlhf_core.provenance.dvc_cache import checkout
from rlhf_core.provenance.file_hashes import FileHashes
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.statistics.clusters import cluster_codes, share_interval

SCORED_AGAIN = 32  # responses, which show a model that computes with others or with padding
REPORTED = ("accuracy", "low", "high", "ties", "n")


def score_external(config: ExternalPairsConfig, model: LoadedModel, *, confidence: float) -> dict[str, Any]:
    """Return an entry of `external` in gate.json. Records without a pair, and pairs too long for the model, are counted and left out.

    Raises:
        ValueError, FileNotFoundError: the file is missing, or doesn't have the configured columns.
    """
    loaded = load_source(config.source(), seed=0)
    rows = loaded.rows["preference"]
    chosen, rejected = model.score_pairs(rows)
    known = np.isfinite(chosen) & np.isfinite(rejected)
    points = pair_points(chosen[known], rejected[known])
    prompts = np.array([conversation_text(row["messages"]) for row in rows])[known]
    subsets = np.array([row.get("slices", {}).get(SUBSET, "") for row in rows])[known]
    overall = _accuracy(points, prompts, confidence)

    def accuracy(which: np.ndarray) -> dict[str, Any]:
        return {k: v for k, v in _accuracy(points[which], prompts[which], confidence).items() if k in REPORTED}

    by_subset = [{"subset": str(name), **accuracy(subsets == name)} for name in sorted(set(subsets.tolist()))]
    return {
        "name": config.name,
        "path": config.path,
        "sha256": FileHashes(Path()).of(locate(config.path)).sha256,
        **overall,
        "not_scored": int((~known).sum()),
        "left_out": dict(sorted(loaded.dropped.items())),
        "threshold": config.min_accuracy,
        "subsets": by_subset if config.subset is not None else [],
        "sections": section_rows(subsets, accuracy),
        "unscored_subsets": unscored_subsets(subsets),
    }


def _accuracy(points: np.ndarray, prompts: np.ndarray, confidence: float) -> dict[str, Any]:
    if not len(points):
        return {"accuracy": None, "low": 0.0, "high": 1.0, "ties": 0, "n": 0, "prompts": 0}
    interval = share_interval(points, cluster_codes(prompts), confidence)
    accuracy = {"accuracy": float(points.mean()), "low": interval.low, "high": interval.high}
    return {**accuracy, "ties": int((points == 0.5).sum()), "n": len(points), "prompts": interval.clusters}


def compare_to_promoted(
    test: Heldout, role: str, promoted: IncumbentConfig, *, confidence: float, scratch: Path, load_options: dict[str, Any]
) -> dict[str, Any]:
    """Comparison of the candidate with a promoted model, on the pairs that the promoted model can score.

    Raises:
        ValueError: DVC's cache lacks the promoted model with this md5 and sha256, or the model can score no pair.
    """
    subject = f"gate.{role} {promoted.version}"
    other = _promoted_model(subject, role, promoted, of_steps=False, scratch=scratch, load_options=load_options)
    chosen, rejected = other.score_pairs(test.rows)
    known = np.isfinite(chosen) & np.isfinite(rejected)
    if not known.any():
        raise ValueError(f"{subject}: expected a model that can score these pairs, got a score for none")
    pairs = test.pairs.select(known)
    compared = compare(pairs.points, pair_points(chosen[known], rejected[known]), pairs.clusters, confidence)
    return {"version": promoted.version, "md5": promoted.md5, "not_scored": int((~known).sum()), **compared}


def compare_steps_to_promoted(
    test: HeldoutSteps, role: str, promoted: IncumbentConfig, *, confidence: float, scratch: Path, load_options: dict[str, Any]
) -> dict[str, Any]:
    """`compare_to_promoted` of process reward models, on the responses whose steps the promoted model can score."""
    subject = f"gate.{role} {promoted.version}"
    other = _promoted_model(subject, role, promoted, of_steps=True, scratch=scratch, load_options=load_options)
    points = points_of_model(test, other)
    known = np.isfinite(points)
    if not known.any():
        raise ValueError(f"{subject}: expected a model that can score these steps, got scores for none")
    compared = compare(test.points[known], points[known], cluster_codes(test.prompts[known]), confidence)
    return {"version": promoted.version, "md5": promoted.md5, "not_scored": int((~known).sum()), **compared}


def _promoted_model(
    subject: str, role: str, promoted: IncumbentConfig, *, of_steps: bool, scratch: Path, load_options: dict[str, Any]
) -> LoadedModel:
    """Load a promoted model; of_steps: it has to be a process reward model.

    Raises:
        ValueError: DVC's cache lacks it, or it scores steps where whole responses are judged, or the other way round.
    """
    folder = scratch / role
    on_rank_zero(lambda: checkout(promoted.md5, folder, root=Path(), sha256=promoted.sha256), subject=subject)
    if not sees(folder):  # of a run before; it scores texts alone
        load_options = load_options | {"vision": None}
    other = LoadedModel.load(folder, **load_options)
    check_kind(subject, other.separator, of_steps=of_steps)
    return other


def probe_steps(test: HeldoutSteps, model: LoadedModel) -> dict[str, dict[str, Any]]:
    """Largest difference between two scores of one step, by probe: as train_reward wrote it and in a batch, and alone and in a batch."""
    again = np.unique(np.linspace(0, len(test) - 1, min(SCORED_AGAIN, len(test))).astype(int))
    texts = [test.texts[i] for i in again]
    together = model.score_steps(texts)
    alone = [model.score_steps([text])[0] for text in texts]
    stored = [test.scores[i] for i in again]
    batches = [_difference(np.array(a[0]), b) for a, b in zip(alone, together, strict=True) if a is not None]
    kept = [_difference(own, b) for own, b in zip(stored, together, strict=True)]
    return {
        name: {"value": max(values, default=None), "low": None, "high": None, "n": len(values)}
        for name, values in (("batch_size", batches), ("stored_scores", kept))
    }


def _difference(own: np.ndarray, other: tuple[list[float], list[float]] | None) -> float:
    """Return the largest difference; infinite where there are other steps."""
    if other is None or len(other[0]) != len(own):
        return float("inf")
    return float(np.abs(own - np.array(other[0])).max())


def points_of_model(test: HeldoutSteps, model: LoadedModel) -> np.ndarray:
    """[N] points of another process reward model on the same responses; NaN where it can't score one, or has other steps."""
    found = model.score_steps(test.texts)
    known = np.array([s is not None and len(s[0]) == len(labels) for s, labels in zip(found, test.labels, strict=True)], dtype=bool)
    points = np.full(len(test), np.nan)
    kept = [i for i in range(len(test)) if known[i]]
    points[known] = first_error_points([test.labels[i] for i in kept], [np.array(found[i][0]) for i in kept])
    return points
