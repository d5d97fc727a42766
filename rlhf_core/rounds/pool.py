"""Which training prompts a round of iterative DPO takes (none comes again until all have been used), and which it is compared on."""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable

import numpy as np

from rlhf_core.config import PromotionConfig
from rlhf_core.data.hashing import conversation_text


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


def distinct_prompts(rows: list[dict]) -> list[dict]:
    """The first row of each conversation: an answer that is asked for twice is no second observation."""
    first: dict[str, dict] = {}
    for row in rows:
        first.setdefault(conversation_text(row["messages"]), row)
    return list(first.values())


def check_promotion_rows(rows: list[dict], config: PromotionConfig, *, judged: Container[str]) -> None:
    """Policies can be compared on the promotion split, as far as its rows tell; which prompts are too long only a tokenizer knows.

    Args:
        rows: of the use prompt, of the promotion split.
        judged: names of the data sources that have a judge.
    Raises:
        ValueError: there are fewer different prompts than are asked for, or the judge decides and a prompt has none.
    """
    if (found := len(distinct_prompts(rows))) < config.prompts:
        raise ValueError(
            f"iterative.promotion.prompts: expected at most the {found} different prompts of the promotion split, got {config.prompts}; "
            "lower it, or raise data.promotion_fraction, in another series if this one has rounds"
        )
    without = sorted({row["source"] for row in rows} - {row["source"] for row in rows if row["source"] in judged})
    if config.metric == "judge" and without:
        raise ValueError(
            f"iterative.promotion.metric: expected a judge for every source of the promotion split, got none for {without}; set win_rate, "
            "or give them a rule as `judge`, in another series if this one has rounds"
        )
