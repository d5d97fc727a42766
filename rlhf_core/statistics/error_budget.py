"""The budget of false acceptances of a series of rounds, and how it is spread over the series' comparisons.

`error_budget` is the chance that a series ever accepts a policy that is no better than the one before. Comparison i may accept at a p-value
of at most its level:

    level_i = error_budget * share_i + (level_{i-1} where comparison i-1 accepted, otherwise 0)
    share_i = 0.8 / T for i <= T,  0.2 * T / ((i - 1) i) for i > T,  T = iterative.promotion.rounds;  all shares together are 1

Source: Online Fallback of Tian and Ramdas 2021, https://arxiv.org/abs/1910.04900, with shares of our own. docs/statistics.md has the reason
why it holds for rounds, and simulations.
"""

from __future__ import annotations

from rlhf_core.rounds.pins import BudgetPin

WITHIN_HORIZON = 0.8  # of the budget, spread evenly over the first `rounds` comparisons


def share(comparison: int, rounds: int) -> float:
    """Of the budget, for the comparison with that number, from 1."""
    if comparison <= rounds:
        return WITHIN_HORIZON / rounds
    return (1 - WITHIN_HORIZON) * rounds / (comparison * (comparison - 1))


def next_budget(before: BudgetPin | None, *, accepted: bool, error_budget: float, rounds: int) -> BudgetPin:
    """What the next comparison may spend.

    Args:
        before: of the series' last comparison; None: there was none. A round whose data was refused compared nothing.
        accepted: whether that one accepted its policy: its level then goes on to the next.
    """
    if before is None:
        return BudgetPin(comparison=1, level=error_budget * share(1, rounds), spent=0.0)
    number = before.comparison + 1
    carried = before.level if accepted else 0.0
    return BudgetPin(comparison=number, level=error_budget * share(number, rounds) + carried, spent=spent_after(before, accepted=accepted))


def spent_after(budget: BudgetPin, *, accepted: bool) -> float:
    """Of the error budget when a comparison is done: the levels of all that accepted nothing."""
    return budget.spent if accepted else budget.spent + budget.level
