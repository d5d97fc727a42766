"""A run's figures as one small SVG picture, for Prefect's artifacts, which run no scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from rlhf_core.report.colors import BLUE, GRID, INK, MUTED, ORANGE, PURPLE, thin

WIDTH, HEIGHT, COLUMNS = 320, 190, 3  # of a panel, in pixels; panels in a row
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 30, 26  # of a panel's margins


@dataclass(frozen=True)
class Panel:
    """One diagram of the picture.

    series: (x, y) of its points by colour. dots: draw points instead of a line. diagonal: draw a dashed line for perfect calibration.
    """

    title: str
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    dots: bool = False
    diagonal: bool = False


def sketch(metrics: Mapping[str, Any], curves: Mapping[str, pd.DataFrame]) -> str | None:
    """Return the figures of finished stages as SVG text; None if there are none.

    Args:
        metrics: each stage's metrics. curves: each stage's rows, one per step.
    """
    panels = [panel for panel in _panels(metrics, curves) if panel.series]
    if not panels:
        return None
    rows = -(-len(panels) // COLUMNS)
    drawn = (_draw(p, WIDTH * (i % COLUMNS), HEIGHT * (i // COLUMNS)) for i, p in enumerate(panels))
    size = f'width="{COLUMNS * WIDTH}" height="{rows * HEIGHT}"'
    font = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {font}><rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>'


def _panels(metrics: Mapping[str, Any], curves: Mapping[str, pd.DataFrame]) -> Iterator[Panel]:
    for stage, column, heldout, title in (
        ("train_sft", "loss", "heldout_loss", "SFT: loss, nats per token"),
        ("train_reward", "accuracy", "heldout_accuracy", "Reward model: accuracy"),
        ("train_policy", "loss", "heldout_loss", "Alignment: loss"),
        ("train_policy", "score_mean", "eval_score", "RL: score"),
        ("train_policy", "kl_mean", "", "RL: KL to the reference model, nats"),
        ("train_policy", "response_length", "", "RL: tokens per response"),
    ):
        points = {color: _points(curves.get(stage), "step", name) for color, name in ((BLUE, column), (ORANGE, heldout))}
        yield Panel(title, {color: xy for color, xy in points.items() if xy is not None} if points[BLUE] else {})
    frontier = _points(curves.get("train_policy"), "kl_mean", "score_mean")
    yield Panel("RL: score against KL", {PURPLE: frontier} if frontier else {}, dots=True)
    calibration = metrics.get("gate_reward", {}).get("calibration")
    bins = [b for b in calibration["after"]["bins"] if b["n"]] if calibration else []
    reliability = ([b["confidence"] for b in bins], [b["accuracy"] for b in bins])
    yield Panel("Reward model: accuracy against confidence", {BLUE: reliability} if bins else {}, dots=True, diagonal=True)


def _points(rows: pd.DataFrame | None, x: str, y: str) -> tuple[list[float], list[float]] | None:
    if rows is None or x not in rows or y not in rows:
        return None
    known = thin(rows.dropna(subset=[x, y]))
    return None if known.empty else (known[x].tolist(), known[y].tolist())


def _draw(panel: Panel, left: float, top: float) -> str:
    xs, ys = (np.concatenate([points[axis] for points in panel.series.values()]) for axis in (0, 1))
    (x0, x1), (y0, y1) = ((float(v.min()), float(v.max()) if v.max() > v.min() else float(v.min()) + 1.0) for v in (xs, ys))
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> str:
        return f"{LEFT + wide * (x - x0) / (x1 - x0):.1f},{TOP + high * (y1 - y) / (y1 - y0):.1f}"

    parts = [f'<text x="{LEFT}" y="18" fill="{INK}" font-weight="bold">{escape(panel.title)}</text>']
    parts.append(f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}" fill="none" stroke="{GRID}"/>')
    for value, y in ((y1, TOP + 9), (y0, TOP + high)):
        parts.append(f'<text x="{LEFT - 5}" y="{y}" text-anchor="end" fill="{MUTED}">{value:.3g}</text>')
    for value, x, anchor in ((x0, LEFT, "start"), (x1, LEFT + wide, "end")):
        parts.append(f'<text x="{x}" y="{TOP + high + 16}" text-anchor="{anchor}" fill="{MUTED}">{value:.3g}</text>')
    if panel.diagonal:
        low, high_end = max(x0, y0), min(x1, y1)
        ends = f"{place(low, low)} {place(high_end, high_end)}"
        parts.append(f'<polyline points="{ends}" stroke="{MUTED}" stroke-dasharray="4" fill="none"/>')
    for color, points in panel.series.items():
        places = [place(x, y) for x, y in zip(*points, strict=True)]
        if panel.dots:
            parts += [f'<circle cx="{p.split(",")[0]}" cy="{p.split(",")[1]}" r="3" fill="{color}" fill-opacity="0.6"/>' for p in places]
        else:
            parts.append(f'<polyline points="{" ".join(places)}" stroke="{color}" stroke-width="1.4" fill="none"/>')
    return f'<g transform="translate({left} {top})">{"".join(parts)}</g>'
