"""A rank's columns of a batch: together those of all ranks are the batch, and attention's mask is that of whole rows."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from model_families import FAMILIES, VOCABULARY, WINDOW

from rlhf_core.models.batch import Branches, TokenBatch, collate_branches, collate_tokens
from rlhf_core.models.split import OwnColumns, own_columns, padded_columns


class Place(NamedTuple):
    """A rank of a group: `own_columns` reads no more of it."""

    size: int
    index: int


def batches() -> dict[str, TokenBatch]:
    ids = torch.randint(2, VOCABULARY, (60,), generator=torch.Generator().manual_seed(2)).tolist()
    return {
        "plain": collate_tokens([ids[:41], ids[41:]], [1, 9], pad_id=0),
        "shared": collate_branches([Branches(ids[:20], [ids[20:32], ids[32:43]])], pad_id=0, every_token=True),
        "short": collate_tokens([ids[:2]], [1], pad_id=0),
    }


def of_ranks(family: str, batch: TokenBatch, size: int) -> list[OwnColumns]:
    model = FAMILIES[family]()
    rows, positions, _ = batch.predictions()
    return [own_columns(model, batch, rows, positions, Place(size, index)) for index in range(size)]


@pytest.mark.parametrize("name", ["plain", "shared", "short"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_columns_are_the_batch_and_every_needed_one_has_one_rank(name: str, size: int):
    batch = batches()[name]
    parts, whole = of_ranks("llama", batch, size), padded_columns(batch, size)
    assert torch.equal(torch.cat([part.input_ids for part in parts], 1), whole.input_ids)
    assert torch.equal(torch.cat([part.arguments["position_ids"] for part in parts], 1), whole.position_ids)
    rows, positions, _ = batch.predictions()
    assert torch.stack([part.own for part in parts]).sum(0).tolist() == [1] * len(rows)
    for part in parts:
        assert torch.equal(part.input_ids[part.rows, part.positions], batch.input_ids[rows, positions][part.own])


def test_a_shared_rows_mask_spans_all_columns_and_hides_padding():
    batch = batches()["shared"]
    for part in of_ranks("llama", batch, 2):
        mask = part.arguments["attention_mask"]
        assert mask.shape == (1, 1, 44, 44)
        assert torch.equal(mask[..., :43, :43], batch.mask())
        assert mask[0, 0, 43, 43] and not mask[0, 0, :43, 43].any()


def test_plain_rows_have_a_mask_only_where_layers_have_windows():
    batch = batches()["plain"]
    assert all("attention_mask" not in part.arguments for part in of_ranks("llama", batch, 2))
    distance = torch.arange(42)[:, None] - torch.arange(42)
    for part in of_ranks("mistral", batch, 2):
        # Padding repeats the last position, so its distances are one less; real tokens don't see it.
        assert torch.equal(part.arguments["attention_mask"][0, 0, :41], ((distance >= 0) & (distance < WINDOW))[:41])


def test_padding_repeats_the_last_position_and_sees_itself():
    visible = torch.ones(1, 1, 3, 3, dtype=torch.bool).tril()
    padded = padded_columns(TokenBatch(torch.tensor([[5, 6, 7]]), torch.ones(1, 3, dtype=torch.bool), visible=visible), 2)
    assert padded.position_ids.tolist() == [[0, 1, 2, 2]]
    assert padded.visible[0, 0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 0, 0, 1]]
    assert padded.selected.tolist() == [[True, True, True, False]]
