"""Micro-batches of token sequences, and rows in which several continuations share one prefix.

    row        p p p a a b b b      prefix p, branches a and b
    positions  0 1 2 3 4 3 4 5      as in the sequences p a and p b
    b sees     p p p     b b b

A shared row gives each branch the numbers of its whole sequence, up to rounding, and computes the prefix once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

# A shared row costs more attention than it saves if it is longer than this fraction of its sequences' total length.
SHARING_PAYS = 0.75
# Where every row holds the responses to one prompt, separate rows are padded to the length of the shared ones: sharing pays earlier.
CONTINUING_PAYS = 0.9
NO_STEP = -1  # in a table of positions


@dataclass(frozen=True)
class TokenBatch:
    """Token sequences of one micro-batch, and which of their tokens are selected: those whose log-probability or score is computed.

    Sequences are right-padded, prompt and response contiguous. Attention is causal, so no real token sees padding.

    input_ids: [B, T] int64.
    selected: [B, T] bool; N of them are True.
    position_ids: [B, T] int64; None: 0 to T - 1 in each row.
    visible: [B, 1, T, T] bool, which tokens (last) each token sees; None: itself and all before it, or as `segments` say.
    predicted_by: [B, T] int64, the position in its row of the token that predicts each selected one; None: the one before it.
    segments: [B, T] int64, of rows with a prefix and branches: see `visible_branches`. In a packed row, which has no prefix, a branch is a
        sequence.
    pictures: arguments of the model's forward for the pictures of all rows, in order; empty: there are none; None: the model doesn't see.
    """

    input_ids: torch.Tensor
    selected: torch.Tensor
    position_ids: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    predicted_by: torch.Tensor | None = None
    segments: torch.Tensor | None = None
    pictures: dict[str, torch.Tensor] | None = None

    def to(self, device: torch.device) -> TokenBatch:
        """Return the batch on a device.

        Copies from pinned memory queue behind the batch that a GPU works on; other copies would wait for it.
        """

        def moved(x: Any) -> Any:
            if x is None or isinstance(x, dict):
                return x and {name: moved(tensor) for name, tensor in x.items()}
            return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)

        return TokenBatch(*(moved(getattr(self, f.name)) for f in fields(self)))

    @property
    def length(self) -> int:
        """The length of the longest sequence, with padding; in a row with branches a sequence is the prefix and one branch."""
        return self.input_ids.shape[1] if self.position_ids is None else int(self.position_ids.max()) + 1

    @property
    def mask_is_needed(self) -> bool:
        """Whether attention isn't plainly causal."""
        return self.visible is not None or self.segments is not None

    def mask(self) -> torch.Tensor | None:
        """Return which tokens (last) each token sees, [B, 1, T, T] bool; None: plain causal attention."""
        return self.visible if self.segments is None else visible_branches(self.segments)

    def predictions(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows and positions of the predicting tokens, and ids of the selected tokens, [N] each.

        A row's first token is left out, since no token predicts it.
        """
        rows, before = self.selected[:, 1:].nonzero(as_tuple=True)
        predicted_by = before if self.predicted_by is None else self.predicted_by[rows, before + 1]
        return rows, predicted_by, self.input_ids[rows, before + 1]


def collate_tokens(sequences: list[list[int]], starts: list[int], *, pad_id: int, ends: list[int] | None = None) -> TokenBatch:
    """Pad sequences to [B, T] and select the tokens from `starts[i]` to `ends[i]` (default: the end) of each."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    columns = torch.arange(int(lengths.max()))
    input_ids = torch.full((len(sequences), len(columns)), pad_id)
    input_ids[columns < lengths[:, None]] = torch.tensor([token for ids in sequences for token in ids])
    last = lengths if ends is None else torch.tensor(ends)
    return TokenBatch(input_ids, (columns >= torch.tensor(starts)[:, None]) & (columns < last[:, None]))


def collate_steps(sequences: list[list[int]], ends: torch.Tensor, *, pad_id: int) -> tuple[TokenBatch, torch.Tensor]:
    """Return a batch in which the ends of steps are selected, and where their scores are among the selected tokens', [B, S].

    Args:
        ends: [B, S] int64, positions in the sequences; NO_STEP where there is none.
    """
    batch = collate_tokens(sequences, [0] * len(sequences), pad_id=pad_id, ends=[0] * len(sequences))
    rows = torch.arange(len(sequences))[:, None].expand_as(ends)
    real = ends != NO_STEP
    selected = torch.zeros_like(batch.selected)
    selected[rows[real], ends[real]] = True
    number = selected.flatten().cumsum(0).view(selected.shape) - 1
    return TokenBatch(batch.input_ids, selected), number.gather(1, ends.clamp(min=0)).where(real, NO_STEP)


def padded_ends(ends: Sequence[Sequence[int] | None]) -> torch.Tensor:
    """Return lists of positions as [N, S] int64, filled with NO_STEP."""
    width = max((len(of_one or ()) for of_one in ends), default=0)
    return torch.tensor([[*(of_one or ()), *[NO_STEP] * (width - len(of_one or ()))] for of_one in ends]).reshape(len(ends), width).long()


@dataclass(frozen=True)
class Branches:
    """A common prefix and at least one continuation of it, each of at least one token."""

    prefix: list[int]
    branches: list[list[int]]

    def __len__(self) -> int:
        return len(self.prefix) + sum(map(len, self.branches))


def share_prefix(sequences: list[list[int]], *, max_tokens: int) -> list[Branches]:
    """Return rows for the sequences, in order: one row for all if that pays, else a row for each.

    A shared row has at most `max_tokens` tokens, since its attention may need a mask of [T, T]; larger ones are halved.
    """
    shared = shared_row(sequences)
    if len(shared) > max_tokens and len(sequences) > 1:
        half = len(sequences) // 2
        return share_prefix(sequences[:half], max_tokens=max_tokens) + share_prefix(sequences[half:], max_tokens=max_tokens)
    return [shared] if _pays(shared, SHARING_PAYS) else separate(sequences)


def group_by_prefix(sequences: list[list[int]], starts: list[int], *, max_tokens: int) -> list[list[int]]:
    """Return the positions of consecutive sequences with the same prefix `sequence[:start]`, grouped so that a shared row has at most
    `max_tokens` tokens.
    """
    groups: list[list[int]] = []
    tokens = 0
    for i, (ids, start) in enumerate(zip(sequences, starts, strict=True)):
        last = groups[-1][-1] if groups else None
        tokens += len(ids) - start
        if last is not None and tokens <= max_tokens and sequences[last][: starts[last]] == ids[:start]:
            groups[-1].append(i)
        else:
            groups.append([i])
            tokens = len(ids)
    return groups


def continue_prefix(prefix: list[int], branches: list[list[int]], *, shared: bool = True) -> list[Branches]:
    """Return rows for the continuations of a given prefix, in order: one row for all if that pays and `shared` allows it.

    Unlike `share_prefix` it takes nothing but the given prefix into the common part, so that every token of each branch can be selected.
    """
    row = Branches(prefix, branches)
    return [row] if shared and _pays(row, CONTINUING_PAYS) else [Branches(prefix, [ids]) for ids in branches]


def shared_row(sequences: list[list[int]]) -> Branches:
    """Return one row for all sequences, whether it pays or not."""
    shortest = min(map(len, sequences))
    common = 0
    while common < shortest - 1 and len({ids[common] for ids in sequences}) == 1:
        common += 1
    return Branches(sequences[0][:common], [ids[common:] for ids in sequences])


def separate(sequences: list[list[int]]) -> list[Branches]:
    """Return a row for each sequence."""
    return [Branches([], [ids]) for ids in sequences]


def _pays(row: Branches, limit: float) -> bool:
    separate_tokens = len(row.prefix) * len(row.branches) + sum(map(len, row.branches))
    return len(row.branches) > 1 and len(row) <= limit * separate_tokens


def collate_branches(rows: list[Branches], *, pad_id: int, every_token: bool = False) -> TokenBatch:
    """Return rows padded to [B, T]. The last token of each branch is selected, row by row, or with `every_token` all tokens of each branch.

    Args:
        every_token: select every token of each branch, for log-probabilities. The prefix's last token predicts a branch's first one, so
            every row needs a prefix.
    """
    assert all(row.prefix for row in rows) or not every_token
    lengths, prefixes = torch.tensor([len(row) for row in rows]), torch.tensor([len(row.prefix) for row in rows])
    columns = torch.arange(int(lengths.max()))
    real = columns < lengths[:, None]

    def padded(flat: torch.Tensor, padding: int) -> torch.Tensor:
        """Return values of the real tokens, row after row, placed as [B, T]."""
        return torch.full(real.shape, padding).masked_scatter(real, flat)

    pieces = [[row.prefix, *row.branches] for row in rows]
    sizes = torch.tensor([len(piece) for row in pieces for piece in row])
    number = torch.tensor([k for row in pieces for k in range(len(row))])  # 0: prefix; 1, 2, ...: branches
    ends, row_of = sizes.cumsum(0), torch.tensor([r for r, row in enumerate(pieces) for _ in row])
    begins = (ends - sizes) - (lengths.cumsum(0) - lengths)[row_of]  # in their rows
    input_ids = padded(torch.tensor([token for row in pieces for piece in row for token in piece], dtype=torch.long), pad_id)
    segments = padded(number.repeat_interleave(sizes), -1)  # -1: padding
    shifts = torch.where(number > 0, prefixes[row_of] - begins, 0)  # from the position in the row to that in the sequence
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


def visible_branches(segments: torch.Tensor) -> torch.Tensor:
    """Return which tokens (last) each token sees, [B, 1, T, T] bool: itself, and the tokens before it in its row's prefix and its own
    branch.

    Args:
        segments: [B, T] int64; 0 a prefix, 1, 2, ... its branches, -1 padding. Padding sees padding: a softmax over nothing is NaN.
    """
    same_or_prefix = (segments[:, None, :] == 0) | (segments[:, None, :] == segments[:, :, None])
    width = segments.shape[1]
    return (same_or_prefix & torch.ones(width, width, dtype=torch.bool, device=segments.device).tril())[:, None]
