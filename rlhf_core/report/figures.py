"""Every stage's curves as JSON that Bokeh draws in the browser; the same inputs give the same JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import pandas as pd
from bokeh.embed import json_item
from bokeh.models import NumeralTickFormatter, Range1d, Span
from bokeh.plotting import figure

from rlhf_core.report.canvas import HEIGHT, Line, add_frontier, canvas, curves
from rlhf_core.report.colors import BLUE, GREEN, ORANGE, PURPLE, RED, TEAL
from rlhf_core.report.inputs import ReportInputs, need
from rlhf_core.report.naming import SFT, start_name
from rlhf_core.report.quality import accuracies, external, reliability, score_histogram, token_lengths

Figures = dict[str, dict[str, Any]]
# Monitored columns (docs/monitors.md) that no other figure of RL shows.
_TEXT_LINES = [
    Line("repetition", "repeated", RED),
    Line("distinct_1", "different tokens", TEAL),
    Line("distinct_2", "different pairs of tokens", BLUE),
]


def all_figures(inputs: ReportInputs) -> Figures:
    """Figures by name, as JSON for Bokeh.embed.embed_item, for every stage that has run. A scorer's figure is named rl_score_<scorer>."""
    drawn: dict[str, figure | None] = {}
    if inputs.lengths is not None:
        drawn |= token_lengths(inputs.lengths)
    if inputs.sft_curves is not None:
        drawn |= {f"sft_{phase}": _sft(rows) for phase, rows in inputs.sft_curves.groupby("phase", sort=False)}
    if inputs.reward_curves is not None:
        drawn |= _reward(inputs.reward_curves)
    if inputs.policy_curves is not None:
        if inputs.method == "rl":
            start = "SFT" if start_name(inputs.params) == SFT else "given model"
            drawn |= _rl(inputs.policy_curves, need(inputs.params, "rl"), limit=logprob_limit(inputs.params), start=start)
        else:
            drawn |= _offline(inputs.policy_curves)
    if inputs.gate is not None:
        drawn["gate_accuracy"] = beside = accuracies(inputs.gate)  # with a row for each slice
        drawn["gate_reliability"] = reliability(need(inputs.gate, "calibration"), height=beside.height if beside else HEIGHT)
        drawn["gate_external"] = external(inputs.gate)
    if inputs.heldout is not None:
        drawn["gate_scores"] = score_histogram(inputs.heldout[inputs.heldout["split"] == "test"])
    return as_items(drawn)


def as_items(drawn: Mapping[str, figure | None]) -> Figures:
    return {name: json_item(plot) for name, plot in drawn.items() if plot is not None}


def _sft(rows: pd.DataFrame) -> figure:
    lines = [Line("loss", "training", BLUE), Line("heldout_loss", "held out", ORANGE, dots=True)]
    plot = curves(rows, lines, y_title="loss, nats per token", y_axis_type="log")
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
        "reward_loss": curves(rows, loss, y_title="loss, nats per pair"),
        "reward_accuracy": curves(rows, accuracy, y_title="pairs in the right order", percent=True),
    }


def _offline(rows: pd.DataFrame) -> dict[str, figure]:
    """Figures of training without RL, as far as the method measures them."""
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
            figures[name] = curves(rows, measured, y_title=y_title, percent=percent)
    return figures


def _rl(rows: pd.DataFrame, rl: Mapping[str, Any], *, limit: float | None, start: str) -> dict[str, figure]:
    """Figures of an RL run.

    Args:
        rl: the section of params.yaml. limit: see `logprob_limit`. start: what the page calls the reference.
    """
    figures = {
        "rl_length": curves(rows, [Line("response_length", "length", TEAL)], y_title="tokens per response"),
        "rl_truncated": curves(rows, [Line("truncated_fraction", "truncated", ORANGE)], y_title="share of responses", percent=True),
        "rl_entropy": curves(rows, [Line("entropy", "entropy", GREEN)], y_title="nats per token"),
        "rl_clip": curves(rows, [Line("clip_frac", "clipped", RED)], y_title="share of tokens", percent=True),
        "rl_approx_kl": curves(rows, [Line("approx_kl", "change", PURPLE)], y_title="nats per token"),
        "rl_logprobs": _logprobs(rows, limit),
        **_scorers(rows, [s["name"] for s in need(rl, "reward", "scorers")]),
        **_driving(rows),
        **_held_out(rows),
    }
    scored = rows["score_mean"].notna().any()
    if scored:
        figures["rl_score"] = curves(rows, _with_evaluation(rows, "score_mean", "eval_score"), y_title="score", band="score_std")
    if "distillation_loss" in rows and rows["distillation_loss"].notna().any():
        figures["rl_distillation"] = curves(rows, [Line("distillation_loss", "divergence", PURPLE)], y_title="nats per token")
    if need(rl, "kl", "coef") > 0:  # otherwise it wasn't measured
        figures["rl_kl"] = curves(rows, [Line("kl_mean", f"KL to {start}", PURPLE)], y_title="nats per response")
    if need(rl, "kl", "coef") > 0 and scored:
        figures["rl_frontier"] = canvas("score", x_title=f"KL to {start}, nats per response")
        add_frontier(figures["rl_frontier"], rows, PURPLE)
    if "explained_variance" in rows and rows["explained_variance"].notna().any():
        figures["rl_critic"] = curves(rows, [Line("explained_variance", "explained", TEAL)], y_title="share of the returns' variance")
    if "repetition" in rows and rows["repetition"].notna().any():
        figures["rl_text"] = curves(rows, _TEXT_LINES, y_title="share", percent=True)
    return figures


