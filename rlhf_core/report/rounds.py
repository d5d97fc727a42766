"""The results of a series of rounds of iterative DPO as a table and a figure.

A row is a round's metrics/evaluate.json, with its metrics/sample.json under `samples`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tabulate import tabulate

from rlhf_core.report.texts import markdown_text

Row = dict[str, Any]
HEADS = (
    *("round", "from", "pairs", "judge", "greedy", "score", "win rate", "p", "level", "spent"),
    *("detectable", "KL", "KL, origin", "verdict"),
)


def table(rows: Sequence[Row]) -> str:
    """Markdown table of each round's results on the promotion split (sampled unless named greedy), and whether its policy was kept.

    p, level, spent: the comparison's p-value, the largest p-value that is accepted, and the error budget spent so far.
    detectable: the smallest advantage that is accepted with a probability of 80%.
    """
    lines = [
        (
            row["round"],
            row["before"],
            row["samples"]["pairs"],
            _change(row, "sampled", "judge_ok"),
            _change(row, "greedy", "judge_ok"),
            _change(row, "sampled", "score_mean"),
            _win_rate(row),
            *_test(row),
            *(_shown(row["kl"][name]) if row["trained"] else "" for name in ("before", "origin")),
            "accepted" if row["accepted"] else "not better" if row["trained"] else "refused",
        )
        for row in rows
    ]
    reasons = "".join(f"- Round {row['round']}: {markdown_text(row['reason'])}\n" for row in rows)
    return f"{tabulate(lines, HEADS, tablefmt='github', disable_numparse=True)}\n\n{reasons}"


def _change(row: Row, mode: str, key: str) -> str:
    if not row["trained"] or key not in row[mode]["after"]:
        return ""
    return f"{_shown(row[mode]['before'][key])} -> {_shown(row[mode]['after'][key])}"


def _shown(value: float | None) -> str:
    """value: None if it could not be measured, such as a mean without scores."""
    return "none" if value is None else f"{value:.2f}"


def _win_rate(row: Row) -> str:
    if not row["trained"]:
        return ""
    rate = row["win_rate"]["sampled"]
    if rate["value"] is None:  # no prompt has both scores
        return "none"
    return f"{rate['value']:.3f} ({rate['low']:.3f} to {rate['high']:.3f})"


def _test(row: Row) -> tuple[str, str, str, str]:
    if not row["trained"]:
        return "", "", "", ""
    test = row["promotion"]
    gain = test["smallest_gain"]
    p_value = f"{test['p_value']:.2g}" if test["p_value"] else "below 1e-6"  # the file has six decimals
    return p_value, f"{test['level']:.2g}", f"{test['spent']:.2g}", "" if gain is None else f"{gain:.3f}"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw judge (if there is one), score, win rate and KL by round into an SVG file.

    Raises:
        ModuleNotFoundError: matplotlib isn't installed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    trained = [row for row in rows if row["trained"]]
    panels = [
        ("score", _draw_both("score_mean")),
        ("win rate over the previous policy", _draw_win_rate),
        ("KL, nats per response", _draw_kl),
    ]
    if any("judge_ok" in row["sampled"]["after"] for row in trained):
        panels.insert(0, ("judge accepts", _draw_both("judge_ok")))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.0), squeeze=False)
    for axis, (title, draw_panel) in zip(axes[0], panels, strict=True):
        draw_panel(axis, trained)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("round")
        axis.set_xticks([0, *(row["round"] for row in rows)])
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    figure.tight_layout()
    with matplotlib.rc_context({"svg.hashsalt": "rounds"}):  # the same figure, the same bytes
        figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _kept(rows: Sequence[Row], mode: str, key: str) -> tuple[list[int], list[float]]:
    """Return a figure of the current policy by round: of the initial policy, then of each accepted one."""
    kept = [row for row in rows if row["accepted"]]
    start = [(0, rows[0][mode]["before"][key])] if rows else []
    points = [*start, *((row["round"], row[mode]["after"][key]) for row in kept)]
    return [round_ for round_, _ in points], [_number(value) for _, value in points]


def _number(value: float | None) -> float:
    """Return the number, or NaN for None, which matplotlib doesn't draw."""
    return math.nan if value is None else value


def _curve(axis, rows: Sequence[Row], mode: str, key: str, label: str, color: str) -> None:
    """Draw a line through accepted policies, and a cross for each rejected one."""
    axis.plot(*_kept(rows, mode, key), marker="o", markersize=4, color=color, label=label)
    refused = [row for row in rows if not row["accepted"]]
    axis.plot([r["round"] for r in refused], [_number(r[mode]["after"][key]) for r in refused], linestyle="", marker="x", color=color)


def _draw_both(key: str) -> Callable[[Any, Sequence[Row]], None]:
    def panel(axis, rows: Sequence[Row]) -> None:
        _curve(axis, rows, "sampled", key, "sampled", "tab:blue")
        _curve(axis, rows, "greedy", key, "greedy", "tab:orange")

    return panel


def _draw_win_rate(axis, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["win_rate"]["sampled"]["value"] is not None]
    rates = [row["win_rate"]["sampled"] for row in rows]
    below, above = [r["value"] - r["low"] for r in rates], [r["high"] - r["value"] for r in rates]
    axis.errorbar([row["round"] for row in rows], [r["value"] for r in rates], yerr=[below, above], fmt="o", capsize=3, color="tab:blue")
    axis.axhline(0.5, color="black", linewidth=0.8, linestyle="--")


def _draw_kl(axis, rows: Sequence[Row]) -> None:
    for name, label, color in (("origin", "from the first policy", "tab:blue"), ("before", "from the round's policy", "tab:orange")):
        values = [_number(row["kl"][name]) for row in rows]
        axis.plot([row["round"] for row in rows], values, marker="o", markersize=4, color=color, label=label)
