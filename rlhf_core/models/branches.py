"""Sequences with a common beginning as one row: the beginning is computed once, and each continuation sees it and itself.

    row        p p p a a b b b      prefix p, branches a and b
    positions  0 1 2 3 4 3 4 5      as in the sequences p a and p b
    b sees     p p p     b b b

What a model says of each branch is what it would say of the whole sequence, up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from rlhf_core.models.build import trunk
from rlhf_core.models.wrappers import TokenBatch

SHARING_PAYS = 0.75  # a shared row that is longer than this part of its sequences' sum costs more attention than it saves
# Where every row is of two responses to a prompt, one that isn't shared is padded to the length of those that are: sharing pays earlier.
CONTINUING_PAYS = 0.9


@dataclass(frozen=True)
class Branches:
    """A common prefix and at least one continuation, each of at least one token."""

    prefix: list[int]
    branches: list[list[int]]

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.branches))


def share_prefix(sequences: list[list[int]]) -> list[Branches]:
    """Sequences as rows, their order kept: one row for all where that pays, else a row for each."""
    shared = shared_row(sequences)
    return [shared] if _pays(shared, SHARING_PAYS) else separate(sequences)


def continue_prefix(prefix: list[int], branches: list[list[int]], *, shared: bool = True) -> list[Branches]:
    """Continuations of a given beginning as rows, their order kept: one row for all where that pays and `shared` allows it.

    Unlike `share_prefix` it never takes more into the common part than the given beginning, so that all of each branch can be asked for.
    """
    row = Branches(prefix, branches)
    return [row] if shared and _pays(row, CONTINUING_PAYS) else [Branches(prefix, [ids]) for ids in branches]


def shared_row(sequences: list[list[int]]) -> Branches:
    """One row for all, whether it pays or not."""
    shortest = min(map(len, sequences))
    common = 0
    while common < shortest - 1 and len({ids[common] for ids in sequences}) == 1:
        common += 1
    return Branches(sequences[0][:common], [ids[common:] for ids in sequences])


def separate(sequences: list[list[int]]) -> list[Branches]:
    """A row for each sequence."""
    return [Branches([], [ids]) for ids in sequences]


def _pays(row: Branches, limit: float) -> bool:
    apart = len(row.prefix) * len(row.branches) + sum(map(len, row.branches))
    return len(row.branches) > 1 and len(row) <= limit * apart


def collate_branches(rows: list[Branches], *, pad_id: int, every_token: bool = False) -> TokenBatch:
    """Rows padded to [B, T], the last token of each branch selected, row by row; or every token of each branch.

    Args:
        every_token: for log-probabilities: the first token of a branch is predicted by the last one of the prefix, which no row may lack.
    """
    assert all(row.prefix for row in rows) or not every_token
    lengths, prefixes = torch.tensor([len(row) for row in rows]), torch.tensor([len(row.prefix) for row in rows])
    columns = torch.arange(int(lengths.max()))
    real = columns < lengths[:, None]

    def padded(flat: torch.Tensor, padding: int) -> torch.Tensor:
        """[B, T] of what the real tokens have, row after row."""
        return torch.full(real.shape, padding).masked_scatter(real, flat)

    pieces = [[row.prefix, *row.branches] for row in rows]
    sizes = torch.tensor([len(piece) for row in pieces for piece in row])
    number = torch.tensor([k for row in pieces for k in range(len(row))])  # 0: prefix; 1, 2, ...: branches
    ends, row_of = sizes.cumsum(0), torch.tensor([r for r, row in enumerate(pieces) for _ in row])
    begins = (ends - sizes) - (lengths.cumsum(0) - lengths)[row_of]  # in their rows
    input_ids = padded(torch.tensor([token for row in pieces for piece in row for token in piece], dtype=torch.long), pad_id)
    segments = padded(number.repeat_interleave(sizes), -1)  # -1: padding
    shifts = torch.where(number > 0, prefixes[row_of] - begins, 0)  # from the place in the row to that in the sequence
    position_ids = (columns + padded(shifts.repeat_interleave(sizes), 0)).where(real, 0)
    rows_of, firsts, lasts = (x[number > 0] for x in (row_of, begins, begins + sizes - 1))
    predicted_by = (columns - 1).repeat(len(rows), 1)
    predicted_by[rows_of, firsts] = prefixes[rows_of] - 1
    selected = segments > 0
    if not every_token:
        selected = torch.zeros_like(selected).index_put((rows_of, lasts), torch.tensor(True))
    if all(len(row.branches) == 1 for row in rows):  # plain sequences: causal attention needs no mask
        return TokenBatch(input_ids, selected)
    return TokenBatch(input_ids, selected, position_ids, predicted_by=predicted_by, segments=segments)


@torch.no_grad()
def can_share_prefixes(model: PreTrainedModel) -> bool:
    """Whether the model computes the same for a shared row as for whole sequences: tried on one, not assumed from its architecture.

    Some attention implementations take no mask, and some positional encodings no position ids.
    """
    ids = torch.arange(12) % model.config.get_text_config().vocab_size
    sequences = [ids[:9].tolist(), [*ids[:5].tolist(), *ids[9:].tolist()]]
    hidden = []
    for rows in ([shared_row(sequences)], separate(sequences)):
        batch = collate_branches(rows, pad_id=0).to(model.device)
        try:
            states = trunk(model)(input_ids=batch.input_ids, use_cache=False, **batch.attention()).last_hidden_state
        except (ValueError, TypeError, RuntimeError):
            return False
        hidden.append(states[batch.selected].float())
    shared, alone = hidden
    return bool((shared - alone).abs().max() <= 1e-3 * alone.abs().max())
