"""Which examples form a batch, and how a batch is cut: CORRECTNESS, resume (the data position) and token-mean loss."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.data.batching import (
    Part,
    batch_indices,
    deal_out,
    deal_out_groups,
    even_microbatches,
    microbatches,
    neighbour_microbatches,
    spread,
)


def stream(steps: range, **kwargs: int) -> list[int]:
    return [i for step in steps for i in batch_indices(step, **kwargs)]


@given(batch_size=st.integers(1, 13), num_examples=st.integers(1, 20), seed=st.integers(0, 2**31))
def test_every_example_comes_once_per_pass(batch_size: int, num_examples: int, seed: int):
    passes = 3
    steps = -(-passes * num_examples // batch_size)
    drawn = stream(range(steps), batch_size=batch_size, num_examples=num_examples, seed=seed)
    for k in range(passes):
        assert sorted(drawn[k * num_examples : (k + 1) * num_examples]) == list(range(num_examples))


def test_a_step_needs_nothing_from_the_steps_before_it():
    settings = {"batch_size": 7, "num_examples": 30, "seed": 5}
    assert stream(range(12), **settings)[7 * 8 :] == stream(range(8, 12), **settings)


def test_seed_and_pass_change_the_order():
    first, second = (batch_indices(k, batch_size=50, num_examples=50, seed=0) for k in range(2))
    other_seed = batch_indices(0, batch_size=50, num_examples=50, seed=1)
    assert len({tuple(first), tuple(second), tuple(other_seed), tuple(range(50))}) == 4


def test_no_examples_is_an_error_with_advice():
    with pytest.raises(ValueError, match="expected at least 1 example, got 0"):
        batch_indices(0, batch_size=4, num_examples=0, seed=0)


LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200))
def test_microbatches_hold_every_row_once_within_the_budget(lengths: list[int], max_tokens: int):
    parts = microbatches(lengths, max_tokens=max_tokens)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        padded = len(part) * max(lengths[i] for i in part)
        assert padded <= max_tokens or len(part) == 1


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200))
def test_microbatches_put_similar_lengths_together_longest_first(lengths: list[int], max_tokens: int):
    flat = [lengths[i] for part in microbatches(lengths, max_tokens=max_tokens) for i in part]
    assert flat == sorted(flat, reverse=True)


def test_microbatches_by_hand():
    # 9 + 9 padded <= 20; 5, 4, 4, 4 padded to 20; the last one is left over.
    assert microbatches([4, 9, 4, 5, 8, 4, 4], max_tokens=20) == [[1, 4], [3, 0, 2, 5], [6]]
    assert microbatches([30, 2], max_tokens=20) == [[0], [1]]
    assert microbatches([], max_tokens=20) == []


def test_microbatches_of_examples_with_several_rows_by_hand():
    # Longest rows 5, 4, 3: 2 * 5 + 1 * 5 = 15 fits into 20, 3 more rows would be 30; alone 3 * 3 = 9.
    assert microbatches([4, 5, 3], max_tokens=20, rows=[1, 2, 3]) == [[1, 0], [2]]


@given(lengths=LENGTHS, max_tokens=st.integers(1, 200), multiple=st.integers(1, 4))
def test_even_microbatches_are_microbatches_too(lengths: list[int], max_tokens: int, multiple: int):
    parts = even_microbatches(lengths, max_tokens=max_tokens, multiple=multiple)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    assert all(len(part) * max(lengths[i] for i in part) <= max_tokens or len(part) == 1 for part in parts)
    plain = microbatches(lengths, max_tokens=max_tokens)
    if multiple == 1:
        assert parts == plain
    if len(plain) > 1 and len(plain) % multiple == 0:
        assert len(parts) % multiple == 0


@given(
    sequences=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=60), max_size=40),
    max_tokens=st.integers(1, 200),
    multiple=st.integers(1, 3),
)
def test_neighbour_microbatches_fit_the_budget_and_are_in_order(sequences: list[list[int]], max_tokens: int, multiple: int):
    parts = neighbour_microbatches(sequences, max_tokens=max_tokens, multiple=multiple)
    flat = [i for part in parts for i in part]
    assert sorted(flat) == list(range(len(sequences))) and all(parts)
    assert [sequences[i] for i in flat] == sorted(sequences)
    assert all(sum(len(sequences[i]) for i in part) <= max_tokens or len(part) == 1 for part in parts)


def test_neighbour_microbatches_by_hand():
    # Two prompts, [1, ...] and [2, ...], with responses of 3 tokens in turn: 4 x 53 = 212 tokens fit into 300, and are too few to divide.
    sequences = [[number % 2, *[7] * 49, number, 8, 9] for number in range(4)]
    assert neighbour_microbatches(sequences, max_tokens=300, multiple=2) == [[0, 2, 1, 3]]
    assert neighbour_microbatches(sequences, max_tokens=106, multiple=1) == [[0, 2], [1, 3]]
    # 24 x 53 = 1272 tokens are worth dividing among two at a time.
    many = neighbour_microbatches([[number % 2, *[7] * 49, number, 8, 9] for number in range(24)], max_tokens=8192, multiple=2)
    assert many == [list(range(0, 24, 2)), list(range(1, 24, 2))]


def test_even_microbatches_by_hand():
    # 30 rows of 10 within 200 would be 20 and 10; for two at a time 15 each.
    assert [len(part) for part in even_microbatches([10] * 30, max_tokens=200, multiple=2)] == [15, 15]
    # Three become four; what fits into one stays together.
    assert [len(part) for part in even_microbatches([10] * 40, max_tokens=160, multiple=2)] == [10] * 4
    assert [len(part) for part in even_microbatches([10] * 8, max_tokens=90, multiple=2, rows=[2, 1, 1, 1, 1, 1, 1, 2])] == [4, 4]
    assert even_microbatches([7] * 4, max_tokens=200, multiple=2) == [[0, 1, 2, 3]]
    assert even_microbatches([5], max_tokens=200, multiple=2) == [[0]]
    assert even_microbatches([], max_tokens=200, multiple=2) == []


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    max_tokens=st.integers(1, 200),
    ranks=st.integers(1, 5),
)
def test_spread_gives_each_example_to_one_rank_and_each_rank_as_many_microbatches(lengths: list[int], max_tokens: int, ranks: int):
    shares = spread(lengths, max_tokens=max_tokens, ranks=ranks)
    assert len(shares) == ranks and len({len(parts) for parts in shares}) == 1
    counted = [i for parts in shares for part in parts if part.counts for i in part.positions]
    assert sorted(counted) == list(range(len(lengths)))
    for part in (part for parts in shares for part in parts):
        assert len(part.positions) * max(lengths[i] for i in part.positions) <= max_tokens or len(part.positions) == 1
    if ranks == 1:
        assert [part.positions for part in shares[0]] == microbatches(lengths, max_tokens=max_tokens)
    if len(lengths) >= ranks:  # a rank without examples would be idle
        assert all(any(part.counts for part in parts) for parts in shares)


def test_spread_balances_padded_tokens():
    """Three micro-batches of 40, 40 and 20 tokens; two ranks compute 50 each."""
    shares = spread([10] * 10, max_tokens=40, ranks=2)
    assert [sum(len(part.positions) for part in parts) for parts in shares] == [5, 5]


def test_spread_repeats_the_shortest_example_for_ranks_without_one():
    shares = spread([7, 3], max_tokens=100, ranks=4)
    assert shares == [[Part([0])], [Part([1])], [Part([1], counts=False)], [Part([1], counts=False)]]
    assert spread([], max_tokens=10, ranks=2) == [[], []]


def test_spread_counts_the_rows_of_an_example():
    """The first example has three rows of 5 tokens, as many as the other three together."""
    first, second = spread([5, 5, 5, 5], max_tokens=100, ranks=2, rows=[3, 1, 1, 1])
    assert sorted([i for part in parts for i in part.positions] for parts in (first, second)) == [[0], [1, 2, 3]]


@given(sizes=LENGTHS, ranks=st.integers(1, 5))
def test_ranks_are_dealt_each_item_once_equally_many_and_within_an_item_of_the_same_size(sizes: list[int], ranks: int):
    shares = deal_out(sizes, ranks=ranks)
    assert sorted(i for own in shares for i in own) == list(range(len(sizes)))
    assert all(own == sorted(own) for own in shares)
    counts, loads = [len(own) for own in shares], [sum(sizes[i] for i in own) for own in shares]
    assert max(counts) - min(counts) <= 1
    assert max(loads) - min(loads) <= max(sizes, default=0)


def test_groups_are_dealt_out_whole_or_item_by_item():
    # Of 3, 40, 4, 5, 6 and 6 tokens. As groups 43, 9 and 12: with three ranks one each; with two 40 + 5 + 3 and 6 + 6 + 4.
    sizes, groups = [3, 40, 4, 5, 6, 6], [[0, 1], [2, 3], [4, 5]]
    assert deal_out_groups(groups, sizes, ranks=3) == [[0, 1], [4, 5], [2, 3]]
    assert deal_out_groups(groups, sizes, ranks=2) == [[0, 1, 3], [2, 4, 5]]
    assert deal_out_groups(groups, sizes, ranks=1) == [[0, 1, 2, 3, 4, 5]]