def _scorers(rows: pd.DataFrame, names: Sequence[str]) -> dict[str, figure]:
    """Figures of each scorer's raw scores; a single scorer with a weight is already shown by the score."""
    if len(names) == 1 and rows["score_mean"].notna().any():
        return {}
    return {f"rl_score_{name}": curves(rows, _with_evaluation(rows, f"score_{name}", f"eval_{name}"), y_title="score") for name in names}


def _driving(rows: pd.DataFrame) -> dict[str, figure]:
    """Figures of each scorer's share of the advantages' variance, and of the scorers' correlations."""
    figures = {}
    for kind, y_title, percent in (("share", "share of the variance", True), ("correlation", "correlation", False)):
        found = [column for column in rows if column.startswith(f"{kind}_") and rows[column].notna().any()]
        colors = cycle((BLUE, ORANGE, GREEN, PURPLE, TEAL, RED))
        lines = [
            Line(c, c.removeprefix(f"{kind}_").replace("_", " ").replace(".", ", "), color) for c, color in zip(found, colors, strict=False)
        ]
        if lines:
            figures[f"rl_{kind}s"] = curves(rows, lines, y_title=y_title, percent=percent)
    return figures


def _held_out(rows: pd.DataFrame) -> dict[str, figure]:
    """Figures of the evaluations' pass@k, and of their scores by data source."""
    named = {"rl_pass": ("eval_pass_", "share of prompts or samples", True), "rl_sources": ("eval_score.", "score", False)}
    figures = {}
    for name, (prefix, y_title, percent) in named.items():
        columns = [c for c in rows if c.startswith(prefix) and not re.search(r"_(low|high)(\.|$)", c) and rows[c].notna().any()]
        colors = cycle((BLUE, ORANGE, GREEN, PURPLE, TEAL, RED))
        lines = [Line(c, _named(c), color, dots=True) for c, color in zip(columns, colors, strict=False)]
        if lines:
            figures[name] = curves(rows, lines, y_title=y_title, percent=percent)
    return figures


def _named(column: str) -> str:
    """`pass@4, math` of `eval_pass_4.math`."""
    figure, _, source = column.removeprefix("eval_").partition(".")
    return ", ".join(filter(None, (figure.replace("pass_", "pass@"), source)))


def _with_evaluation(rows: pd.DataFrame, column: str, evaluated: str) -> list[Line]:
    """Return a curve of batch means, and dots for the evaluations on validation prompts during training."""
    lines = [Line(column, "training", BLUE)]
    if evaluated in rows and rows[evaluated].notna().any():
        lines.append(Line(evaluated, "validation, greedy", ORANGE, dots=True))
    return lines


def logprob_limit(params: Mapping[str, Any]) -> float | None:
    """Limit of the largest log-probability difference between engine and trainer; None in bfloat16, which has other limits."""
    return None if need(params, "model", "dtype") == "bfloat16" else need(params, "rl", "rollout", "max_logprob_difference")


def _logprobs(rows: pd.DataFrame, limit: float | None) -> figure:
    """Figure of log-probability differences on a logarithmic axis, without steps whose difference is 0."""
    positive = rows[["step", "logprob_difference"]].where(rows["logprob_difference"] > 0).dropna()
    plot = curves(positive, [Line("logprob_difference", "largest difference", BLUE)], y_title="nats", y_axis_type="log")
    limits = [] if limit is None else [limit]
    for place in limits:
        plot.add_layout(Span(location=place, dimension="width", line_color=RED, line_dash="dashed", line_width=1.5))
    values = [*positive["logprob_difference"], *limits] or [1e-6]
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    plot.y_range = Range1d(10.0**first, 10.0 ** (last + 0.2))
    plot.yaxis.ticker = [10.0**e for e in range(first, last + 1)]
    return plot
