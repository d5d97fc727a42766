"""Pairs from scored responses: of each prompt's, the best against the worst."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from rlhf_core.data.hashing import with_ids
from rlhf_core.data.schema import Message


class Response(Protocol):
    """What is read of a response. finished: ended by the model itself; score: not finite where it could not be scored."""

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
    """Rows of the use preference and where they come from.

    rows: in the order of the groups.
    chosen, rejected: of each group, the position of its responses; None: it gave no pair.
    counts: pairs, and by reason the groups that gave none.
    """

    rows: list[dict]
    chosen: list[int | None]
    rejected: list[int | None]
    counts: dict[str, int]


def build_pairs(groups: Sequence[Group], *, min_margin: float) -> Pairs:
    """The best finished and scored response of each group against the worst; of equal ones the first.

    Left out: groups with fewer than two responses that could be used, ties (equal scores, or texts that differ only in white space at
    their ends), and pairs whose scores are less than min_margin apart. A response without text can't be used. Texts are stripped, as
    those of every source are.
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
            texts = {"chosen": group.responses[best].text.strip(), "rejected": group.responses[worst].text.strip()}
            rows.append({"source": group.source, "split": "train", "messages": group.messages, **texts})
    return Pairs([_identified(row) for row in rows], chosen, rejected, dict(counts))


def _best_and_worst(responses: Sequence[Response], min_margin: float) -> tuple[int, int] | str:
    """Positions, or why there is no pair."""
    usable = [i for i, r in enumerate(responses) if r.finished and math.isfinite(r.score) and r.text.strip()]
    if len(usable) < 2:
        return "too_few_responses"
    best = max(usable, key=lambda i: (responses[i].score, -i))
    worst = min(usable, key=lambda i: (responses[i].score, i))
    margin = responses[best].score - responses[worst].score
    if margin == 0 or responses[best].text.strip() == responses[worst].text.strip():
        return "ties"
    return (best, worst) if margin >= min_margin else "below_margin"


def _identified(row: dict) -> dict:
    """The row with its id, a hash of its content; a round has each prompt once, so that no two are equal."""
    content = {key: value for key, value in row.items() if key not in ("source", "split")}
    (identified,) = with_ids([content], row["source"])
    return {**row, "id": identified["id"]}
