"""Stages that somebody names for a run: one to run again though nothing has changed, one to end after."""

from __future__ import annotations

import difflib
from pathlib import Path

from rlhf_core.config import ConfigError, shown


def check_chosen(order: list[str], *, force: str | None, until: str | None) -> None:
    """The stages that somebody named for a run, to be forced and to be the last, are stages, and the run comes to the forced one.

    Raises:
        ConfigError: otherwise; with the nearest stage.
    """
    for option, wanted in (("force", force), ("until", until)):
        if wanted is not None and wanted not in order:
            near = difflib.get_close_matches(wanted, order, n=1, cutoff=0.4)
            advice = f"write {near[0]}" if near else "take one of these"
            raise ConfigError(f"{option}: expected a stage, one of {', '.join(order)}, got {shown(wanted)}; {advice}")
    if force is not None and force not in stages_until(order, until):
        raise ConfigError(f"force: expected a stage up to {until}, where the run is to end, got {force}; choose another until, or none")


def stages_until(order: list[str], until: str | None) -> list[str]:
    """The stages up to that one, or all."""
    return order if until is None else order[: order.index(until) + 1]


def until_line(until: str, workspace: Path) -> str:
    return f"Ended after {until}, as asked for, in {workspace}; the same command without --until goes on from there"
