"""Decides whether a round's policy replaces the one before it, and how much error budget the comparison may spend.

`error_budget` bounds the chance that any series that improves the same model (`rlhf_core.rounds.spending.improved`) ever accepts a policy
that is no better than the one before. Comparison i of all of them accepts at a p-value of at most its level:

    level_i = error_budget * share_i + (level_{i-1} if comparison i-1 accepted, otherwise 0)
    share_i = 0.8 / T for i <= T,  0.2 * T / ((i - 1) i) for i > T,  T = iterative.promotion.rounds;  the shares sum to 1

and at most 0.8 of what is left, since error_budget and T may differ from those of earlier series.

Source: Online Fallback of Tian and Ramdas 2021, https://arxiv.org/abs/1910.04900, with other shares. docs/statistics.md says why it holds
for rounds, and has simulations.
"""

from __future__ import annotations

import math
from typing import Any

from rlhf_core.config import PromotionConfig
from rlhf_core.paths import ROUNDS_FILE
from rlhf_core.rounds.pins import BudgetPin
from rlhf_core.statistics.exact_test import p_value, prompts_needed, smallest_gain
from rlhf_core.statistics.intervals import POWER

WITHIN_HORIZON = 0.8  # of the budget, spread evenly over the first `rounds` comparisons
SPLIT = "promotion"  # read by nothing but the promotion of rounds
DECIDES = "sampled"  # the mode in which the next round samples from the policy
MIN_DECIDED = 20  # prompts on which one policy is ahead; with fewer no policy is accepted
ROUNDING = 1e-9  # relative, of a sum of levels


def share(comparison: int, rounds: int) -> float:
    """Return the share of the error budget that the comparison with this number, from 1, may spend."""
    if comparison <= rounds:
        return WITHIN_HORIZON / rounds
    return (1 - WITHIN_HORIZON) * rounds / (comparison * (comparison - 1))


def next_budget(before: BudgetPin | None, *, accepted: bool, error_budget: float, rounds: int) -> BudgetPin:
    """Return the budget of the next comparison: its level by number, but at most 0.8 of what comparisons with other settings have left.

    Args:
        before: of the last comparison; None before the first. A round whose data was refused made no comparison.
        accepted: the last comparison accepted its policy, so that its level is added to the next.
    """
    if before is None:
        return BudgetPin(comparison=1, level=error_budget * share(1, rounds), spent=0.0)
    number = before.comparison + 1
    carried, spent = before.level if accepted else 0.0, spent_after(before, accepted=accepted)
    level = min(error_budget * share(number, rounds) + carried, WITHIN_HORIZON * (error_budget - spent))
    return BudgetPin(comparison=number, level=max(level, 0.0), spent=spent)


def spent_after(budget: BudgetPin, *, accepted: bool) -> float:
    """Return the part of the error budget that is spent after a comparison: the sum of the levels of comparisons that accepted nothing."""
    return budget.spent if accepted else budget.spent + budget.level


def check_budget(budget: BudgetPin, error_budget: float) -> None:
    """Refuse an entry of rounds.yaml that spends more than the error budget.

    Raises:
        ValueError: the entry or the params have changed since the round began.
    """
    if budget.spent + budget.level > error_budget * (1 + ROUNDING):
        raise ValueError(
            f"{ROUNDS_FILE}: expected at most what {budget.spent:.4g} spent leave of iterative.promotion.error_budget={error_budget:g}, "
            f"got a level of {budget.level:.4g}; restore both files with git"
        )


def verdict(metrics: dict[str, Any], config: PromotionConfig, budget: BudgetPin) -> dict[str, Any]:
    """Return whether the new policy is better by the configured statistic, at the level of this comparison, and why.

    Args:
        metrics: of `rlhf_core.rounds.comparison.compare`.
    """
    counts = comparisons(metrics, config.metric)
    decided, margin = counts["ahead"] + counts["behind"], config.min_advantage / counts["points"]
    p = p_value(counts["ahead"], counts["behind"], counts["n"], margin=margin)
    accepted = decided >= MIN_DECIDED and p <= budget.level
    gain = smallest_gain(decided, counts["n"], budget.level, margin=margin, power=POWER) if decided >= MIN_DECIDED else None
    promotion = {
        "split": SPLIT,
        **{key: counts[key] for key in ("ahead", "behind", "n")},
        "decided": decided,
        "p_value": p,
        "comparison": budget.comparison,
        "level": budget.level,
        "error_budget": config.error_budget,
        "spent": spent_after(budget, accepted=accepted),
        "smallest_gain": None if gain is None else gain * counts["points"],
        "power": POWER,
        "prompts_needed": None if accepted else _prompts_needed(counts, budget.level, margin),
    }
    reason = _reason(promotion, config, counts["advantage"]["value"], accepted=accepted)
    return {"accepted": accepted, "reason": reason, "metric": config.metric, "advantage": counts["advantage"], "promotion": promotion}


def _prompts_needed(counts: dict[str, Any], level: float, margin: float) -> int | None:
    """About how many prompts would detect the observed gain; None if no gain above the margin was observed."""
    n, decided = counts["n"], counts["ahead"] + counts["behind"]
    found = prompts_needed((counts["ahead"] - counts["behind"]) / n, decided / n, level, margin=margin, power=POWER) if n else None
    return None if found is None else max(found, n + 1, math.ceil(MIN_DECIDED * n / decided))


def comparisons(metrics: dict[str, Any], metric: str) -> dict[str, Any]:
    """Prompts on which the new policy is ahead and behind, its advantage with the interval, and what one prompt adds to the advantage."""
    if metric == "win_rate":
        rate = metrics["win_rate"][DECIDES]
        advantage = {key: rate[key] - 0.5 for key in ("value", "low", "high")}
        return {"ahead": rate["wins"], "behind": rate["losses"], "n": rate["n"], "advantage": advantage, "points": 0.5}
    found = metrics["judge_difference"][DECIDES]
    n = sum(found[key] for key in ("both", "first_only", "second_only", "neither"))
    advantage = {key: found[key] for key in ("value", "low", "high")}
    return {"ahead": found["first_only"], "behind": found["second_only"], "n": n, "advantage": advantage, "points": 1.0}


def _reason(promotion: dict[str, Any], config: PromotionConfig, advantage: float, *, accepted: bool) -> str:
    what = "win rate less a half" if config.metric == "win_rate" else "the judge's share less the one before"
    ahead, behind, needed = promotion["ahead"], promotion["behind"], promotion["prompts_needed"]
    found = f"{what}: {advantage:+.3f} on {promotion['n']} prompts of the split {SPLIT}, ahead on {ahead}, behind on {behind}"
    more = f"; about {needed} prompts would find a gain of this size with {POWER:.0%}" if needed else ""
    if promotion["decided"] < MIN_DECIDED:
        return f"{found}; too few decided comparisons, {promotion['decided']} of at least {MIN_DECIDED}{more}"
    relation = "is at most" if accepted else "is above"
    above = f' for "no more than iterative.promotion.min_advantage={config.min_advantage:g}"' if config.min_advantage else ""
    gain = promotion["smallest_gain"]
    power = "no outcome of so few would be accepted" if gain is None else f"a gain of {gain:.3f} would be found with {POWER:.0%} power"
    return (
        f"{found}; its p-value{above}, {promotion['p_value']:.2g}, {relation} the level {promotion['level']:.2g} of comparison "
        f"{promotion['comparison']}; spent of iterative.promotion.error_budget={config.error_budget:g}: {promotion['spent']:.2g}; "
        f"{power}{more}"
    )
