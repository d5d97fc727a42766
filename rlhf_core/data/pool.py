"""Which training prompts a round of iterative DPO takes: none comes again until all have been used."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np


def prompts_of_round(ids: Iterable[str], number: int, count: int, *, seed: int) -> list[str]:
    """The ids of a round's prompts: a piece of an endless sequence of passes over the pool, each pass in a seeded order of its own.

    Where a round spans two passes, the prompts that it has from the first come last in the second, so that no round has one twice.

    Args:
        ids: of the whole pool, in any order.
        number: of the round, from 1.
        count: prompts of every round, a larger one than the pool taken as the pool's size.
    Raises:
        ValueError: the pool is empty.
    """
    pool = sorted(set(ids))
    if not pool:
        raise ValueError("prompts: expected training prompts to sample for, got none; give a source the use prompt")
    count = min(count, len(pool))
    sequence: list[str] = []
    for turn in itertools.count():
        begun = set(sequence[len(sequence) // count * count :])
        order = [pool[i] for i in np.random.default_rng([seed, turn]).permutation(len(pool))]
        sequence += sorted(order, key=begun.__contains__)  # stable: False before True
        if len(sequence) >= number * count:
            return sequence[(number - 1) * count : number * count]
