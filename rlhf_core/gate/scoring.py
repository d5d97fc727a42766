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
from rlhf_core.gate.rewardbench import section_rows
from rlhf_core.preparation.sources import load_source
from rlhf_core.provenance.dvc_cache import checkout
from rlhf_core.provenance.file_hashes import FileHashes
from rlhf_core.scorers.reward.loaded import LoadedModel
from rlhf_core.statistics.clusters import cluster_codes, share_interval

REPORTED = ("accuracy", "low", "high", "ties", "n")


def score_external(config: ExternalPairsConfig, model: LoadedModel, *, confidence: float) -> dict[str, Any]:
    """An entry of `external` in gate.json. Records without a pair, and pairs too long for the model, are counted and left out.

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
    folder = scratch / role
    subject = f"gate.{role} {promoted.version}"
    on_rank_zero(lambda: checkout(promoted.md5, folder, root=Path(), sha256=promoted.sha256), subject=subject)
    other = LoadedModel.load(folder, **load_options)
    chosen, rejected = other.score_pairs(test.rows)
    known = np.isfinite(chosen) & np.isfinite(rejected)
    if not known.any():
        raise ValueError(f"{subject}: expected a model that can score these pairs, got a score for none")
    pairs = test.pairs.select(known)
    compared = compare(pairs.points, pair_points(chosen[known], rejected[known]), pairs.clusters, confidence)
    return {"version": promoted.version, "md5": promoted.md5, "not_scored": int((~known).sum()), **compared}
