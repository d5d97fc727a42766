"""Which held-out prompts the evaluation takes: those that the gate's pairs don't have, where the source has enough of them."""

from __future__ import annotations

from collections import Counter

from rlhf_core.data.hashing import conversation_text
from rlhf_core.evaluation.answers import prefer_unseen
from rlhf_core.types import Prompt


def prompts(source: str, count: int) -> list[Prompt]:
    return [Prompt(f"{source}{i}", source, [{"role": "user", "content": f"{source} {i}"}], [1], None) for i in range(count)]


def test_prompts_of_the_gate_come_last_and_each_source_keeps_its_share():
    mine, other = prompts("mine", 10), prompts("other", 10)
    order = [p for pair in zip(mine, other, strict=True) for p in pair]
    known = {conversation_text(p.messages) for p in [*mine[:6], *other]}
    chosen = prefer_unseen(order, 8, known)
    assert Counter(p.source for p in chosen) == {"mine": 4, "other": 4}
    assert [p.id for p in chosen if p.source == "mine"] == ["mine6", "mine7", "mine8", "mine9"]
    assert [p.id for p in chosen if p.source == "other"] == ["other0", "other1", "other2", "other3"]  # there are no others
    assert prefer_unseen(order, 8, set()) == order[:8] and sorted(p.id for p in prefer_unseen(order, 99, known)) == sorted(
        p.id for p in order
    )
