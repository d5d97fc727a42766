"""Data of a round of iterative DPO: its prompts, its pairs, and the checks of the promotion split. Needs no torch."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhf_core.config import Params, PromotionConfig
from rlhf_core.data.control import is_blank
from rlhf_core.data.hashing import distinct_prompts, with_ids
from rlhf_core.data.schema import Message
from rlhf_core.rounds.pins import Round, prompts_hash


def prompts_of_round(ids: Iterable[str], number: int, count: int, *, seed: int) -> list[str]:
    """Return the ids of a round's prompts: a slice of an endless sequence of passes over the pool, each pass in its own seeded order.

    No prompt comes again before all were used. Where a round spans two passes, the second pass has the round's earlier prompts last, so
    that no round has a prompt twice.

    Args:
        ids: of the whole pool, in any order.
        number: of the round, from 1.
        count: prompts of every round; at most the size of the pool.
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


def rows_of_round(rows: list[dict], entry: Round, number: int, params: Params) -> list[dict]:
    """Return the rows of a round's prompts, in its order.

    Args:
        rows: all training rows of the use prompt.
    Raises:
        ValueError: the prompts differ from those that the round began with.
    """
    by_id = {row["id"]: row for row in rows}
    ids = prompts_of_round(by_id, number, params.iterative.sampling.prompts, seed=params.seed)
    if prompts_hash(ids) != entry.prompts.sha256:
        raise ValueError(
            f"prompts: expected those that round {number} began with, sha256 {entry.prompts.sha256}, got {prompts_hash(ids)}; seed, "
            "iterative.sampling.prompts or data/prepared have changed: undo that, or begin another series"
        )
    return [by_id[i] for i in ids]


def check_promotion_rows(rows: list[dict], config: PromotionConfig, *, judged: Container[str]) -> None:
    """Check that policies can be compared on the promotion split. The length of prompts is checked with a tokenizer, later.

    Args:
        rows: of the use prompt, of the promotion split.
        judged: names of the data sources that have a judge.
    Raises:
        ValueError: there are fewer distinct prompts than iterative.promotion.prompts, or a source has no judge and the judge decides.
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


class Response(Protocol):
    """One sampled response.

    finished: the model ended it. score: not finite where the response was not scored.
    """

    text: str
    finished: bool
    score: float


@dataclass(frozen=True)
class Group:
    """A prompt of the use prompt (rlhf_core.data.schema) and its responses."""

    source: str
    messages: list[Message]
    responses: Sequence[Response]


@dataclass(frozen=True)
class Pairs:
    """Rows of the use preference and their origin.

    rows: in the order of the groups.
    chosen, rejected: per group the position of the response, or None where the group gave no pair.
    counts: number of pairs, and of groups without a pair by reason.
    """

    rows: list[dict]
    chosen: list[int | None]
    rejected: list[int | None]
    counts: dict[str, int]


def build_pairs(groups: Sequence[Group], *, min_margin: float) -> Pairs:
    """A pair of the best and the worst response of each group, among those that are finished, scored and not empty; of equal ones the
    first.

    A group gives no pair if fewer than two responses qualify, if best and worst tie (equal scores, or equal texts after stripping), or if
    their scores are less than min_margin apart. Texts keep the white space at their edges, as those of every source do.
    """
    counts: Counter[str] = Counter(pairs=0, too_few_responses=0, ties=0, below_margin=0)
    rows, chosen, rejected = [], [], []
    for group in groups:
        picked = _best_and_worst(group.responses, min_margin)
        counts["pairs" if isinstance(picked, tuple) else picked] += 1
        best, worst = picked if isinstance(picked, tuple) else (None, None)
        chosen.append(best)
        rejected.append(worst)
        if best is not None and worst is not None:
            texts = {"chosen": group.responses[best].text, "rejected": group.responses[worst].text}
            rows.append({"source": group.source, "split": "train", "messages": group.messages, **texts})
    return Pairs([_identified(row) for row in rows], chosen, rejected, dict(counts))


def _best_and_worst(responses: Sequence[Response], min_margin: float) -> tuple[int, int] | str:
    """Positions of best and worst, or the reason why the group gives no pair."""
    usable = [i for i, r in enumerate(responses) if r.finished and math.isfinite(r.score) and not is_blank(r.text)]
    if len(usable) < 2:
        return "too_few_responses"
    best = max(usable, key=lambda i: (responses[i].score, -i))
    worst = min(usable, key=lambda i: (responses[i].score, i))
    margin = responses[best].score - responses[worst].score
    if margin == 0 or responses[best].text.strip() == responses[worst].text.strip():
        return "ties"
    return (best, worst) if margin >= min_margin else "below_margin"


def _identified(row: dict) -> dict:
    """Return the row with its id, a hash of its content. A round has each prompt once, so no two rows are equal."""
    content = {key: value for key, value in row.items() if key not in ("source", "split")}
    (identified,) = with_ids([content], row["source"])
    return {**row, "id": identified["id"]}
