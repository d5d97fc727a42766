"""Common parts of the report's figures: an empty canvas, and curves over steps whose values are shown on hover."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource, HoverTool, Legend, NumeralTickFormatter
from bokeh.plotting import figure

from rlhf_core.report.colors import GRID, MUTED, thin

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
HEIGHT = 240  # pixels


@dataclass(frozen=True)
class Line:
    """A column drawn as a curve; with dots if it is measured only at some steps."""

    column: str
    label: str
    color: str
    dots: bool = False


def curves(
    rows: pd.DataFrame,
    lines: Sequence[Line],
    *,
    y_title: str,
    percent: bool = False,
    band: str | None = None,
    y_axis_type: str = "linear",
) -> figure:
    """Return a figure of curves over steps; hovering shows the values at the nearest step.

    Args:
        band: a column whose value is drawn as a band around the first line.
    """
    plot = canvas(y_title, x_title="step", y_axis_type=y_axis_type)
    plot.yaxis.ticker.desired_num_ticks = 5
    number = "0.0%" if percent else "0.0000"
    if percent:
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
    for line in lines:
        measured = thin(rows.dropna(subset=[line.column]))
        if measured.empty:
            continue
        values = measured[line.column].to_numpy(dtype=float)
        columns = {"x": measured["step"].to_numpy(), "y": values}
        if band and line is lines[0]:
            spread = measured[band].to_numpy(dtype=float)
            columns |= {"low": values - spread, "high": values + spread}
        source = ColumnDataSource(columns)
        if band and line is lines[0]:
            plot.varea(x="x", y1="low", y2="high", source=source, fill_color=line.color, fill_alpha=0.12)
        label = {"legend_label": line.label} if len(lines) > 1 else {}
        glyph = plot.line("x", "y", source=source, color=line.color, line_width=2 if line.dots else 1.6, **label)
        if line.dots:
            glyph = plot.scatter("x", "y", source=source, color=line.color, size=6, **label)
        tooltip = [("step", "@x{0,0}"), (line.label, f"@y{{{_precise(measured[line.column], number)}}}")]
        plot.add_tools(HoverTool(renderers=[glyph], mode="vline", tooltips=tooltip, attachment="right" if line.dots else "left"))
    place_legend(plot)
    return plot


def add_frontier(plot: figure, rows: pd.DataFrame, color: str, name: str = "") -> None:
    """Add dots for score against KL by step, later ones darker; dots without a name in the legend are joined by a line."""
    steps = thin(rows.dropna(subset=["kl_mean", "score_mean"]))
    columns = {"kl": steps["kl_mean"].to_numpy(), "score": steps["score_mean"].to_numpy(), "step": steps["step"].to_numpy()}
    source = ColumnDataSource(columns | {"alpha": np.linspace(0.2, 0.95, len(steps))})
    if not name:
        plot.line("kl", "score", source=source, color=color, line_alpha=0.25)
    legend = {"legend_label": name} if name else {}
    dots = plot.scatter("kl", "score", source=source, size=7, color=color, fill_alpha="alpha", line_alpha=0.0, **legend)
    step = (name, "step @step") if name else ("step", "@step")
    plot.add_tools(HoverTool(renderers=[dots], tooltips=[step, ("score", "@score{0.000}"), ("KL", "@kl{0.000}")]))


def _precise(values: pd.Series, usual: str) -> str:
    """Return a number format that still shows digits of very small values."""
    largest = values.abs().max()
    return "0.00e+0" if usual == "0.0000" and 0 < largest < 0.01 else usual


def place_legend(plot: figure) -> None:
    """Move the legend above the curves, which it would cover, and style it; a click on an entry hides its curve."""
    if not plot.legend:
        return
    legend: Legend = plot.legend[0]
    plot.add_layout(legend, "above")
    legend.location, legend.orientation, legend.click_policy = "right", "horizontal", "hide"
    legend.background_fill_alpha, legend.border_line_alpha = 0.0, 0.0
    legend.label_text_color, legend.label_text_font, legend.label_text_font_size = MUTED, FONT, "12px"
    legend.padding, legend.margin = 2, 4


def canvas(y_title: str, *, x_title: str, height: int = HEIGHT, **options: Any) -> figure:
    """Return an empty figure in the report's style."""
    plot = figure(height=height, sizing_mode="stretch_width", toolbar_location=None, tools="", **options)
    plot.background_fill_alpha = plot.border_fill_alpha = 0.0
    plot.outline_line_color = None
    plot.min_border_right = 12
    for axis, title in ((plot.xaxis[0], x_title), (plot.yaxis[0], y_title)):
        axis.axis_label = title
        axis.axis_label_text_color = axis.major_label_text_color = MUTED
        axis.axis_label_text_font = axis.major_label_text_font = FONT
        axis.axis_label_text_font_size = axis.major_label_text_font_size = "12px"
        axis.axis_label_text_font_style = "normal"
        axis.axis_line_color = axis.major_tick_line_color = GRID
        axis.minor_tick_line_color = None
    plot.grid.grid_line_color = GRID
    plot.xgrid.grid_line_color = None
    return plot
