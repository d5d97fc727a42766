"""Figures of data and reward model: token lengths, the gate's accuracies and calibration, and scores of test pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d, Span, Whisker
from bokeh.plotting import figure

from rlhf_core.report.canvas import HEIGHT, canvas, place_legend
from rlhf_core.report.colors import BLUE, GREEN, MUTED, ORANGE, PURPLE, RED
from rlhf_core.report.inputs import need
from rlhf_core.report.texts import visible

BINS = 48
MAX_SLICES = 40  # in the figure
MAX_NAME = 44  # characters of a slice's name
COLUMN_COLORS = {"messages": PURPLE, "text": PURPLE, "chosen": BLUE, "rejected": ORANGE, "response": GREEN}


def token_lengths(rows: pd.DataFrame) -> dict[str, figure]:
    """Return a histogram of token lengths for each use.

    rows: of plots/token_lengths.csv.
    """
    return {f"lengths_{use}": _lengths(of_use) for use, of_use in rows.groupby("use", sort=False)}


def _lengths(rows: pd.DataFrame) -> figure:
    plot = canvas("texts", x_title="tokens", height=200)
    for column, of_column in rows.groupby("column", sort=False):
        label, color = ("prompt" if column == "messages" else column), COLUMN_COLORS[column]
        source = ColumnDataSource({key: of_column[key].to_numpy() for key in ("low", "high", "texts")})
        bars = plot.quad(
            left="low", right="high", bottom=0, top="texts", source=source, fill_color=color, fill_alpha=0.35, line_color=color,
            line_alpha=0.6, legend_label=label,
        )  # fmt: skip
        plot.add_tools(
            HoverTool(renderers=[bars], mode="vline", tooltips=[(label, "@texts{0,0}"), ("tokens from", "@low"), ("below", "@high")])
        )
    plot.y_range.start = 0
    plot.yaxis.ticker.desired_num_ticks = 4
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    place_legend(plot)
    return plot


def accuracies(gate: Mapping[str, Any]) -> figure | None:
    """Figure of the accuracy on all test pairs and on each slice, with intervals and the threshold; None if nothing could be judged."""
    if need(gate, "accuracy") is None:
        return None
    if "first_error" in gate:
        return _step_accuracies(gate)
    slices = [s for s in need(gate, "slices") if s["n"] and s["n"] < gate["n"]]  # one with all pairs says nothing of its own
    named = {"all pairs": {**gate, "judged": True}} | {slice_name(s): s for s in slices[:MAX_SLICES]}
    return intervals(named, threshold=need(gate, "threshold"), x_title="held-out accuracy")


def _step_accuracies(gate: Mapping[str, Any]) -> figure:
    found, steps = gate["first_error"], gate["steps"]
    named = {"first wrong step: F1": {**found, "accuracy": found["f1"]}} if found["n"] else {}
    named |= {f"first wrong step: {kind} responses": found[kind] for kind in ("correct", "erroneous") if found[kind]["n"]}
    named |= {f"steps: {kind}": steps[kind] for kind in ("all", "right", "wrong") if steps[kind]["n"]}
    rows = {name: {**row, "ties": 0, "judged": name.endswith("F1")} for name, row in named.items()}
    return intervals(rows, threshold=need(gate, "threshold"), x_title="held-out accuracy; dashed: the least F1")


def external(gate: Mapping[str, Any]) -> figure | None:
    """Figure of the accuracy on external files, their sections and subsets, without their thresholds; None without any."""
    named: dict[str, Mapping[str, Any]] = {}
    for file in need(gate, "external"):
        named[slice_name({"column": "file", "value": file["name"]})] = {**file, "judged": True}
        parts = [(s["section"], s) for s in file.get("sections", [])] + [(s["subset"], s) for s in file["subsets"] if s["n"]]
        named |= {slice_name({"column": file["name"], "value": part}): {**s, "judged": True} for part, s in parts}
    scored = {name: row for name, row in named.items() if row["n"]}
    return intervals(scored, threshold=0.5, x_title="accuracy; dashed: guessing") if scored else None


def slice_name(row: Mapping[str, Any]) -> str:
    name = visible(f"{row['column'].replace('_', ' ')}: {row['value']}").replace("\n", " ")
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def intervals(named: Mapping[str, Mapping[str, Any]], *, threshold: float, x_title: str) -> figure:
    """Figure with a dot and its interval for each name, the first at the top; names with too few pairs to judge are grey.

    Args:
        named: accuracy, low, high, n, ties, judged of each.
    """
    rows = list(reversed(named.items()))
    lows, highs = [row["low"] for _, row in rows], [row["high"] for _, row in rows]
    plot = canvas("", x_title=x_title, height=max(HEIGHT, 76 + 24 * len(rows)), y_range=FactorRange(*[name for name, _ in rows]))
    plot.x_range = Range1d(max(0.0, min(0.5, threshold, *lows) - 0.02), 1.0)
    plot.xaxis.formatter = NumeralTickFormatter(format="0%")
    columns = {"name": [name for name, _ in rows], "value": [row["accuracy"] for _, row in rows], "low": lows, "high": highs}
    columns |= {key: [row[key] for _, row in rows] for key in ("n", "ties")}
    source = ColumnDataSource(columns | {"color": [BLUE if row["judged"] else MUTED for _, row in rows]})
    plot.add_layout(Span(location=threshold, dimension="height", line_color=RED, line_dash="dashed", line_width=1.5))
    ends = Whisker(base="name", lower="low", upper="high", dimension="width", source=source, line_color="color", line_width=2)
    ends.lower_head.line_color = ends.upper_head.line_color = "color"
    ends.lower_head.size = ends.upper_head.size = 8
    plot.add_layout(ends)
    dots = plot.scatter("value", "name", source=source, size=9, color="color")
    tooltips = [
        ("", "@name"),
        ("accuracy", "@value{0.00%}"),
        ("interval", "@low{0.00%} to @high{0.00%}"),
        ("pairs", "@n"),
        ("ties", "@ties"),
    ]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tooltips))
    plot.ygrid.grid_line_color = None
    return plot


def reliability(calibration: Mapping[str, Any] | None, *, height: int) -> figure | None:
    """Figure of the share of pairs in the right order against the probability that the reward model gave; a calibrated model lies on the
    diagonal.

    before: its own probabilities. after: with the fitted temperature. A larger dot is more pairs.

    Args:
        height: pixels, as of the figure beside it, so that no part of its card is empty.
    """
    if calibration is None:
        return None
    x_range = Range1d(0.48, 1.02)
    plot = canvas("in the right order", x_title="probability that the reward model gives", height=height, x_range=x_range)
    plot.xaxis.formatter = plot.yaxis.formatter = NumeralTickFormatter(format="0%")
    plot.line([0.5, 1.0], [0.5, 1.0], color=MUTED, line_dash="dashed", line_width=1.2)
    for key, label, color in (("before", "as trained", ORANGE), ("after", "with temperature", BLUE)):
        _bins(plot, [b for b in need(calibration, key, "bins") if b["n"]], label, color)
    place_legend(plot)
    return plot


def _bins(plot: figure, bins: Sequence[Mapping[str, Any]], label: str, color: str) -> None:
    columns = {key: [b[key] for b in bins] for key in ("confidence", "accuracy", "low", "high", "n")}
    total = sum(columns["n"])
    source = ColumnDataSource(columns | {"size": [5 + 14 * (n / total) ** 0.5 for n in columns["n"]]})
    ends = Whisker(base="confidence", lower="low", upper="high", source=source, line_color=color, line_alpha=0.6)
    ends.lower_head.size = ends.upper_head.size = 0
    plot.add_layout(ends)
    plot.line("confidence", "accuracy", source=source, color=color, line_alpha=0.5, legend_label=label)
    dots = plot.scatter("confidence", "accuracy", source=source, size="size", color=color, fill_alpha=0.7, legend_label=label)
    tooltips = [
        ("", label),
        ("says", "@confidence{0.0%}"),
        ("is right", "@accuracy{0.0%} (@low{0.0%} to @high{0.0%})"),
        ("pairs", "@n{0,0}"),
    ]
    plot.add_tools(HoverTool(renderers=[dots], tooltips=tooltips))


def score_histogram(heldout: pd.DataFrame) -> figure | None:
    """Histogram of the scores of chosen and rejected responses; of a process reward model those of right and wrong steps."""
    if "labels" in heldout:
        labels, scores = (np.concatenate([np.zeros(0), *heldout[name].map(np.asarray)]) for name in ("labels", "scores"))
        names, chosen, rejected = ("right", "wrong"), scores[labels >= 0], scores[labels < 0]
    else:
        names = ("chosen", "rejected")
        chosen, rejected = (heldout[f"{name}_score"].to_numpy(dtype=float) for name in names)
    both = np.concatenate([chosen, rejected])
    both = both[np.isfinite(both)]
    if both.size == 0:
        return None
    edges = np.histogram_bin_edges(both, bins=BINS)
    plot = canvas("steps" if "labels" in heldout else "responses", x_title="reward-model score")
    for values, label, color in ((rejected, names[1], ORANGE), (chosen, names[0], BLUE)):
        counts, _ = np.histogram(values[np.isfinite(values)], bins=edges)
        source = ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
        bars = plot.quad(
            left="left", right="right", bottom=0, top="count", source=source, fill_color=color, fill_alpha=0.45, line_color=color,
            line_alpha=0.7, legend_label=label,
        )  # fmt: skip
        tooltips = [(label, "@count"), ("score", "@left{0.00} to @right{0.00}")]
        plot.add_tools(HoverTool(renderers=[bars], mode="vline", tooltips=tooltips, attachment="left" if label == names[0] else "right"))
    plot.y_range.start = 0
    place_legend(plot)
    return plot
