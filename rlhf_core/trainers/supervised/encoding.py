"""Texts tokenized in the background while models load: each rank tokenizes a share on its cores and gets the rest from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_core.data.tokens import EncodedTurns
from rlhf_core.engines.deepspeed.ranks import all_gather, rank, world_size
from rlhf_core.models.tokenizer import all_cores

Begin = Callable[..., Callable[[], EncodedTurns]]

_WORKER = ThreadPoolExecutor(1, thread_name_prefix="tokenize")  # one, since a tokenizer can't be used by two threads at once


def in_background(
    encode: Callable[..., EncodedTurns], tokenizer: PreTrainedTokenizerBase, turns: Sequence[Any]
) -> Callable[[], EncodedTurns]:
    """Start to encode; `encode` and `tokenizer` belong to the background until the result is there.

    Args:
        turns: what `encode` takes, the same on every rank.
    Returns:
        A function that waits for what `encode(tokenizer, turns)` returns. It is a collective, and on every rank raises what any raised.
    """
    borders = [len(turns) * r // world_size() for r in range(world_size() + 1)]
    own = turns[borders[rank()] : borders[rank() + 1]]

    def work() -> tuple[EncodedTurns | None, Exception | None]:
        try:
            with all_cores(torch.get_num_threads()):
                return encode(tokenizer, own), None
        except Exception as error:  # sent to the other ranks, which would wait forever
            return None, error

    begun = _WORKER.submit(work)

    def result() -> EncodedTurns:
        shares = all_gather(begun.result())
        for _, error in shares:
            if error is not None:
                raise error
        found, *others = (share for share, _ in shares)
        for share in others:
            found.extend(share)
        return found

    return result


def at_once(encode: Callable[..., EncodedTurns], tokenizer: PreTrainedTokenizerBase, turns: Sequence[Any]) -> Callable[[], EncodedTurns]:
    """Encode as `in_background` does, in this thread and without other ranks."""
    encoded = encode(tokenizer, turns)
    return lambda: encoded
