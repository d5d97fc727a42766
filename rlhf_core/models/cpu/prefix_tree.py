"""Sequences as a tree: tokens with the same tokens before them are one, whatever sequences they are of.

What a causal model computes of a token follows from that token and those before it. So what sequences of a batch begin with alike, such as
a system prompt, a template's tokens or the first words of a question, has to be computed once only.
"""

from __future__ import annotations

import torch

# Where more than this part of the tokens is left, they stay as they were. Measured in one thread, forward and backward, of a small and a
# medium model: 0.96 left took 0.96 to 0.98 of the time, 0.75 took 0.78 to 0.87, half 0.56 to 0.74.
MERGING_PAYS = 0.97


def merged(sequences: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
    """For each token the first one that has the same tokens before it, maybe itself; None where that spares too few tokens.

    Args:
        sequences: [S, W] int64, each sequence's tokens by their numbers, -1 after its end. Every token is in one of them, and what precedes
            a token is the same in all that it is in.
        ids: [N] int64, of each token.
    Returns:
        [N] int64.
    """
    real = sequences >= 0
    ids_of = ids[sequences].where(real, -1)
    rows = ids_of.tolist()
    order = sorted(range(len(rows)), key=rows.__getitem__)  # those that begin alike are side by side
    sequences, ids_of, real = sequences[order], ids_of[order], real[order]
    as_above = torch.zeros_like(real)
    as_above[1:] = (ids_of[1:] == ids_of[:-1]).cumprod(1).bool() & real[1:]
    numbers = torch.arange(len(order))[:, None].expand_as(sequences)
    holders = numbers.where(~as_above, 0).cummax(0).values
    first = torch.empty_like(ids)
    first[sequences[real]] = sequences.gather(0, holders)[real]
    return first if int((~as_above & real).sum()) <= MERGING_PAYS * len(ids) else None
