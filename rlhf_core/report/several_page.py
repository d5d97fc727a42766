"""Three or more runs as one HTML page: figures and curves of each configuration over its seeds, and all answers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle, pairwise

import numpy as np
import pandas as pd
from bokeh.models import ColumnDataSource, HoverTool, NumeralTickFormatter, Range1d
from bokeh.plotting import figure

from rlhf_core.report.canvas import canvas, place_legend
from rlhf_core.report.colors import BLUE, GREEN, ORANGE, PURPLE, RED, TEAL, thin
from rlhf_core.report.comparison import configurations, difference_table, means_table, note, trained
from rlhf_core.report.comparison_page import MAX_SAMPLES, OVERLAID, key
from rlhf_core.report.differences import params_that_differ, same_rewards
from rlhf_core.report.figures import as_items
from rlhf_core.report.inputs import Side
from rlhf_core.report.page import page
from rlhf_core.report.tables import answer, shown_previews
from rlhf_core.report.verdict import MODES
from rlhf_core.statistics.intervals import mean_interval

COLORS = (BLUE, ORANGE, GREEN, PURPLE, RED, TEAL)
DASHES = ("solid", "dashed", "dotdash")  # of the configurations behind the sixth, and the twelfth
Groups = dict[str, list[Side]]


def render_several(sides: Sequence[Side]) -> str:
    """Return the page.

    Raises:
        ValueError: the runs can't be grouped (`trained`).
    """
    runs = trained([side.results for side in sides])
    side_of = {id(side.results): side for side in sides}
    groups = {name: [side_of[id(r)] for r in group] for name, group in configurations([side.results for side in sides]).items()}
    confidence = sides[0].results.params["evaluation"]["confidence"]
    drawn = {
        key(stage, phase, column): _bands(groups, confidence, stage, phase, column, y_title, percent)
        for stage, phase, column, _, y_title, percent in OVERLAID
    }
    titles = {key(stage, phase, column): title for stage, phase, column, title, *_ in OVERLAID}
    first = next(iter(groups.values()))[0].results
    content = {
        "title": ", ".join(groups),
        "groups": {name: [side.results.name for side in group] for name, group in groups.items()},
        "runs": len(sides),
        "confidence": confidence,
        "means": means_table(runs, confidence),
        "differences": difference_table(runs, confidence),
        "note": note(runs, confidence),
        "warnings": [warning for side in sides for warning in side.results.warnings],
        "params": [
            ((first.name, group[0].results.name), changes)
            for group in list(groups.values())[1:]
            if (changes := params_that_differ(first.params, group[0].results.params))
        ],
        "plots": [(name, titles[name]) for name, plot in drawn.items() if plot is not None],
        "samples": answers(sides),
        "without_samples": [side.results.name for side in sides if side.samples is None],
        "modes": MODES,
    }
    return page("several.html.jinja", as_items(drawn), content)


def over_seeds(tables: Sequence[pd.DataFrame], column: str, confidence: float) -> pd.DataFrame:
    """The mean of a column at the steps that all tables have, and a band: the t interval of the mean, of two seeds their range.

    Returns:
        Columns step, mean, low, high, seeds; low and high are NaN with one seed.
    """
    wide = pd.concat([table.set_index("step")[column] for table in tables], axis=1, join="inner").dropna()
    values = thin(wide.reset_index()).to_numpy(dtype=float)
    rows = []
    for step, *of_step in values:
        low, high = (np.nan, np.nan) if len(of_step) < 2 else (min(of_step), max(of_step))
        if len(of_step) > 2:
            low, high = mean_interval(of_step, confidence)
        rows.append((step, float(np.mean(of_step)), low, high))
    return pd.DataFrame(rows, columns=["step", "mean", "low", "high"]).assign(seeds=len(tables))


def _bands(groups: Groups, confidence: float, stage: str, phase: str | None, column: str, y_title: str, percent: bool) -> figure | None:
    """A figure of each configuration's mean and band; None if no run measured the column."""
    curves = {}
    for name, group in groups.items():
        tables = [_rows(side, stage, phase, column) for side in group]
        if (measured := [table for table in tables if not table.empty]) and len(found := over_seeds(measured, column, confidence)):
            curves[name] = found
    if not curves:
        return None
    plot = canvas(y_title, x_title="step")
    plot.yaxis.ticker.desired_num_ticks = 5
    if percent:
        plot.yaxis.formatter = NumeralTickFormatter(format="0.[0]%")
    styles = [(color, dash) for dash in DASHES for color in COLORS]
    for (name, rows), (color, dash) in zip(curves.items(), cycle(styles), strict=False):
        _draw(plot, name, rows, color, dash, number="0.0%" if percent else "0.0000")
    plot.y_range = _range(curves)
    place_legend(plot)
    return plot


