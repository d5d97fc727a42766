"""Which prompts a round takes."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.rounds.data import prompts_of_round


@given(pool=st.integers(1, 40), count=st.integers(1, 60), rounds=st.integers(1, 12), seed=st.integers(0, 3))
def test_no_prompt_comes_again_until_all_have_been_used(pool, count, rounds, seed):
    ids = [f"id{i}" for i in range(pool)]
    used: Counter[str] = Counter()
    for number in range(1, rounds + 1):
        taken = prompts_of_round(ids, number, count, seed=seed)
        assert len(taken) == len(set(taken)) == min(count, pool)
        for prompt in taken:  # one by one: a round may end one pass and begin the next
            assert used[prompt] == min(used[i] for i in ids)
            used[prompt] += 1


def test_the_order_is_the_seeds_and_not_the_files():
    ids = [f"id{i}" for i in range(30)]
    first = prompts_of_round(ids, 2, 8, seed=1)
    assert prompts_of_round(reversed(ids), 2, 8, seed=1) == first
    assert prompts_of_round(ids, 2, 8, seed=2) != first


def test_each_pass_has_an_order_of_its_own():
    ids = [f"id{i}" for i in range(30)]
    passes = [prompts_of_round(ids, number, 30, seed=0) for number in (1, 2)]
    assert sorted(passes[0]) == sorted(passes[1]) == sorted(ids) and passes[0] != passes[1]


def test_an_empty_pool_is_refused():
    with pytest.raises(ValueError, match="expected training prompts"):
        prompts_of_round([], 1, 4, seed=0)
