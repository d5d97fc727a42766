"""The figures of the report, drawn by Bokeh in the browser, from JSON that is the same for the same inputs.

Colours are those of the light scheme; the page's script exchanges them by DARK where the reader prefers dark.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from bokeh.embed import json_item
from bokeh.models import ColumnDataSource, FactorRange, HoverTool, Legend, NumeralTickFormatter, Range1d, Span, Whisker
from bokeh.plotting import figure

from rlhf_core.report.inputs import ReportInputs, need

INK, MUTED, GRID = "#3d4451", "#6b7280", "#e4e7ec"
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL = "#2f6fdb", "#d9730d", "#1f8a4c", "#c93c37", "#7a4fd0", "#0e8a94"
DARK = {
    INK: "#cfd6e1",
    MUTED: "#98a2b3",
    GRID: "#2b313c",
    BLUE: "#6ea8ff",
    ORANGE: "#ffa657",
    GREEN: "#57c785",
    RED: "#ff7b72",
    PURPLE: "#b795ff",
    TEAL: "#4fd1d9",
}
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MAX_POINTS = 1000  # of one curve; longer ones are thinned evenly
BINS = 48
HEIGHT = 240  # pixels

Figures = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Line:
    """A column drawn as a curve; dots for one that is measured now and then."""

    column: str
    label: str
    color: str
    dots: bool = False


def all_figures(inputs: ReportInputs) -> Figures:
    """Name of the figure -> what Bokeh.embed.embed_item draws. Those of a scorer are named rl_score_<its name>."""
    drawn = {
        **{f"sft_{phase}": _sft(rows) for phase, rows in inputs.sft_curves.groupby("phase", sort=False)},
        **_reward(inputs.reward_curves),
        **(_rl(inputs.policy_curves, need(inputs.params, "rl")) if inputs.method == "rl" else _offline(inputs.policy_curves)),
        "gate_interval": _gate_interval(inputs.gate),
        "gate_scores": _score_histogram(inputs.heldout[inputs.heldout["split"] == "test"]),
    }
    return {name: json_item(plot) for name, plot in drawn.items() if plot is not None}


def _sft(rows: pd.DataFrame) -> figure:
    lines = [Line("loss", "training", BLUE), Line("heldout_loss", "held out", ORANGE, dots=True)]
    plot = _curves(rows, lines, y_title="loss, nats per token", y_axis_type="log")
    values = rows[["loss", "heldout_loss"]].stack()
    plot.yaxis.ticker = [m * 10.0**e for e in range(-6, 4) for m in (1, 2, 5) if values.min() / 1.2 <= m * 10.0**e <= values.max() * 1.2]
    plot.yaxis.formatter = NumeralTickFormatter(format="0.[000000]")
    return plot


def _reward(rows: pd.DataFrame) -> dict[str, figure]:
    if rows.empty:
        return {}
    loss = [Line("loss", "training", BLUE), Line("heldout_loss", "held out", ORANGE, dots=True)]
    accuracy = [Line("accuracy", "training", BLUE), Line("heldout_accuracy", "held out", ORANGE, dots=True)]
    return {
        "reward_loss": _curves(rows, loss, y_title="loss, nats per pair"),
        "reward_accuracy": _curves(rows, accuracy, y_title="pairs in the right order", percent=True, legend="bottom_right"),
    }


def _offline(rows: pd.DataFrame) -> dict[str, figure]:
    """Training on pairs or on chosen responses: whatever of these a method measures."""
    wanted = {
        "policy_loss": ("loss, nats", False, [Line("loss", "training", BLUE), Line("heldout_loss", "held out", ORANGE, dots=True)]),
        "policy_accuracy": (
            *("pairs in the right order", True),
            [Line("reward_accuracy", "training", BLUE), Line("heldout_accuracy", "held out", ORANGE, dots=True)],
        ),
        "policy_margin": (
            *("nats times beta", False),
            [Line("reward_margin", "training", BLUE), Line("heldout_margin", "held out", ORANGE, dots=True)],
        ),
        "policy_rewards": (
            *("nats times beta", False),
            [Line("chosen_reward", "chosen", GREEN), Line("rejected_reward", "rejected", RED)],
        ),
        "policy_logprobs": (
            *("nats per token", False),
            [Line("chosen_logprob", "chosen", GREEN), Line("rejected_logprob", "rejected", RED)],
        ),
        "policy_kl": ("nats per response", False, [Line("kl", "KL", PURPLE)]),
    }
    figures = {}
    for name, (y_title, percent, lines) in wanted.items():
        measured = [line for line in lines if line.column in rows and rows[line.column].notna().any()]
        if measured:
            figures[name] = _curves(rows, measured, y_title=y_title, percent=percent)
    return figures


def _rl(rows: pd.DataFrame, rl: Mapping[str, Any]) -> dict[str, figure]:
    """Args: rl: the section of params.yaml."""
    figures = {
        "rl_score": _curves(rows, _with_evaluation(rows, "score_mean", "eval_score"), y_title="score", band="score_std"),
        "rl_length": _curves(rows, [Line("response_length", "length", TEAL)], y_title="tokens per response"),
        "rl_cut_off": _curves(rows, [Line("cut_off_fraction", "cut off", ORANGE)], y_title="share of responses", percent=True),
        "rl_entropy": _curves(rows, [Line("entropy", "entropy", GREEN)], y_title="nats per token"),
        "rl_clip": _curves(rows, [Line("clip_frac", "clipped", RED)], y_title="share of tokens", percent=True),
        "rl_approx_kl": _curves(rows, [Line("approx_kl", "change", PURPLE)], y_title="nats per token"),
        "rl_logprobs": _logprobs(rows, need(rl, "rollout", "max_logprob_difference")),
        **_scorers(rows, [s["name"] for s in need(rl, "reward", "scorers")]),
    }
    if need(rl, "kl", "coef") > 0:  # without one nothing was measured
        figures["rl_kl"] = _curves(rows, [Line("kl_mean", "KL to SFT", PURPLE)], y_title="nats per response")
    if "explained_variance" in rows and rows["explained_variance"].notna().any():
        figures["rl_critic"] = _curves(rows, [Line("explained_variance", "explained", TEAL)], y_title="share of the returns' variance")
    return figures


def _scorers(rows: pd.DataFrame, names: Sequence[str]) -> dict[str, figure]:
    """Each scorer's raw scores, where there are several; a single one's are the score."""
    if len(names) == 1:
        return {}
    return {f"rl_score_{name}": _curves(rows, _with_evaluation(rows, f"score_{name}", f"eval_{name}"), y_title="score") for name in names}


def _with_evaluation(rows: pd.DataFrame, column: str, evaluated: str) -> list[Line]:
    """The curve of a batch's mean, and dots for the validation prompts where they were evaluated during training."""
    lines = [Line(column, "training", BLUE)]
    if evaluated in rows and rows[evaluated].notna().any():
        lines.append(Line(evaluated, "validation, greedy", ORANGE, dots=True))
    return lines


