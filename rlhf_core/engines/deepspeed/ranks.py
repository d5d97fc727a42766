"""What ranks share: micro-batches, sums, decisions and objects. With one rank nothing is sent.

Ranks that share each sequence (sequence_parallel.py) have the same micro-batches and the same results; the first of them contributes to
sums.

Every function but `rank`, `is_first`, `world_size`, `threads_of_rank`, `data_parallel_size`, `own_parts` and `total` is a collective, which
all ranks call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from rlhf_core.data.batching import Part, spread
from rlhf_core.engines.deepspeed.engine import sum_over_ranks
from rlhf_core.engines.deepspeed.sequence_parallel import shared_by

Item = TypeVar("Item")
Value = TypeVar("Value")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def data_parallel_size() -> int:
    """Return the number of ranks with micro-batches of their own; a group of ranks that share sequences counts as one."""
    return world_size() // shared_by()


def is_first() -> bool:
    return rank() == 0


def threads_of_rank(threads: int) -> int:
    """Return this rank's part of the CPU cores that all ranks share; at least 1."""
    return max(1, threads // world_size())


def own_parts(lengths: Sequence[int], *, max_tokens: int, rows: Sequence[int] | None = None) -> list[Part]:
    """Return this rank's micro-batches of examples that every rank knows, as `spread` distributes them."""
    return spread(lengths, max_tokens=max_tokens, rows=rows, ranks=data_parallel_size())[rank() // shared_by()]


def merged(values: torch.Tensor) -> torch.Tensor:
    """Return a tensor of which each rank has filled its own part and left the rest 0: the sum over ranks, on the CPU."""
    return values if world_size() == 1 else sum_over_ranks(_contribution(values)).cpu()


def total(values: Sequence[torch.Tensor]) -> float:
    """Return the sum of this rank's values, one for each micro-batch, in their order.

    Call it after all passes: reading a number waits for the GPU, which would be idle while the next micro-batch is made.
    """
    return sum(torch.stack(list(values)).tolist(), 0.0) if values else 0.0


def summed(*values: float) -> list[float]:
    """Return each value summed over ranks, in float64. A group of ranks that share sequences counts once."""
    if world_size() == 1:
        return list(values)
    return sum_over_ranks(_contribution(torch.tensor(values, dtype=torch.float64))).tolist()


def _contribution(values: torch.Tensor) -> torch.Tensor:
    """Return what this rank adds to a sum: zeros if another rank of its group has the same values and adds them."""
    return values if rank() % shared_by() == 0 else torch.zeros_like(values)


def wait_for_all() -> None:
    """Wait until every rank has called this."""
    summed(0.0)


def on_any(flag: bool) -> bool:
    """Return whether the flag is set on at least one rank."""
    return flag if world_size() == 1 else bool(sum_over_ranks(torch.tensor(float(flag))) > 0)


def gathered(columns: Sequence[torch.Tensor], positions: Sequence[int], total: int) -> list[torch.Tensor]:
    """Return the rows of all ranks, on the CPU.

    Args:
        columns: [n] each, this rank's rows; numbers that float64 represents.
        positions: positions of this rank's rows among all `total`; no two ranks have the same.
    Returns:
        The columns [total] in the order of the positions. With one rank, the given columns in their own order.
    """
    if world_size() == 1:
        return [column.cpu() for column in columns]
    rows = torch.zeros(total, len(columns), dtype=torch.float64)
    rows[torch.tensor(positions, dtype=torch.long)] = torch.stack([column.cpu().double() for column in columns], 1)
    return [column.to(given.dtype) for column, given in zip(merged(rows).unbind(1), columns, strict=True)]


def from_first(value: Value) -> Value:
    """Return rank 0's value on every rank. It is pickled; other ranks' values are ignored."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def all_gather(value: Value) -> list[Value]:
    """Return every rank's value on every rank, rank 0's first. The values are pickled."""
    if world_size() == 1:
        return [value]
    values: list = [None] * world_size()
    dist.all_gather_object(values, value)
    return values


def in_shares(items: Sequence[Item], compute: Callable[[list[Item]], Sequence[Value]], *, ranks_per_share: int = 1) -> list[Value]:
    """Return one result for each item, on every rank and in the items' order. Of N ranks each computes every Nth item.

    Args:
        items: items, which are the same on every rank.
        compute: function that returns one result for each item it gets, at least one. Results are pickled. It may be a collective only if
            all ranks get equally many items.
        ranks_per_share: number of consecutive ranks that have one share, which the first of them computes.
    """
    ranks = world_size() // ranks_per_share
    own = list(items[rank() // ranks_per_share :: ranks]) if rank() % ranks_per_share == 0 else []
    found = all_gather(list(compute(own)) if own else [])[::ranks_per_share]
    return [found[i % ranks][i // ranks] for i in range(len(items))]


def on_rank_zero(call: Callable[[], Value], *, subject: str) -> Value:
    """Call a function on rank 0 while the other ranks wait, and return its result, which is pickled, on every rank.

    Args:
        subject: what the other ranks' error is about.
    Raises:
        RuntimeError: on other ranks, if the call raised on rank 0; rank 0 raises the error itself.
    """
    if world_size() == 1:
        return call()
    result, failed = None, None
    if is_first():
        try:
            result = call()
        except Exception as error:  # raised below, on all ranks, which wait for this one
            failed = error
    problem, result = from_first((None if failed is None else f"{type(failed).__name__}: {failed}", result))
    if failed is not None:
        raise failed
    if problem is not None:
        raise RuntimeError(f"{subject}: expected rank 0 to succeed, got {problem}")
    return result
