"""Pairs from elsewhere, such as RewardBench's, scored and reported by subset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from rlhf_core.config import ExternalPairsConfig, SourceConfig
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.places import locate
from rlhf_core.data.sources import load_source
from rlhf_core.gate.clusters import cluster_codes, share_interval
from rlhf_core.gate.pairs import pair_points
from rlhf_core.gate.scoring import LoadedModel
from rlhf_core.provenance.file_hashes import FileHashes

SUBSET = "subset"
REPORTED = ("accuracy", "low", "high", "ties", "n")


def score_external(config: ExternalPairsConfig, model: LoadedModel, *, confidence: float) -> dict[str, Any]:
    """An entry of `external` in gate.json. Records that are no pair, and pairs with a response that is too long for the model, are
    counted and left out.

    Raises:
        ValueError, FileNotFoundError: the file is missing, or isn't what its columns say.
    """
    source = SourceConfig(
        name=config.name,
        kind="file",
        uses=["preference"],
        weight=1.0,
        path=config.path,
        format=config.format,
        columns=dict(config.columns),
        implicit_prompt=config.implicit_prompt,
        slices={SUBSET: config.subset} if config.subset is not None else {},
    )
    loaded = load_source(source, seed=0)
    rows = loaded.rows["preference"]
    chosen, rejected = (model.score_texts([(row["messages"], row[side]) for row in rows]) for side in ("chosen", "rejected"))
    known = np.isfinite(chosen) & np.isfinite(rejected)
    points = pair_points(chosen[known], rejected[known])
    prompts = np.array([conversation_text(row["messages"]) for row in rows])[known]
    subsets = np.array([row.get("slices", {}).get(SUBSET, "") for row in rows])[known]
    overall = _accuracy(points, prompts, confidence)
    by_subset = [
        {
            "subset": str(name),
            **{k: v for k, v in _accuracy(points[subsets == name], prompts[subsets == name], confidence).items() if k in REPORTED},
        }
        for name in sorted(set(subsets.tolist()))
    ]
    return {
        "name": config.name,
        "path": config.path,
        "sha256": FileHashes(Path()).of(locate(config.path)).sha256,
        **overall,
        "not_scored": int((~known).sum()),
        "left_out": dict(sorted(loaded.dropped.items())),
        "threshold": config.min_accuracy,
        "subsets": by_subset if config.subset is not None else [],
    }


def _accuracy(points: np.ndarray, prompts: np.ndarray, confidence: float) -> dict[str, Any]:
    if not len(points):
        return {"accuracy": None, "low": 0.0, "high": 1.0, "ties": 0, "n": 0, "prompts": 0}
    interval = share_interval(points, cluster_codes(prompts), confidence)
    accuracy = {"accuracy": float(points.mean()), "low": interval.low, "high": interval.high}
    return {**accuracy, "ties": int((points == 0.5).sum()), "n": len(points), "prompts": interval.clusters}
