"""Rows of the tasks of lm-evaluation-harness, for the report and for a model's card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.statistics.intervals import holm

DIRECTIONS = {True: "↑", False: "↓", None: ""}


def harness_rows(evaluation: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a row per figure of each task, in the harness's order; none without tasks.

    A difference has a tone if it is significant after Holm's correction for all differences with an interval and a better direction.
    """
    if (harness := evaluation.get("harness")) is None:
        return []
    rows = [_row(name, task, key, figure) for name, task in harness["tasks"].items() for key, figure in task["figures"].items()]
    tested = [row for row in rows if row["p_value"] is not None and row["higher_is_better"] is not None]
    for row, p_value in zip(tested, holm([row["p_value"] for row in tested]), strict=True):
        if p_value < 1 - harness["confidence"]:
            row["tone"] = "good" if (row["change"] > 0) == row["higher_is_better"] else "bad"
    return rows


def _row(name: str, task: Mapping[str, Any], key: str, figure: Mapping[str, Any]) -> dict[str, Any]:
    metric, _, kept = key.partition(",")
    interval = {end: figure["difference"][end] for end in ("low", "high", "p_value")}
    return {
        "task": name,
        "metric": metric if kept == "none" else f"{metric}, {kept}",
        "direction": DIRECTIONS[figure["higher_is_better"]],
        "higher_is_better": figure["higher_is_better"],
        "num_fewshot": task["num_fewshot"],
        "n": task["n"],
        "documents": task["documents"],
        "truncated": max(task["truncated"].values()),
        **{model: with_error(figure[model]) for model in ("sft", "policy")},
        "change": figure["difference"]["value"],
        **interval,
        "tone": "",
    }


def with_error(figure: Mapping[str, Any]) -> str:
    """A value with its standard error: `0.2345 ± 0.0123`."""
    value, error = figure["value"], figure["stderr"]
    return "–" if value is None else decimals(value) if error is None else f"{decimals(value)} ± {decimals(error)}"


def decimals(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"


def difference(row: Mapping[str, Any]) -> str:
    """A change with its interval, if it has one: `+0.0120 (−0.0030 to +0.0270)`."""

    def signed(value: float) -> str:
        return ("+" if value > 0 else "−" if value < 0 else "") + decimals(abs(value))

    if row["change"] is None:
        return "–"
    ends = "" if row["low"] is None or row["high"] is None else f" ({signed(row['low'])} to {signed(row['high'])})"
    return signed(row["change"]) + ends