def _rows(side: Side, stage: str, phase: str | None, column: str) -> pd.DataFrame:
    rows = side.curves.get(stage)
    if rows is None or column not in rows:
        return pd.DataFrame()
    rows = rows if phase is None else rows[rows["phase"] == phase]
    return rows[["step", column]].dropna()


def _draw(plot: figure, name: str, rows: pd.DataFrame, color: str, dash: str, *, number: str) -> None:
    source = ColumnDataSource({column: rows[column].to_numpy() for column in ("step", "mean", "low", "high")})
    seeds = int(rows["seeds"].iloc[0])
    if seeds > 1:
        plot.varea(x="step", y1="low", y2="high", source=source, fill_color=color, fill_alpha=0.18)
    line = plot.line(
        "step", "mean", source=source, color=color, line_width=1.8, line_dash=dash, legend_label=f"{name}, {seeds} seed{'s' * (seeds > 1)}"
    )
    band = [("band", f"@low{{{number}}} to @high{{{number}}}")] * (seeds > 1)
    tooltips = [("step", "@step{0,0}"), (name, f"@mean{{{number}}}"), *band]
    plot.add_tools(HoverTool(renderers=[line], mode="vline", tooltips=tooltips))


def _range(curves: dict[str, pd.DataFrame]) -> Range1d:
    """A range around the means that wide bands of few seeds don't flatten."""
    means = np.concatenate([rows["mean"].to_numpy() for rows in curves.values()])
    edges = np.concatenate([means, *(rows[["low", "high"]].to_numpy().ravel() for rows in curves.values())])
    spread = float(means.max() - means.min()) or abs(float(means.max())) or 1.0
    low, high = max(np.nanmin(edges), means.min() - spread), min(np.nanmax(edges), means.max() + spread)
    room = 0.06 * (high - low or spread)
    return Range1d(float(low - room), float(high + room))


def answers(sides: Sequence[Side]) -> list[dict]:
    """One card a prompt and mode with the answers of all runs, the widest spread of scores first; scores only where rewards are equal."""
    if any(side.samples is None for side in sides):
        return []
    scored = all(same_rewards(one.results, other.results) for one, other in pairwise(sides))
    keys = ["id", "source", "prompt", "mode"]
    tables = [side.samples.drop_duplicates(keys).set_index(keys) for side in sides]
    common = [index for index in tables[0].index if all(index in table.index for table in tables[1:])]
    made = []
    for index in common:
        rows = [table.loc[index] for table in tables]
        shown = [
            answer(side.results.name, row["policy_response"], row["policy_score"] if scored else None, row["policy_judge_ok"])
            for side, row in zip(sides, rows, strict=True)
        ]
        if len({card["text"] for card in shown}) > 1:
            own = {"pictures": shown_previews(rows[0]), "answers": shown, "gain": None, "spread": _spread(shown), "changed": ""}
            made.append(dict(zip(keys, index, strict=True)) | own)
    return sorted(made, key=lambda card: -(card["spread"] or 0.0))[:MAX_SAMPLES]


def _spread(shown: list[dict]) -> float | None:
    scores = [card["score"] for card in shown if card["score"] is not None]
    return max(scores) - min(scores) if len(scores) > 1 else None
