"""The error budget of a series of rounds: levels, what an accepted round passes on, and that no more than the budget is ever at stake."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.rounds.pins import BudgetPin
from rlhf_core.rounds.promotion import next_budget, share, spent_after


def series(accepted: list[bool], rounds: int = 30) -> list[BudgetPin]:
    found = [next_budget(None, accepted=False, error_budget=0.05, rounds=rounds)]
    for verdict in accepted:
        found.append(next_budget(found[-1], accepted=verdict, error_budget=0.05, rounds=rounds))
    return found


@pytest.mark.parametrize("rounds", [1, 2, 30, 365])
def test_the_shares_come_to_one_and_never_grow(rounds):
    shares = [share(i, rounds) for i in range(1, 20_000)]
    rest = 0.2 * rounds / (len(shares))  # of the endless tail: sum over i > m of T / (i (i - 1)) is T / m
    assert sum(shares) + rest == pytest.approx(1)
    assert all(a >= b > 0 for a, b in itertools.pairwise(shares))


def test_levels_are_even_within_the_horizon_and_fall_after_it():
    levels = [pin.level for pin in series([False] * 60)]
    assert levels[:30] == pytest.approx([0.04 / 30] * 30)  # 0.8 * 0.05 / 30
    assert levels[30] == pytest.approx(0.01 * 30 / (31 * 30)) and levels[59] == pytest.approx(0.01 * 30 / (60 * 59))


def test_an_accepted_rounds_level_is_added_to_the_next_only():
    even = 0.04 / 30
    assert [pin.level for pin in series([True, True, False, False])] == pytest.approx([even, 2 * even, 3 * even, even, even])


@given(st.lists(st.booleans(), max_size=100), st.integers(1, 50))
def test_what_is_spent_and_at_stake_is_never_more_than_the_budget(accepted, rounds):
    for pin, verdict in zip(series(accepted, rounds), [*accepted, False], strict=True):
        assert spent_after(pin, accepted=verdict) <= spent_after(pin, accepted=False) <= 0.05 * (1 + 1e-9)
