"""Reward models as scorers: loading an ensemble's members and their forward passes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_core.data.batching import even_microbatches
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import frozen, load_scalar_model
from rlhf_core.models.forward import ScalarModule
from rlhf_core.scorers.members import member_folders

MICROBATCH_TOKENS = 8192  # of a forward pass outside training

log = logging.getLogger("rlhf")


@torch.no_grad()
def score_sequences(
    module: ScalarModule, sequences: list[list[int] | None], *, pad_id: int, microbatch_tokens: int, device: torch.device
) -> torch.Tensor:
    """Raw scores [len(sequences)] on the CPU; NaN where the sequence is None or exceeds the model's positions.

    A sequence has the same score in any batch, up to rounding; `module.score_head` says at which position it is read.
    """
    known = [i for i, ids in enumerate(sequences) if ids is not None and not _is_too_long(module, ids)]
    scores = torch.full((len(sequences),), float("nan"))

    def forward(part: list[int]) -> None:
        rows = [known[i] for i in part]
        last = [module.score_head.last_position(sequences[i]) for i in rows]
        batch = collate_tokens([sequences[i] for i in rows], last, pad_id=pad_id, ends=[i + 1 for i in last])
        scores[rows] = module(batch.to(device)).cpu()

    lengths = [len(sequences[i]) for i in known]
    parts = even_microbatches(lengths, max_tokens=microbatch_tokens, multiple=module.backend.workers)
    module.backend.map(forward, parts)
    return scores


def _is_too_long(module: ScalarModule, ids: list[int]) -> bool:
    longest = module.score_head.max_tokens
    if longest is None or len(ids) <= longest:
        return False
    _say_too_long(type(module.model).__name__, longest)
    return True


@cache
def _say_too_long(architecture: str, longest: int) -> None:
    log.warning(
        "reward model: a sequence of more than %d tokens has no score: this %s has no positions for it, or other rotary frequencies",
        *(longest, architecture),
    )


def load_members(
    folder: Path,
    *,
    device: torch.device,
    trust_remote_code: bool,
    count: int | None = None,
    training_dtype: str = "float32",
    dtype: torch.dtype = torch.float32,
    label: str | int | None = None,
) -> list[ScalarModule]:
    """The first `count` members of a reward model (None: all), frozen. A model that is no ensemble has one member.

    Args:
        label: of ScalarModule.
    Raises:
        ValueError: a folder holds no model with scores.
    """
    return [
        frozen(_load_module(member, label, trust_remote_code=trust_remote_code, training_dtype=training_dtype), device=device, dtype=dtype)
        for member in member_folders(folder)[:count]
    ]


def _load_module(folder: Path, label: str | int | None, **how: Any) -> ScalarModule:
    model = load_scalar_model(folder, **how)
    try:
        return ScalarModule(model, label=label)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def score_by_members(members: Sequence[ScalarModule], sequences: list[list[int] | None], **how: Any) -> torch.Tensor:
    """[len(sequences), members] raw scores on the CPU; NaN where the sequence is None. Args as of `score_sequences`."""
    return torch.stack([score_sequences(member, sequences, **how) for member in members], 1)
