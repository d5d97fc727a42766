"""The simulated table of intervals on few replications: every share is what it should be, give or take chance."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rlhf_core.statistics.intervals import wilson_interval
from tools.simulate.intervals import CONFIDENCE, cells, contains, simulate
from tools.simulate.rows import Row

REPLICATIONS = 160


def slack(share: float, n: int) -> float:
    """3.5 standard errors: one of these rows is further away by accident once in a hundred such tables."""
    return 3.5 * math.sqrt(share * (1 - share) / n)


def is_as_wanted(row: Row) -> bool:
    if row.wanted == "high":
        return row.share > 0.3  # unpaired they were found with 0.4% and 3%
    if row.wanted.startswith("at most"):
        return row.share <= 0.05 + slack(0.05, row.n)
    return row.share >= float(row.wanted) - slack(float(row.wanted), row.n)


@pytest.mark.long
def test_every_share_is_what_it_should_be():
    rows = simulate(REPLICATIONS, np.random.default_rng(3))
    assert len(rows) > 20 and [f"{row.case}: {row.share}" for row in rows if not is_as_wanted(row)] == []
    (no_winner,) = (row for row in rows if row.wanted == "0")
    assert no_winner.hits == 0


def test_an_interval_that_takes_the_number_of_ties_as_fixed_would_be_found_out():
    """Wilson's interval of the decided prompts, moved to the scale of all, on the first case of the table."""
    n, win, tie = 400, 237 / 400, 154 / 400
    found = []
    for wins, ties, _ in cells((win, tie), n, REPLICATIONS, np.random.default_rng(3)):
        low, high = (end * (n - ties) for end in wilson_interval(wins, n - ties, CONFIDENCE))
        found.append(contains(((ties / 2 + low) / n, (ties / 2 + high) / n), win + tie / 2))
    assert np.mean(found) < 0.95 - slack(0.95, REPLICATIONS)
