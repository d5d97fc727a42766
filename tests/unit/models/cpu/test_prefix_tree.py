"""Tokens that are one because the same tokens precede them, against their beginnings written out."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.models.cpu import layout
from rlhf_core.models.cpu.layout import merged


def numbered(sequences: list[list[int]]) -> torch.Tensor:
    """[S, W], tokens numbered one sequence after the other."""
    numbers, width = iter(range(sum(map(len, sequences)))), max(map(len, sequences))
    return torch.tensor([[next(numbers) if column < len(ids) else -1 for column in range(width)] for ids in sequences])


def beginnings(sequences: list[list[int]]) -> list[tuple[int, ...]]:
    return [tuple(ids[: k + 1]) for ids in sequences for k in range(len(ids))]


@pytest.mark.parametrize("seed", range(20))
def test_each_token_stands_for_all_with_its_beginning(seed: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layout, "MERGING_PAYS", 1.0)
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (12,), generator=draw).tolist()
    sequences = [torch.randint(0, 3, (n,), generator=draw).tolist() for n in lengths]
    first, whole = merged(numbered(sequences), torch.tensor([i for ids in sequences for i in ids])), beginnings(sequences)
    assert [whole[i] for i in first.tolist()] == whole
    assert len(first.unique()) == len(set(whole))


def test_a_token_of_several_sequences_is_one_already():
    """Two sequences that share the tokens 0 and 1 by their numbers, and a third that begins alike with tokens of its own."""
    sequences, ids = torch.tensor([[0, 1, 2], [0, 1, 3], [4, 5, 6]]), torch.tensor([7, 8, 1, 2, 7, 8, 3])
    first = merged(sequences, ids)
    assert first[4] == first[0] and first[5] == first[1] and len(first.unique()) == 5


def test_little_in_common_is_left_alone():
    twenty = [[*range(20)], [0, *range(30, 49)]]  # one of forty
    assert merged(numbered(twenty), torch.tensor(twenty).flatten()) is None
    alike = [[*range(20)], [*range(3), *range(33, 50)]]  # three of forty
    assert len(merged(numbered(alike), torch.tensor(alike).flatten()).unique()) == 37
