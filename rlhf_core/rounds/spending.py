"""The ledger of comparisons: how much of the error budget the rounds of all series have spent, by the model that they improve.

A new series has a new worktree, but often the same start. If it also had a new error budget, one of thirty such series would accept a
useless policy by chance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import model_validator

from rlhf_core.config import ConfigError, Params, PromotionConfig, Section
from rlhf_core.ledger import Ledger, now
from rlhf_core.rounds.pins import BudgetPin
from rlhf_core.rounds.promotion import next_budget

Outcome = Literal["accepted", "kept", "none"]  # none: the round made no comparison


class _Line(Section):
    """A line of the ledger: the start of a round's comparison with its budget, or how it ended.

    improves: result of `improved`. series: its name, which an earlier series may have had. at: ISO 8601.
    """

    improves: str
    series: str
    round: int
    at: str
    budget: BudgetPin | None = None
    outcome: Outcome | None = None

    @model_validator(mode="after")
    def _one(self) -> _Line:
        if (self.budget is None) == (self.outcome is None):
            raise ValueError("not one of budget and outcome")
        return self


LEDGER = Ledger("rlhf-round-comparisons.jsonl", "the flow iterative-dpo", _Line)


@dataclass(frozen=True)
class Comparison:
    """The comparison of a round.

    outcome: None while it isn't known.
    """

    improves: str
    series: str
    round: int
    budget: BudgetPin
    outcome: Outcome | None = None


@dataclass(frozen=True)
class Before:
    """What other series spent before a comparison: their names in order, and the sum of the levels that accepted nothing."""

    series: tuple[str, ...]
    spent: float


def improved(params: Params) -> str:
    """Return what a series improves: the model that `iterative.start` names, with its base model.

    A start that was trained again is another file, but the same thing to improve.
    """
    return f"{params.iterative.start} of {params.model.path or 'the built-in model'}"


def outcome_of(evaluated: dict[str, Any] | None) -> Outcome | None:
    """How a round's comparison ended.

    evaluated: its evaluate.json; None if there is none yet.
    """
    if evaluated is None:
        return None
    return "accepted" if evaluated["accepted"] else "kept" if evaluated.get("trained") else "none"


def record_rounds(series: str, improves: str, rounds: Sequence[tuple[int, BudgetPin, Outcome | None]], root: Path) -> None:
    """Append a series' comparisons and outcomes that the ledger lacks: those that ended since, or all in a clone.

    Args:
        rounds: number, pinned budget and outcome of each round.
    Raises:
        ConfigError: the ledger has another budget or outcome of a round, or can't be read or written.
    """
    with LEDGER.opened(root) as file:
        found = {(c.series, c.round): c for c in _comparisons(LEDGER.read(file))}  # the last of each name
        for number, budget, outcome in rounds:
            line = {"improves": improves, "series": series, "round": number, "at": now()}
            known = found.get((series, number))
            if known is None:
                LEDGER.append(file, _Line(**line, budget=budget))
            else:
                _compare(known, budget, outcome, file.name)
            if outcome is not None and (known is None or known.outcome is None):
                LEDGER.append(file, _Line(**line, outcome=outcome))


def check_rounds(series: str, rounds: Sequence[tuple[int, BudgetPin, Outcome | None]], root: Path) -> None:
    """Check a series' rounds (as for `record_rounds`) against the ledger.

    Raises:
        ConfigError: the ledger has no such round, another budget or another outcome, or can't be read.
    """
    with LEDGER.opened(root) as file:
        found = {(c.series, c.round): c for c in _comparisons(LEDGER.read(file))}
    for number, budget, outcome in rounds:
        if (known := found.get((series, number))) is None:
            raise ConfigError(
                f"round {number}: expected its comparison in this repository's {LEDGER.name}, got none; register it where the series ran"
            )
        _compare(known, budget, outcome, LEDGER.name)


def _compare(known: Comparison, budget: BudgetPin, outcome: Outcome | None, ledger: str) -> None:
    if known.budget != budget:
        raise _changed(known.round, f"the budget that its comparison began with, {_shown(known.budget)}", _shown(budget), ledger)
    if known.outcome not in (None, outcome):
        raise _changed(known.round, f"the outcome {known.outcome}, as when it ended", str(outcome), ledger)


def begin_comparison(series: str, number: int, improves: str, config: PromotionConfig, root: Path) -> tuple[BudgetPin, Before]:
    """Add a series' next comparison to the ledger, after all comparisons that improve the same model. Returns its budget.

    A comparison without an outcome counts as one that accepted nothing.

    Raises:
        ConfigError: nothing of the error budget is left, or the ledger can't be read or written.
    """
    with LEDGER.opened(root) as file:
        made = [c for c in _comparisons(LEDGER.read(file)) if c.improves == improves and c.outcome != "none"]
        last = None if not made else BudgetPin(comparison=len(made), level=made[-1].budget.level, spent=_spent(made[:-1]))
        accepted = bool(made) and made[-1].outcome == "accepted"
        budget = next_budget(last, accepted=accepted, error_budget=config.error_budget, rounds=config.rounds)
        others = [c for c in made if c.series != series]
        before = Before(tuple(dict.fromkeys(c.series for c in others)), _spent(others))
        if budget.level <= 0:
            names = ", ".join(dict.fromkeys(c.series for c in made))
            raise ConfigError(
                f"iterative.promotion.error_budget: expected more than the {budget.spent:.4g} that comparisons of {improves} have spent "
                f"(series {names}), got {config.error_budget:g}; raise it knowingly: it bounds the chance that any of these series ever "
                "accepts a policy that is no better"
            )
        LEDGER.append(file, _Line(improves=improves, series=series, round=number, at=now(), budget=budget))
    return budget, before


def _spent(comparisons: Sequence[Comparison]) -> float:
    return sum(c.budget.level for c in comparisons if c.outcome != "accepted")


def _comparisons(lines: Sequence[_Line]) -> list[Comparison]:
    """Return the ledger's comparisons in the order in which they began, each with its last outcome."""
    found: list[Comparison] = []
    at: dict[tuple[str, int], int] = {}
    for line in lines:
        if line.budget is not None:
            at[line.series, line.round] = len(found)
            found.append(Comparison(line.improves, line.series, line.round, line.budget))
        elif (i := at.get((line.series, line.round))) is not None:
            found[i] = replace(found[i], outcome=line.outcome)
    return found


def _shown(budget: BudgetPin) -> str:
    return f"comparison {budget.comparison} at level {budget.level:.4g}"


def _changed(number: int, expected: str, got: str, ledger: str) -> ConfigError:
    return ConfigError(
        f"round {number}: expected {expected} (in {ledger}), got {got}; rounds.yaml or a verdict has changed since: restore both with git, "
        "or begin another series"
    )
