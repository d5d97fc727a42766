"""Compares two runs, or configurations over seeds: rlhf compare A B [C ...], or python -m flows.compare_runs.

Each argument is a run's name (a folder of runs/), a folder, a branch, a tag or a commit. Two runs give a list of differences. Three or
more are grouped by configuration (runs that differ only in their seed) and compared over seeds. Both give an HTML page too.
Exit codes: 0 done, 2 a run is missing or has no results, or the runs can't be grouped.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tabulate import tabulate

from flows.chain.worktree import slug
from flows.runs.results import read_side
from rlhf_core.commands import GivenPath, Json, run_module
from rlhf_core.config import ConfigError
from rlhf_core.paths import REPORTS
from rlhf_core.process import exit_with
from rlhf_core.report.comparison import tables, trained
from rlhf_core.report.comparison_page import cards, render_comparison
from rlhf_core.report.differences import Difference, Results, figures_that_count, headline, outs_that_differ, params_that_differ, read_as
from rlhf_core.report.inputs import Side
from rlhf_core.report.several_page import render_several
from rlhf_core.report.texts import visible

MARK = "*"  # of a significant change
MAX_WIDTH = 48  # characters of a value in the terminal


def compare(first: str, second: str, /, *more: str, output: GivenPath | None = None, as_json: Json = False) -> int:
    """Print how runs differ and write it as a page: two runs, or configurations over seeds. Returns the exit code.

    Args:
        first: a run's name, a folder, or a branch, tag or commit.
        second: the second run; changes are shown from the first to it.
        more: further runs: all are then grouped by configuration and compared over seeds.
        output: the page; reports/compare-FIRST-SECOND-....html otherwise.
    """
    try:
        sides = [read_side(Path.cwd(), name) for name in (first, second, *more)]
        if more:
            if as_json:
                print(json.dumps([asdict(run) for run in trained([side.results for side in sides])], indent=1))
                return 0
            print(*(f"{warning}\n" for side in sides for warning in side.results.warnings), sep="", end="", file=sys.stderr)
            print(tables(trained([side.results for side in sides]), sides[0].results.params["evaluation"]["confidence"]), end="")
            _write(render_several(sides), output or REPORTS / f"compare-{slug('-'.join((first, second, *more)))}.html")
            return 0
    except (ConfigError, ValueError) as error:
        print(f"compare: {error}", file=sys.stderr)
        return 2
    one, other = sides
    if as_json:
        print(json.dumps(differences(one.results, other.results), indent=1))
        return 0
    print(summary(one, other))
    _write(render_comparison(one, other), output or REPORTS / f"compare-{slug(first)}-{slug(second)}.html")
    return 0


def _write(page: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8", newline="\n")
    print(f"Page: {path}")


def differences(one: Results, other: Results) -> dict[str, Any]:
    """Return what the page's tables show, for programs."""
    changes = {"params": params_that_differ(one.params, other.params), "outs": outs_that_differ(one, other)}
    return {
        "figures": [asdict(row) for row in figures_that_count(one, other)],
        **{what: [dict(zip(("key", "first", "second"), change, strict=True)) for change in found] for what, found in changes.items()},
    }


def summary(first: Side, second: Side) -> str:
    """Return the tables of the page as text."""
    one, other = first.results, second.results
    rows = figures_that_count(one, other)
    parts = [headline(one, other, rows)[1]]
    parts.append(tabulate([_row(r) for r in rows], ["", one.name, other.name, "change", "interval", "detectable"], disable_numparse=True))
    parts.append("\n".join(read_as(one, other, rows, mark=MARK)))
    parts.append(_changes("parameter", "No parameter differs.", params_that_differ(one.params, other.params), one, other))
    same = "No data and no model differs." if one.outs else "Neither run's dvc.lock names data or models."
    parts.append(_changes("md5 of", same, outs_that_differ(one, other), one, other))
    if first.samples is not None and second.samples is not None:
        parts.append(f"{len(cards(first, second))} answers shown on the page differ.")
    return visible("\n\n".join(parts), limit=None) + "\n"


def _changes(what: str, none: str, changes: list[tuple[str, str, str]], one: Results, other: Results) -> str:
    """Return a table of what differs, or the sentence `none`."""
    lines = [[key, *(_short(value) for value in values)] for key, *values in changes]
    return tabulate(lines, [what, one.name, other.name], disable_numparse=True) if lines else none


def _row(difference: Difference) -> tuple[str, ...]:
    first, second, change, *rest = difference.shown
    return difference.label, first, second, f"{change} {MARK}" if difference.tone else change, *rest


def _short(text: str) -> str:
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 1] + "…"


main = partial(run_module, "compare")

if __name__ == "__main__":
    exit_with(main)
