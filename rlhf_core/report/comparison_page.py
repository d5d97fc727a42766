"""Two runs as one HTML page: their differences, figures side by side, curves overlaid, and answers that changed."""

from __future__ import annotations

import pandas as pd
from bokeh.plotting import figure

from rlhf_core.report.canvas import Line, add_frontier, canvas, curves, place_legend
from rlhf_core.report.colors import BLUE, ORANGE
from rlhf_core.report.differences import (
    figures_that_count,
    headline,
    outs_that_differ,
    params_that_differ,
    read_as,
    same_rewards,
    samples_that_differ,
)
from rlhf_core.report.figures import as_items
from rlhf_core.report.inputs import Side
from rlhf_core.report.page import page
from rlhf_core.report.tables import answer, shown_previews, side_by_side
from rlhf_core.report.verdict import MODES

MAX_SAMPLES = 200

# Stage, phase (None: all), column, title, axis, percent.
OVERLAID = (
    ("train_sft", "pretrain", "loss", "Pretraining", "loss, nats per token", False),
    ("train_sft", "sft", "loss", "Demonstrations", "loss, nats per token", False),
    ("train_reward", None, "loss", "Reward model: loss", "nats per pair", False),
    ("train_reward", None, "accuracy", "Reward model: accuracy", "pairs in the right order", True),
    ("train_policy", None, "score_mean", "RL: score", "score", False),
    ("train_policy", None, "score_judge", "RL: judge", "share of responses", True),
    ("train_policy", None, "kl_mean", "RL: KL to the reference model", "nats per response", False),
    ("train_policy", None, "response_length", "RL: response length", "tokens", False),
    ("train_policy", None, "entropy", "RL: entropy", "nats per token", False),
    ("train_policy", None, "loss", "Alignment: loss", "nats", False),
    ("train_policy", None, "reward_accuracy", "Alignment: accuracy", "pairs in the right order", True),
    ("train_policy", None, "reward_margin", "Alignment: margin", "nats times beta", False),
)


def render_comparison(first: Side, second: Side) -> str:
    """Return the HTML page that compares two runs."""
    one, other = first.results, second.results
    rows = figures_that_count(one, other)
    tone, sentence = headline(one, other, rows)
    drawn = {
        key(stage, phase, column): _both(first, second, stage, phase, column, y_title, percent)
        for stage, phase, column, _, y_title, percent in OVERLAID
    } | {"frontier": _frontier(first, second)}
    titles = {key(stage, phase, column): title for stage, phase, column, title, _, _ in OVERLAID} | {"frontier": "RL: score against KL"}
    content = {
        "title": f"{one.name} and {other.name}",
        "names": (one.name, other.name),
        "tone": tone,
        "sentence": sentence,
        "rows": rows,
        "read_as": read_as(one, other, rows),
        "params": params_that_differ(one.params, other.params),
        "outs": outs_that_differ(one, other),
        "same_outs": bool(one.outs) and one.outs == other.outs,
        "comparable": same_rewards(one, other),
        "plots": [(name, titles[name]) for name, plot in drawn.items() if plot is not None],
        "times": [(stage, first.times.get(stage), second.times.get(stage)) for stage in {**first.times, **second.times}],
        "samples": cards(first, second),
        "without_samples": [side.results.name for side in (first, second) if side.samples is None],
        "judged": any(side.samples is not None and side.samples["policy_judge_ok"].notna().any() for side in (first, second)),
        "modes": MODES,
    }
    return page("comparison.html.jinja", as_items(drawn), content)


def key(stage: str, phase: str | None, column: str) -> str:
    """The name of a figure of a stage's column."""
    return "_".join(filter(None, (stage, phase, column)))


def _both(first: Side, second: Side, stage: str, phase: str | None, column: str, y_title: str, percent: bool) -> figure | None:
    """Return a column of both runs in one figure; None if neither run measured it."""
    parts, lines = [], []
    for key, side, color in (("first", first, BLUE), ("second", second, ORANGE)):
        rows = side.curves.get(stage)
        if rows is None or column not in rows or not rows[column].notna().any():
            continue
        rows = rows if phase is None else rows[rows["phase"] == phase]
        if not rows.empty:
            parts.append(rows[["step", column]].rename(columns={column: key}))
            lines.append(Line(key, side.results.name, color))
    if not lines:
        return None
    return curves(pd.concat(parts, ignore_index=True), lines, y_title=y_title, percent=percent)


def _frontier(first: Side, second: Side) -> figure | None:
    """Figure of both runs' scores against KL; None if their rewards differ."""
    sides = [(s, c) for s, c in ((first, BLUE), (second, ORANGE)) if {"kl_mean", "score_mean"} <= set(s.curves.get("train_policy", ()))]
    if len(sides) < 2 or not same_rewards(first.results, second.results):
        return None
    plot = canvas("score", x_title="KL to SFT, nats per response")
    for side, color in sides:
        add_frontier(plot, side.curves["train_policy"], color, side.results.name)
    place_legend(plot)
    return plot


def cards(first: Side, second: Side) -> list[dict]:
    """Answers that differ, the largest changes in score first; without scores if the rewards differ."""
    if first.samples is None or second.samples is None:
        return []
    scored = same_rewards(first.results, second.results)
    made = []
    for row in samples_that_differ(first.samples, second.samples).to_dict("records"):
        answers = [
            answer(name, row[f"policy_response_{end}"], row[f"policy_score_{end}"] if scored else None, row[f"policy_judge_ok_{end}"])
            for end, name in (("first", first.results.name), ("second", second.results.name))
        ]
        made.append({k: row[k] for k in ("id", "source", "prompt", "mode")} | {"pictures": shown_previews(row)} | side_by_side(*answers))
    return sorted(made, key=lambda card: (0.0 if card["gain"] is None else -abs(card["gain"]), card["changed"] == ""))[:MAX_SAMPLES]
