"""TrainBatch: rows are picked whole, and only padding goes."""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import train_batch

from rlhf_core.types import Sequences, TrainBatch


def row(batch: TrainBatch, i: int) -> dict[str, list[float]]:
    """What a row says, without its padding."""
    mask = batch.response_mask[i]
    found: dict[str, list[float]] = {}
    for name in (f.name for f in fields(batch)):
        value = getattr(batch, name)
        if isinstance(value, Sequences):
            found[name] = value.lists()[i][: int(value.starts[i]) + max(1, int(mask.sum()))]  # masks have no gaps
        else:
            found[name] = value[i][mask].tolist()
    return found


@given(rows=st.lists(st.integers(0, 7), min_size=1, max_size=10))
def test_select_keeps_each_rows_content_and_order_and_drops_shared_padding(rows: list[int]):
    batch = train_batch(8)
    ids = [[9, 9, *of] for of in batch.sequences.lists()]
    batch = replace(
        batch,
        teacher_logprobs=batch.old_logprobs - 1,
        teacher_top_logprobs=torch.randn(8, 7, 2, 3),
        teacher_top_ids=torch.arange(8 * 7 * 2 * 3).view(8, 7, 2, 3),
        teacher_sequences=Sequences.of(ids, (batch.sequences.starts + 2).tolist()),
    )
    part = batch.select(rows)
    assert [row(part, k) for k in range(len(part))] == [row(batch, i) for i in rows]
    assert part.response_mask.shape[1] == max(int(batch.response_mask[i].sum()) for i in rows)
    for sequences in (part.sequences, part.teacher_sequences):
        assert sequences.lengths.tolist() == [len(ids) for ids in sequences.lists()]
        assert (sequences.lengths - sequences.starts).tolist() == [max(1, int(batch.response_mask[i].sum())) for i in rows]


def test_select_keeps_a_gap_inside_a_response():
    batch = train_batch(8)
    batch.response_mask[6, 1:3] = False  # a tool's output, say; row 6 has 4 tokens
    part = batch.select([6])
    assert part.response_mask.tolist() == [[True, False, False, True]]
    assert part.sequences.lists() == [batch.sequences.lists()[6]]
    batch.response_mask[6, 3] = False
    assert batch.select([6]).sequences.lists() == [batch.sequences.lists()[6][:-3]], "what follows the last trained token goes"


def test_rows_whose_masks_are_all_empty_keep_a_column():
    part = train_batch(8, unscored=(2, 5)).select([5, 2])
    assert part.response_mask.tolist() == [[False], [False]]
    assert (part.sequences.lengths - part.sequences.starts).tolist() == [1, 1]
    assert len(part) == 2 and part.teacher_logprobs is None


def test_selecting_leaves_the_batch_alone():
    batch, same = train_batch(8), train_batch(8)
    batch.select([0]).advantages.fill_(9.0)
    assert batch.sequences.lists() == same.sequences.lists()
    assert all(torch.equal(tensor, same._tensors()[name]) for name, tensor in batch._tensors().items())
