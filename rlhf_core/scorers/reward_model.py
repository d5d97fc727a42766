"""Scores by a reward model: loading its members and asking them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rlhf_core.data.batching import even_microbatches
from rlhf_core.models.build import frozen, load_scalar_model
from rlhf_core.models.side_by_side import AT_A_TIME, can_run_side_by_side, side_by_side
from rlhf_core.models.wrappers import ScalarModule, collate_tokens
from rlhf_core.scorers.members import member_folders


@torch.no_grad()
def score_sequences(
    module: ScalarModule, sequences: list[list[int] | None], *, pad_id: int, microbatch_tokens: int, device: torch.device
) -> torch.Tensor:
    """Raw scores [len(sequences)] on the CPU, read at the last token of each; NaN where the sequence is None.

    The same sequence gets the same score in any batch, up to rounding: attention is causal and padding comes after.
    """
    known = [i for i, ids in enumerate(sequences) if ids is not None]
    scores = torch.full((len(sequences),), float("nan"))
    at_once = can_run_side_by_side(module)

    def score(part: list[int]) -> None:
        rows = [known[i] for i in part]
        batch = collate_tokens([sequences[i] for i in rows], [len(sequences[i]) - 1 for i in rows], pad_id=pad_id)
        scores[rows] = module(batch.to(device)).cpu()

    lengths = [len(sequences[i]) for i in known]
    parts = even_microbatches(lengths, max_tokens=microbatch_tokens, multiple=AT_A_TIME if at_once else 1)
    side_by_side(*(partial(score, part) for part in parts), at_once=at_once)
    return scores


def load_members(
    folder: Path,
    *,
    device: torch.device,
    trust_remote_code: bool,
    count: int | None = None,
    training_dtype: str = "float32",
    dtype: torch.dtype = torch.float32,
) -> list[ScalarModule]:
    """The first `count` members of a reward model (None: all), for scoring alone; one where it is no ensemble."""
    how = {"trust_remote_code": trust_remote_code, "training_dtype": training_dtype}
    modules = (ScalarModule(load_scalar_model(member, **how)) for member in member_folders(folder)[:count])
    return [frozen(module, device=device, dtype=dtype) for module in modules]


def score_by_members(members: Sequence[ScalarModule], sequences: list[list[int] | None], **how: Any) -> torch.Tensor:
    """[len(sequences), members] raw scores on the CPU; NaN where the sequence is None. Args as of `score_sequences`."""
    return torch.stack([score_sequences(member, sequences, **how) for member in members], 1)
