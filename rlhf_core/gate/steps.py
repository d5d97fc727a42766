"""Figures of gate.json for a process reward model: the first wrong step of held-out responses, and steps by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from rlhf_core.config import GateConfig
from rlhf_core.data.heldout import STEP_COLUMNS
from rlhf_core.data.schema import read_rows
from rlhf_core.gate.calibration import calibrate, fit_temperature
from rlhf_core.gate.heldout import nothing_measured
from rlhf_core.gate.pairs import summarize_points
from rlhf_core.statistics.clusters import cluster_codes

NONE = -1  # no step is wrong


@dataclass(frozen=True)
class HeldoutSteps:
    """N responses of one split with labelled steps, M in all.

    labels, scores, stds: [N] arrays, one number for each step.    prompts, sources: [N] names.    rows: of the use stepwise.
    """

    labels: list[np.ndarray]
    scores: list[np.ndarray]
    stds: list[np.ndarray]
    prompts: np.ndarray
    sources: np.ndarray
    rows: list[dict]

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def first_wrong(self) -> np.ndarray:
        """[N] position of the first step whose label is wrong; NONE without."""
        return np.array([first(labels < 0) for labels in self.labels], dtype=int)

    @property
    def points(self) -> np.ndarray:
        """[N] 1 where the scores have the same first wrong step as the labels, or none as well, else 0."""
        return first_error_points(self.labels, self.scores)

    @property
    def clusters(self) -> np.ndarray:
        return cluster_codes(self.prompts)

    @property
    def step_margins(self) -> np.ndarray:
        """[M] score of each step, negated where the step is wrong: above 0 the sign is right."""
        signs = [np.where(labels < 0, -1.0, 1.0) for labels in self.labels]
        return np.concatenate([np.zeros(0), *(sign * scores for sign, scores in zip(signs, self.scores, strict=True))])

    @property
    def texts(self) -> list[tuple[list, str]]:
        return [(row["messages"], row["response"]) for row in self.rows]


def first(wrong: np.ndarray) -> int:
    return int(wrong.argmax()) if wrong.any() else NONE


def first_error_points(labels: list[np.ndarray], scores: list[np.ndarray]) -> np.ndarray:
    """[N] 1 where the first step with a score below 0, that is with a probability below a half, is the first wrong one, else 0.

    A response without wrong steps has 1 if no score is below 0.
    Source: Zheng et al. 2024 (ProcessBench), https://arxiv.org/abs/2412.06559, section 3.1
    """
    pairs = zip(labels, scores, strict=True)
    return np.array([float(first(of_labels < 0) == first(of_scores < 0)) for of_labels, of_scores in pairs])


def read_steps(path: Path, prepared: Path, split: str) -> HeldoutSteps:
    """Return the scored responses of a split.

    Raises:
        ValueError: a column is missing, a score isn't finite, or a response isn't in the prepared data.
    """
    missing = [name for name in STEP_COLUMNS if name not in pq.read_schema(path).names]
    if missing:
        raise ValueError(f"{path}: expected scores of steps, got no column named {', '.join(missing)}; run train_reward again")
    table = pq.read_table(path, filters=[("split", "=", split)]).to_pylist()
    scores = [np.array(row["scores"], dtype=float) for row in table]
    if broken := [row["id"] for row, of_row in zip(table, scores, strict=True) if not np.isfinite(of_row).all()]:
        raise ValueError(
            f"{path}: expected finite scores, got NaN or infinity in {len(broken)} of {len(table)} {split} responses ({broken[0]} the "
            "first); the reward model has diverged or these responses break it"
        )
    rows = {row["id"]: row for row in read_rows(prepared, "stepwise", split)}
    if unknown := [row["id"] for row in table if row["id"] not in rows or rows[row["id"]]["labels"] != row["labels"]]:
        raise ValueError(
            f"{path}: expected responses of {prepared} with their labels, got {len(unknown)} that are not there, {unknown[0]} the first; "
            "run train_reward again"
        )
    return HeldoutSteps(
        labels=[np.array(row["labels"]) for row in table],
        scores=scores,
        stds=[np.array(row["stds"], dtype=float) for row in table],
        prompts=np.array([row["prompt"] for row in table], dtype=str),
        sources=np.array([row["source"] for row in table], dtype=str),
        rows=[rows[row["id"]] for row in table],
    )


def measure_steps(test: HeldoutSteps, validation_margins: np.ndarray, config: GateConfig) -> dict[str, Any]:
    """Contents of gate.json that the stored scores determine.

    Args:
        validation_margins: `step_margins` of the split validation, to which the temperature is fitted.
    """
    confidence, n = config.confidence, len(test)
    gate = {**nothing_measured(config), "threshold": config.min_first_error_f1, **_share(test.points, test.clusters, confidence)}
    gate["first_error"] = first_error(test.points, test.first_wrong, test.clusters, confidence)
    gate["steps"] = step_accuracies(test, confidence)
    for name in sorted(set(test.sources.tolist())):
        of_source = _share(test.points[test.sources == name], test.clusters[test.sources == name], confidence)
        gate["by_source"][name] = {key: of_source[key] for key in ("accuracy", "low", "high", "ties", "n")}
    if not n:
        return gate
    margins, temperature = test.step_margins, fit_temperature(validation_margins)
    points, clusters = (margins > 0) + 0.5 * (margins == 0), _of_steps(test)
    before = calibrate(margins, points, clusters, confidence)
    after = before if temperature is None else calibrate(margins / temperature, points, clusters, confidence)
    return gate | {
        "calibration": {"temperature": temperature, "temperature_pairs": len(validation_margins), "before": before, "after": after}
    }


def first_error(points: np.ndarray, first_wrong: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    """F1 of finding the first wrong step: the harmonic mean of the accuracies on erroneous and on correct responses.

    F1 grows with both accuracies, so the F1 of the lower ends is a lower end. Each end is missed with at most a quarter of
    1 - confidence, so that both are met in all but half of it (Bonferroni). None without responses of both kinds.
    Source: Zheng et al. 2024 (ProcessBench), https://arxiv.org/abs/2412.06559, section 3.1

    Args:
        points: [N], of `first_error_points`. first_wrong: [N].
    """
    kinds = {"correct": first_wrong == NONE, "erroneous": first_wrong != NONE}
    found: dict[str, Any] = {}
    for name, of in kinds.items():
        narrow, wide = (_share(points[of], clusters[of], c) for c in (confidence, (1 + confidence) / 2))
        found[name] = {key: narrow[key] for key in ("accuracy", "low", "high", "n", "prompts")} | {"wide": (wide["low"], wide["high"])}
    wide = [found[name].pop("wide") for name in kinds]
    known = all(found[name]["n"] for name in kinds)
    ends = [harmonic_mean(*of) for of in zip(*wide, strict=True)]
    return {
        "f1": harmonic_mean(*(found[name]["accuracy"] for name in kinds)) if known else None,
        **dict(zip(("low", "high"), ends if known else (0.0, 1.0), strict=True)),
        "n": len(points) if known else 0,
        **found,
    }


def harmonic_mean(a: float, b: float) -> float:
    return 2 * a * b / (a + b) if a + b else 0.0


def step_accuracies(test: HeldoutSteps, confidence: float) -> dict[str, Any]:
    """Return the share of steps on whose side of a half the score is, over all steps and over the right and the wrong ones."""
    margins, clusters = test.step_margins, _of_steps(test)
    labels = np.concatenate([np.zeros(0), *test.labels])
    points = (margins > 0) + 0.5 * (margins == 0)
    kinds = {"all": labels == labels, "right": labels >= 0, "wrong": labels < 0}
    shown = ("accuracy", "low", "high", "n")
    return {name: {key: _share(points[of], clusters[of], confidence)[key] for key in shown} for name, of in kinds.items()}


def _of_steps(test: HeldoutSteps) -> np.ndarray:
    return np.repeat(test.clusters, [len(labels) for labels in test.labels]).astype(int)


def _share(points: np.ndarray, clusters: np.ndarray, confidence: float) -> dict[str, Any]:
    return summarize_points(points, np.unique(clusters, return_inverse=True)[1], confidence)


def measure_disagreement(test: HeldoutSteps) -> dict[str, float | None]:
    """Mean standard deviation over an ensemble's members, over all steps, over those on the right side of a half and over the others."""
    stds, right = np.concatenate([np.zeros(0), *test.stds]), test.step_margins > 0

    def mean(values: np.ndarray) -> float | None:
        return float(values.mean()) if len(values) else None

    return {"disagreement": mean(stds), "disagreement_right": mean(stds[right]), "disagreement_wrong": mean(stds[~right])}
