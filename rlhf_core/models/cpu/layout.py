"""Lays out a batch for packed forward passes: its real tokens end to end, and their places in the padded blocks in which they attend.

A block holds rows, or whole sequences with a copy of their prefix each, or groups whose responses attend to one prefix. Tokens with the
same tokens before them are computed once and have several places.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import LlamaModel

from rlhf_core.models.batch import visible_branches

# Pairs of query and key that copies of a prefix must save for each place; measured on a small model in one thread.
COPYING_PAYS = 48
# Tokens are merged if at most this fraction of them is left; merging itself takes time.
MERGING_PAYS = 0.97
# Rows attend as groups if they have this many responses on average, sequences of at most LONGEST tokens, and a prefix of at least this
# fraction of a sequence. Groups keep attention's weights for the backward pass, which grow with the square of the length.
RESPONSES, LONGEST, PREFIX_PART = 3, 256, 0.15
NARROWER = 0.75  # a block takes rows down to this fraction of its longest row's length


@dataclass(frozen=True)
class Block:
    """Rows that attend together, padded to the longest of them.

    mask: [rows, 1, width, width] float, 0 or -inf, added to attention's logits; None: causal.
    """

    rows: int
    width: int
    mask: torch.Tensor | None

    @property
    def num_places(self) -> int:
        return self.rows * self.width


@dataclass(frozen=True)
class GroupBlock:
    """Prefixes with equally many responses each, padded to the longest prefix and the longest response. All prefixes come first.

    prefix_mask: [groups, 1, 1, prefix_width] float, 0 or -inf, which hides a prefix's padding from its responses.
    """

    groups: int
    responses: int
    prefix_width: int
    response_width: int
    prefix_mask: torch.Tensor

    @property
    def prefix_places(self) -> int:
        return self.groups * self.prefix_width

    @property
    def num_places(self) -> int:
        return self.prefix_places + self.groups * self.responses * self.response_width


@dataclass(frozen=True)
class Placing:
    """Blocks and the tokens in them: tokens[i] is at places[i], [C] int64 each. Every token has a place."""

    blocks: list[Block] | list[GroupBlock]
    places: torch.Tensor
    tokens: torch.Tensor


@dataclass(frozen=True)
class Copies:
    """Tokens with several places.

    sources: [P] int64, the token at each place; an arbitrary one where there is padding.
    places: [C] int64, the places of all tokens, token after token.
    starts: [N] int64, the index in `places` of each token's first one.
    """

    sources: torch.Tensor
    places: torch.Tensor
    starts: torch.Tensor


@dataclass(frozen=True)
class Layout:
    """The N real tokens of a batch, and their places in attention's blocks, which have P places altogether.

    ids: [N] int64, row after row, the longest row first; merged tokens once.
    places: [N] int64, a place of each real token.
    copies: all places of each token; None: each token has one place.
    wanted: [M] int64, the index among the real tokens of each wanted position; they may repeat.
    rotation: [N, query and key heads, D / 2] complex, of the rotary embedding.
    """

    blocks: list[Block] | list[GroupBlock]
    ids: torch.Tensor
    places: torch.Tensor
    copies: Copies | None
    wanted: torch.Tensor
    rotation: torch.Tensor

    @property
    def num_places(self) -> int:
        return sum(block.num_places for block in self.blocks)


@dataclass(frozen=True)
class Sequences:
    """A sequence for each branch, made of its row's prefix and the branch, the longest first; [S] int64 each.

    A prefix without branches is a sequence too, and so is a row without segments.
    """

    rows: torch.Tensor
    prefix_starts: torch.Tensor
    prefix_lengths: torch.Tensor
    branch_starts: torch.Tensor
    branch_lengths: torch.Tensor

    @property
    def lengths(self) -> torch.Tensor:
        return self.prefix_lengths + self.branch_lengths

    def tokens(self) -> torch.Tensor:
        """Return token numbers of each sequence, -1 after its end, [S, longest] int64."""
        columns = torch.arange(int(self.lengths.max()))
        prefix_lengths = self.prefix_lengths[:, None]
        of_prefix, of_branch = self.prefix_starts[:, None] + columns, self.branch_starts[:, None] + columns - prefix_lengths
        return of_prefix.where(columns < prefix_lengths, of_branch).where(columns < self.lengths[:, None], -1)


def layout_of(
    trunk: LlamaModel,
    input_ids: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    position_ids: torch.Tensor | None,
    visible: torch.Tensor | None,
    segments: torch.Tensor | None,
) -> Layout:
    """Return the layout of a batch; for the arguments see `packed_states`."""
    lengths = input_ids.new_zeros(len(input_ids)).scatter_reduce(0, rows, positions + 1, "amax")
    lengths[0].clamp_(min=1)  # without any wanted position each weight still gets a gradient, of zeros, for which other ranks wait
    order = lengths.argsort(descending=True, stable=True)
    ordered = lengths[order]
    real = torch.arange(input_ids.shape[1]) < ordered[:, None]
    starts = torch.empty_like(lengths)
    starts[order] = ordered.cumsum(0) - ordered
    ids, wanted = input_ids[order][real], starts[rows] + positions
    counted = position_ids is None
    if counted:
        position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
    position_ids = position_ids[order][real]
    if segments is not None:
        sequences = _sequences(segments[order], real)
        placing = _branches(sequences, ordered, order, segments)
    else:
        sequences = _rows_alone(ordered) if visible is None and counted else None
        placing = _rows(ordered, order, visible)
    first = None if sequences is None else merged(sequences.tokens(), ids)
    if first is not None:
        is_first = first == torch.arange(len(first))
        numbers = (is_first.cumsum(0) - 1)[first]
        placing = replace(placing, tokens=numbers[placing.tokens])
        ids, position_ids, wanted = ids[is_first], position_ids[is_first], numbers[wanted]
    copies = None if len(placing.places) == len(ids) else _copies(placing, num_tokens=len(ids))
    places = torch.empty_like(ids).index_copy_(0, placing.tokens, placing.places) if copies is None else copies.places[copies.starts]
    return Layout(placing.blocks, ids, places, copies, wanted, _rotation(trunk, position_ids))


def _rows(ordered: torch.Tensor, order: torch.Tensor, visible: torch.Tensor | None) -> Placing:
    """Return blocks that hold the rows as they are."""
    blocks, places, first = [], [], 0
    for count, width in _cuts(ordered.tolist()):
        real = torch.arange(width) < ordered[first : first + count, None]
        places.append(real.flatten().nonzero().squeeze(-1) + sum(b.num_places for b in blocks))
        blocks.append(Block(count, width, None if visible is None else _added(visible[order[first : first + count], :, :width, :width])))
        first += count
    return Placing(blocks, torch.cat(places), torch.arange(int(ordered.sum())))


def _branches(sequences: Sequences, ordered: torch.Tensor, order: torch.Tensor, segments: torch.Tensor) -> Placing:
    """Return blocks for rows with prefixes and branches, of the kind that is fastest."""
    if _grouping_pays(sequences, num_rows=int((ordered > 0).sum())):
        return _groups(sequences, num_tokens=int(ordered.sum()))
    if _copying_pays(sequences.lengths, ordered):
        return _whole_sequences(sequences)
    return _rows(ordered, order, visible_branches(segments))


def _rows_alone(ordered: torch.Tensor) -> Sequences:
    lengths = ordered[ordered > 0]
    nothing = torch.zeros_like(lengths)
    return Sequences(torch.arange(len(lengths)), nothing, nothing, lengths.cumsum(0) - lengths, lengths)


def _sequences(segments: torch.Tensor, real: torch.Tensor) -> Sequences:
    """Return the sequences in the real tokens [B, T], which are numbered row after row."""
    row_of, _ = real.nonzero(as_tuple=True)
    width = segments.shape[1] + 1  # more than any segment's number: row and number as one integer, which unique compares faster
    runs, counts = torch.unique_consecutive(row_of * width + segments[real], return_counts=True)
    starts, rows, numbers = counts.cumsum(0) - counts, runs // width, runs % width
    is_prefix = numbers == 0
    prefix_starts, prefix_lengths, branches = (torch.zeros(len(real), dtype=torch.long) for _ in range(3))
    prefix_starts[rows[is_prefix]], prefix_lengths[rows[is_prefix]] = starts[is_prefix], counts[is_prefix]
    branches.index_add_(0, rows[~is_prefix], torch.ones_like(rows[~is_prefix]))
    alone = is_prefix & (branches[rows] == 0)
    chosen = ~is_prefix | alone
    rows, starts, lengths = rows[chosen], starts[chosen], counts.where(~is_prefix, 0)[chosen]
    order = (prefix_lengths[rows] + lengths).argsort(descending=True, stable=True)
    rows = rows[order]
    return Sequences(rows, prefix_starts[rows], prefix_lengths[rows], starts[order], lengths[order])


def _grouping_pays(sequences: Sequences, *, num_rows: int) -> bool:
    """Return whether attending in groups is faster. Every row must have a prefix and responses."""
    complete = bool((sequences.prefix_lengths > 0).all()) and bool((sequences.branch_lengths > 0).all())
    many_short = len(sequences.rows) >= RESPONSES * num_rows and int(sequences.lengths[0]) <= LONGEST
    return complete and many_short and int(sequences.prefix_lengths.sum()) >= PREFIX_PART * int(sequences.lengths.sum())


def _groups(sequences: Sequences, *, num_tokens: int) -> Placing:
    """Return blocks with rows that have equally many branches and similar lengths."""
    counts = sequences.rows.bincount()
    by_row = sequences.rows.argsort(stable=True)
    firsts = counts.cumsum(0) - counts
    longest = sequences.lengths[by_row[firsts]]  # the longest sequences come first, in each row too
    blocks, places, begin = [], torch.empty(num_tokens, dtype=torch.long), 0
    for responses in counts.unique().tolist():
        alike = (counts == responses).nonzero().squeeze(-1)
        alike = alike[longest[alike].argsort(descending=True, stable=True)]
        for rows in alike.split([count for count, _ in _cuts(longest[alike].tolist())]):
            group = by_row[firsts[rows, None] + torch.arange(responses)]  # [groups, responses], of sequences
            prefix_lengths, lengths = sequences.prefix_lengths[group[:, 0]], sequences.branch_lengths[group.flatten()]
            prefix_width, width = int(prefix_lengths.max()), int(lengths.max())
            visible = torch.arange(prefix_width) < prefix_lengths[:, None, None, None]
            blocks.append(GroupBlock(len(rows), responses, prefix_width, width, _added(visible)))
            _place(places, sequences.prefix_starts[group[:, 0]], prefix_lengths, begin, prefix_width)
            _place(places, sequences.branch_starts[group.flatten()], lengths, begin + blocks[-1].prefix_places, width)
            begin += blocks[-1].num_places
    return Placing(blocks, places, torch.arange(num_tokens))


def _place(places: torch.Tensor, starts: torch.Tensor, lengths: torch.Tensor, begin: int, width: int) -> None:
    """Put runs of tokens, which begin at `starts`, into rows of a width; the first row begins at place `begin`."""
    real = torch.arange(width) < lengths[:, None]
    places[(starts[:, None] + torch.arange(width))[real]] = begin + real.flatten().nonzero().squeeze(-1)


def _copying_pays(sequences: torch.Tensor, rows: torch.Tensor) -> bool:
    """Return whether copies of prefixes save enough pairs of query and key, given the lengths of sequences and rows."""
    return int((rows**2).sum() - (sequences**2).sum()) > COPYING_PAYS * int(sequences.sum())


def _whole_sequences(sequences: Sequences) -> Placing:
    """Return blocks in which each branch follows a copy of its prefix, so that attention is causal. In a row of many short branches most
    pairs would be masked, and masked pairs are computed too.
    """
    tokens, blocks, sources, first = sequences.tokens(), [], [], 0
    for count, width in _cuts(sequences.lengths.tolist()):
        sources.append(tokens[first : first + count, :width].flatten())
        blocks.append(Block(count, width, None))
        first += count
    source = torch.cat(sources)
    places = (source >= 0).nonzero().squeeze(-1)
    return Placing(blocks, places, source[places])


def _copies(placing: Placing, *, num_tokens: int) -> Copies:
    counts = placing.tokens.bincount(minlength=num_tokens)
    sources = torch.zeros(sum(block.num_places for block in placing.blocks), dtype=torch.long)
    sources[placing.places] = placing.tokens
    return Copies(sources, placing.places[placing.tokens.argsort(stable=True)], counts.cumsum(0) - counts)


def _cuts(lengths: list[int]) -> list[tuple[int, int]]:
    """Return the number of rows and the width of each block, for rows in descending order of length. Rows without tokens are left out."""
    cuts: list[tuple[int, int]] = []
    for length in lengths:
        if length and cuts and length >= NARROWER * cuts[-1][1]:
            cuts[-1] = (cuts[-1][0] + 1, cuts[-1][1])
        elif length:
            cuts.append((1, length))
    return cuts


def _added(visible: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(visible, dtype=torch.float32).masked_fill_(~visible, -torch.inf)


def _rotation(trunk: LlamaModel, position_ids: torch.Tensor) -> torch.Tensor:
    frequencies = trunk.rotary_emb.inv_freq
    angles = torch.arange(int(position_ids.max()) + 1)[:, None] * frequencies.to(torch.promote_types(frequencies.dtype, torch.float32))
    heads = trunk.config.num_attention_heads + trunk.config.num_key_value_heads
    return torch.polar(torch.ones_like(angles), angles)[:, None].expand(-1, heads, -1).index_select(0, position_ids)


def merged(sequences: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """Return, for each token, the first one with the same id and the same tokens before it, which may be itself; None if that merges too
    few.

    A causal model computes a token from that token and those before it. So a prefix that sequences of a batch share, such as a system
    prompt or a template's tokens, is computed once.

    Args:
        sequences: [S, W] int64, token numbers of each sequence, -1 after its end. Every token is in one of them, and has the same
            tokens before it in all sequences that contain it.
        ids: [N] int64, of each token.
    Returns:
        [N] int64.
    """
    real = sequences >= 0
    ids_of = ids[sequences].where(real, -1)
    rows = ids_of.tolist()
    order = sorted(range(len(rows)), key=rows.__getitem__)  # sequences with a common prefix are neighbours
    sequences, ids_of, real = sequences[order], ids_of[order], real[order]
    as_above = torch.zeros_like(real)
    as_above[1:] = (ids_of[1:] == ids_of[:-1]).cumprod(1).bool() & real[1:]
    numbers = torch.arange(len(order))[:, None].expand_as(sequences)
    holders = numbers.where(~as_above, 0).cummax(0).values
    first = torch.empty_like(ids)
    first[sequences[real]] = sequences.gather(0, holders)[real]
    return first if int((~as_above & real).sum()) <= MERGING_PAYS * len(ids) else None
