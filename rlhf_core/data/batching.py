"""Which examples form a batch, and how a batch is cut into micro-batches by a token budget.

All functions are pure: a resumed run gets the same batch for step n as an uninterrupted one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

WORTH_DIVIDING = 1024  # tokens: the operations on fewer are too short to gain from a second worker
SLACK = 1.05  # over the mean size of parts: examples aren't divided, so equal parts can't be exact


class Part(NamedTuple):
    """A micro-batch: positions of its examples.

    counts: False: the examples belong to another micro-batch too. The pass only keeps a rank in step with the others, since with ZeRO a
        forward or backward pass is a collective; its results aren't used.
    """

    positions: list[int]
    counts: bool = True


def batch_indices(step: int, *, batch_size: int, num_examples: int, seed: int) -> list[int]:
    """Return the examples of one optimizer step: `stream_indices` in batches; a batch may span two epochs."""
    return stream_indices(step * batch_size, batch_size, num_examples=num_examples, seed=seed)


def stream_indices(start: int, count: int, *, num_examples: int, seed: int) -> list[int]:
    """Return `count` examples from position `start` of an endless stream; each epoch is a new seeded permutation.

    Raises:
        ValueError: `num_examples` is 0.
    """
    if num_examples < 1:
        raise ValueError("training data: expected at least 1 example, got 0; see what prepare_data kept and what was too long")
    positions = range(start, start + count)
    permutations = {
        epoch: _permutation(num_examples, seed, epoch) for epoch in range(start // num_examples, (start + count - 1) // num_examples + 1)
    }
    return [int(permutations[p // num_examples][p % num_examples]) for p in positions]


@functools.lru_cache(maxsize=2)
def _permutation(num_examples: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_examples)


def even_microbatches(lengths: Sequence[int], *, max_tokens: int, multiple: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Return `microbatches` of about equal size, their number a multiple of `multiple` if possible; a single one stays single.

    Args:
        multiple: micro-batches that run at the same time.
    """
    parts = microbatches(lengths, max_tokens=max_tokens, rows=rows)
    if len(parts) in (1, len(lengths)) or multiple == 1:
        return parts
    counts = [1] * len(lengths) if rows is None else rows
    padded = sum(lengths[part[0]] * sum(counts[i] for i in part) for part in parts)
    number = -(-len(parts) // multiple) * multiple
    even = microbatches(lengths, max_tokens=min(max_tokens, int(SLACK * padded / number)), rows=rows)
    return parts if len(even) % multiple and not len(parts) % multiple else even


def microbatches(lengths: Sequence[int], *, max_tokens: int, rows: Sequence[int] | None = None) -> list[list[int]]:
    """Cut examples into micro-batches of at most `max_tokens` padded tokens, similar lengths together.

    An example longer than the budget gets its own micro-batch. Returns lists of positions in `lengths`, each position once, the longest
    first, so that memory peaks at the start.

    Args:
        lengths: of each example's longest row.
        rows: number of rows of each example; None: one each.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    count = width = 0
    for i in order:
        added = 1 if rows is None else rows[i]
        if batches and (count + added) * width <= max_tokens:
            batches[-1].append(i)
            count += added
        else:
            batches.append([i])
            count, width = added, lengths[i]
    return batches


def neighbour_microbatches(sequences: Sequence[list[int]], *, max_tokens: int, multiple: int) -> list[list[int]]:
    """Return micro-batches of about equal size, sequences that begin alike together, for a backend that computes a common beginning once.

    Tokens count without padding, and common ones as often as they occur. Returns lists of positions in `sequences`, as `microbatches`.

    Args:
        multiple: as of `even_microbatches`. Few tokens, less than WORTH_DIVIDING, are one micro-batch.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)
    total = sum(map(len, sequences))
    number = math.ceil(total / max_tokens)
    if total >= WORTH_DIVIDING:
        number = math.ceil(number / multiple) * multiple
    parts: list[list[int]] = []
    tokens = done = 0
    for i in order:
        length = len(sequences[i])
        # the part's share of all tokens, or the budget
        full = parts and (done >= len(parts) * total / number or tokens + length > max_tokens)
        if not parts or full:
            parts.append([])
            tokens = 0
        parts[-1].append(i)
        tokens, done = tokens + length, done + length
    return parts


def spread(lengths: Sequence[int], *, max_tokens: int, ranks: int, rows: Sequence[int] | None = None) -> list[list[Part]]:
    """Return micro-batches of a batch for each rank: equally many for all, and about as many padded tokens.

    With one rank they are those of `microbatches`. With several they become smaller, until their number is a multiple of the number of
    ranks; where there are fewer examples than that, the shortest example is repeated in micro-batches that don't count.

    Args:
        lengths, max_tokens, rows: as in `microbatches`.
    """
    parts = microbatches(lengths, max_tokens=max_tokens, rows=rows)
    if ranks == 1 or not parts:
        return [[Part(part) for part in parts] for _ in range(ranks)]

    def tokens(part: list[int]) -> int:
        return lengths[part[0]] * (len(part) if rows is None else sum(rows[i] for i in part))

    number = ranks * math.ceil(len(parts) / ranks)
    even = min(max_tokens, int(SLACK * sum(map(tokens, parts)) / number))
    parts = microbatches(lengths, max_tokens=even, rows=rows)
    while len(parts) % ranks and any(len(part) > 1 for part in parts):
        largest = max((part for part in parts if len(part) > 1), key=tokens)
        parts.remove(largest)
        half = len(largest) // 2
        parts += [largest[:half], largest[half:]]
    ordered = [Part(part) for part in sorted(parts, key=tokens, reverse=True)]
    shortest = min(range(len(lengths)), key=lambda i: tokens([i]))
    ordered += [Part([shortest], counts=False)] * (-len(parts) % ranks)
    return [[ordered[i] for i in own] for own in deal_out([tokens(part.positions) for part in ordered], ranks=ranks)]


def deal_out(sizes: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Return positions of the items of each rank, ascending: equally many, give or take one, of about the same size in sum."""
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    order = sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))
    for start in range(0, len(order), ranks):  # the largest of these goes to the rank with the least so far
        emptiest = sorted(range(ranks), key=lambda r: loads[r])
        for receiver, i in zip(emptiest, order[start : start + ranks], strict=False):
            shares[receiver].append(i)
            loads[receiver] += sizes[i]
    return [sorted(own) for own in shares]


def deal_out_groups(groups: Sequence[Sequence[int]], sizes: Sequence[int], *, ranks: int) -> list[list[int]]:
    """Deal out groups of items as `deal_out` does items: whole ones if every rank gets as many, otherwise single items.

    Args:
        groups: positions in `sizes`.
    """
    dealt = groups if len(groups) % ranks == 0 else [[i] for group in groups for i in group]
    shares = deal_out([sum(sizes[i] for i in group) for group in dealt], ranks=ranks)
    return [[i for number in own for i in dealt[number]] for own in shares]
