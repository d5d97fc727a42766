"""Simulates how often a nightly series of rounds accepts a policy that is no better, and how large a gain it finds."""

from __future__ import annotations

import numpy as np
from scipy.special import ndtri

from rlhf_core.rounds.promotion import next_budget
from rlhf_core.statistics.exact_test import p_value
from tools.simulate.rows import Row

ERROR_BUDGET, HORIZON = 0.05, 30  # the defaults of iterative.promotion
NIGHTS = 30
GAINS = (0.02, 0.04, 0.08)  # of win rate over the previous policy
PROMPTS = (1000, 4000)


def simulate(replications: int, rng: np.random.Generator) -> list[Row]:
    rows = []
    for n in PROMPTS:
        for decided in (1.0, 0.5):
            accepted = series(np.zeros(HORIZON), n, decided, replications, rng)
            rows.append(_row(f"30 rounds without gain, {_prompts(n, decided)}: any accepted", "at most 0.05", accepted.any(1)))
    accepted = series(np.zeros(365), 1000, 0.5, replications, rng)
    rows.append(_row(f"365 rounds without gain, {_prompts(1000, 0.5)}: any accepted", "at most 0.05", accepted.any(1)))
    alike = judged(*draw_alike(HORIZON, 1000, replications, rng), 1000)
    rows.append(
        _row(
            "30 rounds without gain on the same 1,000 prompts, on which all new policies differ alike: any accepted",
            "at most 0.05",
            alike.any(1),
        )
    )
    accepted = series(np.where(np.arange(HORIZON) < 5, 0.12, 0.0), 1000, 0.5, replications, rng)
    rows.append(
        _row(
            f"25 rounds without gain after 5 that gain 12 points, {_prompts(1000, 0.5)}: any accepted",
            "at most 0.05",
            accepted[:, 5:].any(1),
        )
    )
    alone = intervals(HORIZON, 1000, 0.5, replications, rng)
    rows.append(
        _row(f"30 rounds without gain, each by a 95% interval of its own, {_prompts(1000, 0.5)}: any accepted", "not in use", alone.any(1))
    )
    for gain in GAINS:
        for n in PROMPTS:
            for decided in (1.0, 0.5):
                accepted = series(np.full(HORIZON, gain), n, decided, replications, rng)
                case = f"a gain of {100 * gain:.0f} points in each round, {_prompts(n, decided)}"
                rows.append(_row(f"{case}: the first accepted", "power", accepted[:, 0]))
                rows.append(_row(f"{case}: any of 30 accepted", "power", accepted.any(1)))
    for rounds in (1, 5):
        ahead, behind = draw(np.zeros(NIGHTS), 1000, 0.5, replications, rng)
        each = judged(ahead.reshape(-1, 1), behind.reshape(-1, 1), 1000, rounds=rounds).reshape(replications, NIGHTS)
        case = f"{NIGHTS} series of one round without gain, iterative.promotion.rounds {rounds}, {_prompts(1000, 0.5)}"
        rows.append(_row(f"{case}, each with a budget of its own: any accepted", "not in use", each.any(1)))
        rows.append(_row(f"{case}, one budget: any accepted", "at most 0.05", judged(ahead, behind, 1000, rounds=rounds).any(1)))
    return rows


def series(gains: np.ndarray, n: int, decided: float, replications: int, rng: np.random.Generator) -> np.ndarray:
    """Return which rounds accept, [replications, rounds] bool, as evaluate_round decides, with a true gain in win rate for each round.

    Args:
        decided: chance that a prompt is no tie.
    """
    return judged(*draw(gains, n, decided, replications, rng), n)


def judged(ahead: np.ndarray, behind: np.ndarray, n: int, *, rounds: int = HORIZON) -> np.ndarray:
    """Return which rounds accept, for [replications, rounds] numbers of prompts, with `rounds` as iterative.promotion.rounds."""
    accepted = np.zeros(ahead.shape, dtype=bool)
    for i in range(len(ahead)):
        budget = next_budget(None, accepted=False, error_budget=ERROR_BUDGET, rounds=rounds)
        for t in range(ahead.shape[1]):
            accepted[i, t] = p_value(int(ahead[i, t]), int(behind[i, t]), n) <= budget.level
            budget = next_budget(budget, accepted=bool(accepted[i, t]), error_budget=ERROR_BUDGET, rounds=rounds)
    return accepted


def intervals(rounds: int, n: int, decided: float, replications: int, rng: np.random.Generator) -> np.ndarray:
    """Return which rounds accept if a round accepts when its own 95% interval of the win rate is above a half."""
    ahead, behind = draw(np.zeros(rounds), n, decided, replications, rng)
    return ahead - behind > ndtri(0.975) * np.sqrt(ahead + behind)


def draw(gains: np.ndarray, n: int, decided: float, replications: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of prompts with the new policy ahead and behind, [replications, rounds] each."""
    shape = (replications, len(gains))
    total = rng.binomial(n, decided, size=shape)
    ahead = rng.binomial(total, np.broadcast_to(0.5 + gains / decided, shape))
    return ahead, total - ahead


def draw_alike(rounds: int, n: int, replications: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of prompts as by `draw`, without ties; each prompt's probability of a lead is uniform between 0 and 1."""
    ahead = np.stack([(rng.random((rounds, n)) < rng.random(n)).sum(1) for _ in range(replications)])
    return ahead, n - ahead


def _prompts(n: int, decided: float) -> str:
    return f"{n:,} prompts, {'none' if decided == 1 else 'half'} tied"


def _row(case: str, wanted: str, hits: np.ndarray) -> Row:
    return Row(case, wanted, int(hits.sum()), len(hits))
