"""Sequences with a common beginning as one row: the beginning is computed once, and each continuation sees it and itself.

    row        p p p a a b b b      prefix p, branches a and b
    positions  0 1 2 3 4 3 4 5      as in the sequences p a and p b
    b sees     p p p     b b b

What a model says of each branch is what it would say of the whole sequence, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.models.build import trunk
from rlhf_core.models.masks import longest_reach
from rlhf_core.models.trying import TAKES_MASKS, TRIAL_ERRORS, on_trial
from rlhf_core.models.wrappers import TokenBatch

SHARING_PAYS = 0.75  # a shared row that is longer than this part of its sequences' sum costs more attention than it saves
# Where every row is of two responses to a prompt, one that isn't shared is padded to the length of those that are: sharing pays earlier.
CONTINUING_PAYS = 0.9
SHORT_TRIAL = 9  # tokens of a sequence on which sharing is tried where there are no windows
TOLERANCE, HALF_TOLERANCE = 1e-4, 2e-2  # of a hidden state's length, in float32 and in less


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
def can_share_prefixes(model: PreTrainedModel, *, max_length: int | None = None) -> bool:
    """Whether the model computes the same for a shared row as for whole sequences: tried on one, not assumed from its architecture.

    Some attention implementations take no mask, some positional encodings no position ids, and a layer with a state sees all before it.
    Where layers have windows or chunks, the sequences are longer than all of these, if `max_length` allows it, and go through as many
    layers as it takes to have one of each type.

    Args:
        max_length: tokens of the longest sequence that the model will see; None: more than any window has.
    """
    if model.config._attn_implementation not in TAKES_MASKS:
        return False
    prefix, branches = _trial(model.config.get_text_config(), max_length)
    hidden = []
    for rows in ([Branches(prefix, branches)], [Branches(prefix, [ids]) for ids in branches]):
        batch = collate_branches(rows, pad_id=0, every_token=True).to(model.device)
        try:
            with on_trial(model), _each_kind_of_layer(model.config.get_text_config()):
                states = trunk(model)(input_ids=batch.input_ids, use_cache=False, **batch.attention(model)).last_hidden_state
        except TRIAL_ERRORS:
            return False
        hidden.append(states[batch.selected].float())
    shared, alone = hidden
    tolerance = TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE
    return bool(((shared - alone).norm(dim=-1) <= tolerance * alone.norm(dim=-1)).all())


def _trial(config: PretrainedConfig, max_length: int | None) -> tuple[list[int], list[list[int]]]:
    """A prefix and two branches. With windows each sequence passes the largest by a quarter, and the first branch, which lies between
    the second and the prefix, is about half as long as that.
    """
    length = max(SHORT_TRIAL, longest_reach(config) * 5 // 4 + 1)
    limits = [limit for limit in (max_length, getattr(config, "max_position_embeddings", None)) if limit]
    length = max(3, min([length, *limits]))
    prefix = length * 5 // 9
    ids = torch.randint(config.vocab_size, (2 * length - prefix,), generator=torch.Generator().manual_seed(0)).tolist()
    return ids[:prefix], [ids[prefix:length], ids[length:-1] or ids[length:]]


@contextmanager
def _each_kind_of_layer(config: PretrainedConfig) -> Iterator[None]:
    """Within it a model with windows has as many layers as it takes to have one of each type: what its trunk goes through is
    `layers[: num_hidden_layers]`, in those that look at it.
    """
    layers, kinds = config.num_hidden_layers, getattr(config, "layer_types", None) or ["alike"]
    if longest_reach(config):
        config.num_hidden_layers = min(layers, 1 + max(kinds.index(kind) for kind in set(kinds)))
    try:
        yield
    finally:
        config.num_hidden_layers = layers
