"""Figures of the evaluations during training: scores of greedy responses and pass@k of sampled ones, with intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from rlhf_core.config import RlConfig
from rlhf_core.data.schema import read_rows
from rlhf_core.paths import PREPARED
from rlhf_core.statistics.clusters import share_interval
from rlhf_core.statistics.intervals import mean_interval

CONFIDENCE = 0.95
Scores = Mapping[str, np.ndarray]  # of each response, by scorer and as `score`, the weighted sum; NaN = not scored


def check_evaluated_sources(rl: RlConfig) -> None:
    """Check that each of rl.evaluation.sources has validation prompts.

    Raises:
        ValueError: one has none.
    """
    if not rl.evaluation.sources:
        return
    known = sorted({row["source"] for row in read_rows(PREPARED, "prompt", "validation")})
    if missing := [source for source in rl.evaluation.sources if source not in known]:
        raise ValueError(f"rl.evaluation.sources: expected sources with validation prompts, some of {known}, got {missing}; correct them")


def evaluation_metrics(greedy: Scores, sampled: Scores | None, sources: Sequence[str], rl: RlConfig) -> dict[str, float]:
    """Means over the scored responses; NaN where none was scored.

    Args:
        greedy: of one response to each prompt. sampled: of `rl.evaluation.samples` to each prompt, a prompt's adjacent; None: none are.
        sources: of each prompt.
    """
    evaluation = rl.evaluation
    passed = None if sampled is None else _passed(sampled[evaluation.metric], evaluation.pass_score).reshape(-1, evaluation.samples)
    found = {f"eval_{name}": _mean(values) for name, values in greedy.items()} | _figures(greedy["score"], passed)
    for source in evaluation.sources:
        own = np.array(sources) == source
        of_source = _figures(greedy["score"][own], None if passed is None else passed[own])
        found |= {f"{name}.{source}": value for name, value in of_source.items()}
    return found


def _passed(scores: np.ndarray, least: float) -> np.ndarray:
    """1 where a score is at least so high, else 0; NaN where there is none."""
    return np.where(np.isfinite(scores), scores >= least, np.nan)


def _figures(scores: np.ndarray, passed: np.ndarray | None) -> dict[str, float]:
    """Values with the ends of their intervals.

    Args:
        scores: [prompts].    passed: [prompts, samples] 1, 0 or NaN. The samples of a prompt depend on each other, and are a cluster.
    """
    found = _with_ends("score", _mean(scores), mean_interval(_known(scores), CONFIDENCE))
    if passed is not None:
        whole = passed[np.isfinite(passed).all(1)]
        found |= _share("pass_1", passed) | _share(f"pass_{passed.shape[1]}", whole.max(1, keepdims=True))
    return found


def _share(name: str, points: np.ndarray) -> dict[str, float]:
    """Return the mean of points [prompts, trials], NaN left out. Trials of one prompt give pass@1, whether any of them passes pass@k."""
    prompts = np.broadcast_to(np.arange(len(points))[:, None], points.shape)[np.isfinite(points)]
    if not len(prompts):
        return _with_ends(name, math.nan, (math.nan, math.nan))
    _, clusters = np.unique(prompts, return_inverse=True)
    interval = share_interval(_known(points), clusters, CONFIDENCE)
    return _with_ends(name, _mean(points), (interval.low, interval.high))


def _known(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)].astype(float)


def _mean(values: np.ndarray) -> float:
    known = _known(values)
    return float(known.mean()) if len(known) else math.nan


def _with_ends(name: str, value: float, ends: tuple[float, float]) -> dict[str, float]:
    low, high = (float(end) if math.isfinite(end) else math.nan for end in ends)
    return {f"eval_{name}": value, f"eval_{name}_low": low, f"eval_{name}_high": high}
