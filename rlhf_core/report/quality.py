"""The figures about data and reward model: token lengths, the gate's accuracies, its calibration, the scores of test pairs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, NumeralTickFormatter, Range1d, Span, Whisker
from bokeh.plotting import figure

from rlhf_core.report.canvas import BLUE, GREEN, HEIGHT, MUTED, ORANGE, PURPLE, RED, canvas, place_legend
from rlhf_core.report.inputs import need
from rlhf_core.report.texts import visible

BINS = 48
MAX_NAME = 44  # characters of a slice's name
COLUMN_COLORS = {"messages": PURPLE, "text": PURPLE, "chosen": BLUE, "rejected": ORANGE, "response": GREEN}


def token_lengths(rows: pd.DataFrame) -> dict[str, figure]:
    """A histogram for each use, of rows as plots/token_lengths.csv has them."""
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
    plot.y_range.start, plot.y_range.range_padding = 0, 0.25  # room for the legend
    plot.yaxis.ticker.desired_num_ticks = 4
    plot.yaxis.formatter = NumeralTickFormatter(format="0,0")
    place_legend(plot, "top_right")
    return plot


def accuracies(gate: Mapping[str, Any]) -> figure | None:
    """Accuracy with its interval, of all test pairs and of each slice, against the threshold; None where nothing could be judged."""
    if need(gate, "accuracy") is None:
        return None
    by_source = need(gate, "by_source")
    slices = {slice_name(name): {**row, "judged": True} for name, row in by_source.items()} if len(by_source) > 1 else {}
    named = {"all pairs": {**gate, "judged": True}} | slices
    return intervals(named, threshold=need(gate, "threshold"), x_title="held-out accuracy")


def slice_name(name: str) -> str:
    shown = visible(name).replace("\n", " ")
    return shown if len(shown) <= MAX_NAME else shown[: MAX_NAME - 1] + "…"


def intervals(named: Mapping[str, Mapping[str, Any]], *, threshold: float, x_title: str) -> figure:
    """A dot with its interval for each name, the first at the top; those that are not judged (too few pairs) are grey.

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


def score_histogram(pairs: pd.DataFrame) -> figure | None:
    chosen = pairs["chosen_score"].to_numpy(dtype=float)
    rejected = pairs["rejected_score"].to_numpy(dtype=float)
    both = np.concatenate([chosen, rejected])
    both = both[np.isfinite(both)]
    if both.size == 0:
        return None
    edges = np.histogram_bin_edges(both, bins=BINS)
    plot = canvas("responses", x_title="reward-model score")
    for values, label, color in ((rejected, "rejected", ORANGE), (chosen, "chosen", BLUE)):
        counts, _ = np.histogram(values[np.isfinite(values)], bins=edges)
        source = ColumnDataSource({"left": edges[:-1], "right": edges[1:], "count": counts})
        bars = plot.quad(
            left="left", right="right", bottom=0, top="count", source=source, fill_color=color, fill_alpha=0.45, line_color=color,
            line_alpha=0.7, legend_label=label,
        )  # fmt: skip
        tooltips = [(label, "@count"), ("score", "@left{0.00} to @right{0.00}")]
        plot.add_tools(HoverTool(renderers=[bars], mode="vline", tooltips=tooltips, attachment="left" if label == "chosen" else "right"))
    plot.y_range.start, plot.y_range.range_padding = 0, 0.25  # room for the legend
    place_legend(plot, "top_right")
    return plot
