"""On which prompts, and with which seeds, a round's policy is compared with the one before it."""

from __future__ import annotations

import pytest
from tiny_models import tiny_params

from rlhf_core.engines.rollout.requests import request_seeds
from rlhf_core.rounds.sample import promotion_prompts, promotion_seeds

ROWS = [
    {"id": str(n), "source": "mine", "messages": [{"role": "user", "content": "Sort 4" + "1" * n}], "label": None} for n in range(8)
]  # fmt: skip


def params(count: int):
    return tiny_params(**{"seed": 3, "iterative.promotion.prompts": count, "evaluation.max_new_tokens": 4})


def test_each_round_is_compared_on_other_prompts_with_other_draws(tokenizer):
    def ids(number: int, count: int = 4) -> list[str]:
        return [p.id for p in promotion_prompts(ROWS, tokenizer, params(count), number=number)]

    drawn = [tuple(ids(number)) for number in range(1, 6)]
    assert drawn[0] == tuple(ids(1)) and len(set(drawn)) == 5
    assert len({tuple(sorted(of_round)) for of_round in drawn}) > 1  # not the same ones in another order
    assert sorted(ids(1, len(ROWS))) == sorted(ids(2, len(ROWS))) == sorted(r["id"] for r in ROWS)
    expected = rf"iterative\.promotion\.prompts: expected at most the {len(ROWS)} different prompts .* got {len(ROWS) + 1}; lower it"
    for rows in (ROWS, [*ROWS, ROWS[0] | {"id": "again"}]):
        with pytest.raises(ValueError, match=expected):
            promotion_prompts(rows, tokenizer, params(len(ROWS) + 1), number=1)
    of_rounds = {seed for number in range(1, 31) for seed in promotion_seeds(3, number, 100)}
    assert len(of_rounds) == 3000  # of 2^32; none twice with a chance of 0.999
    assert not of_rounds & {seed for draw in range(0, 31 * 512, 512) for seed in request_seeds(3, draw, 100)}