def _logprobs(rows: pd.DataFrame, limit: float) -> figure:
    """On a logarithmic axis, which has no place for an exact 0: those steps are left out of the curve."""
    positive = rows[["step", "logprob_difference"]].where(rows["logprob_difference"] > 0).dropna()
    plot = _curves(positive, [Line("logprob_difference", "largest difference", BLUE)], y_title="nats", y_axis_type="log")
    plot.add_layout(Span(location=limit, dimension="width", line_color=RED, line_dash="dashed", line_width=1.5))
    values = [*positive["logprob_difference"], limit]
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    plot.y_range = Range1d(10.0**first, 10.0 ** (last + 0.2))
    plot.yaxis.ticker = [10.0**e for e in range(first, last + 1)]
    return plot


def _curves(
    rows: pd.DataFrame,
    lines: Sequence[Line],
    *,
    y_title: str,
    percent: bool = False,
    band: str | None = None,
    legend: str = "top_right",
    y_axis_type: str = "linear",
) -> figure:
    """Curves over steps, with a hover that shows the step nearest to the pointer.

    Args:
        band: a column drawn as a band of plus and minus its value around the first line.
    """
    plot = _canvas(y_title, x_title="step", y_axis_type=y_axis_type)
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
    _place_legend(plot, legend)
    return plot


def _precise(values: pd.Series, usual: str) -> str:
    """A number format that still shows digits of very small values."""
    largest = values.abs().max()
    return "0.00e+0" if usual == "0.0000" and 0 < largest < 0.01 else usual


def _place_legend(plot: figure, location: str) -> None:
    if not plot.legend:
        return
    legend: Legend = plot.legend[0]
    legend.location, legend.orientation, legend.click_policy = location, "horizontal", "hide"
    legend.background_fill_alpha, legend.border_line_alpha = 0.0, 0.0
    legend.label_text_color, legend.label_text_font, legend.label_text_font_size = MUTED, FONT, "12px"
    legend.padding, legend.margin = 2, 4


def _gate_interval(gate: dict[str, Any]) -> figure | None:
    """Accuracy with its interval, of all test pairs and of each source, against the threshold; None where nothing could be judged."""
    if need(gate, "accuracy") is None:
        return None
    by_source = need(gate, "by_source")
    named = {"all pairs": gate, **(by_source if len(by_source) > 1 else {})}
    rows = list(reversed(named.items()))
    threshold = need(gate, "threshold")
    lows, highs = [row["low"] for _, row in rows], [row["high"] for _, row in rows]
    plot = _canvas(
        "", x_title="held-out accuracy", height=max(HEIGHT, 92 + 34 * len(rows)), y_range=FactorRange(*[name for name, _ in rows])
    )
    plot.x_range = Range1d(max(0.0, min(0.5, threshold, *lows) - 0.02), 1.0)
    plot.xaxis.formatter = NumeralTickFormatter(format="0%")
    source = ColumnDataSource(
        {
            "name": [name for name, _ in rows],
            "value": [row["accuracy"] for _, row in rows],
            "low": lows,
            "high": highs,
            "n": [row["n"] for _, row in rows],
            "ties": [row["ties"] for _, row in rows],
        }
    )
    plot.add_layout(Span(location=threshold, dimension="height", line_color=RED, line_dash="dashed", line_width=1.5))
    ends = Whisker(base="name", lower="low", upper="high", dimension="width", source=source, line_color=BLUE, line_width=2)
    ends.lower_head.line_color = ends.upper_head.line_color = BLUE
    ends.lower_head.size = ends.upper_head.size = 12
    plot.add_layout(ends)
    dots = plot.scatter("value", "name", source=source, size=10, color=BLUE)
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


def _score_histogram(pairs: pd.DataFrame) -> figure | None:
    chosen = pairs["chosen_score"].to_numpy(dtype=float)
    rejected = pairs["rejected_score"].to_numpy(dtype=float)
    both = np.concatenate([chosen, rejected])
    both = both[np.isfinite(both)]
    if both.size == 0:
        return None
    edges = np.histogram_bin_edges(both, bins=BINS)
    plot = _canvas("responses", x_title="reward-model score")
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
    _place_legend(plot, "top_right")
    return plot


def _canvas(y_title: str, *, x_title: str, height: int = HEIGHT, **options: Any) -> figure:
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


def thin(rows: pd.DataFrame) -> pd.DataFrame:
    """At most MAX_POINTS rows, evenly spaced, the first and the last among them."""
    if len(rows) <= MAX_POINTS:
        return rows
    return rows.iloc[np.unique(np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(int))]
