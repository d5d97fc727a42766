"""Loads the members of reward models, and computes their scores."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rlhf_core.data.tokens import pictures_beside
from rlhf_core.models.batch import collate_steps, collate_tokens
from rlhf_core.models.build import load_scalar_model
from rlhf_core.models.forward import ScalarModule
from rlhf_core.models.vision import Sight
from rlhf_core.models.weights import frozen
from rlhf_core.scorers.reward.members import member_folders

MICROBATCH_TOKENS = 8192  # of a forward pass outside training

log = logging.getLogger("rlhf")


@torch.no_grad()
def score_sequences(
    module: ScalarModule,
    sequences: list[list[int] | None],
    *,
    pad_id: int,
    microbatch_tokens: int,
    device: torch.device,
    passes: Callable[[int], int] | None = None,
    ends: torch.Tensor | None = None,
    sight: Sight | None = None,
) -> torch.Tensor:
    """Return raw scores [N] of N sequences on the CPU; NaN for a sequence that is None or exceeds the model's positions.

    A sequence has the same score in any batch, up to rounding; `module.score_head` says at which position the score is read.

    Args:
        ends: [N, S], positions of the ends of steps, NO_STEP for none: the scores are theirs, [N, S], with NaN where there is no step.
        passes: for a model whose forward pass is a collective, function that returns the largest number of passes of any rank, given this
            rank's. This rank makes the missing passes with a sequence of no meaning. None: it is no collective.
        sight: of a model that sees; sequences with pictures are `SeenIds`.
    """
    if ends is not None:
        module.check_scores_tokens("process reward model", "take a decoder with a linear score layer")
    if sight is None and any(map(pictures_beside, filter(None, sequences))):
        raise ValueError("reward model: expected texts alone for a model that doesn't see, got pictures; take one that sees")
    known = [i for i, ids in enumerate(sequences) if ids is not None and not _is_too_long(module, ids)]
    scores = torch.full((len(sequences),) if ends is None else ends.shape, float("nan"))

    def forward(part: list[int]) -> None:
        rows = [known[i] for i in part]
        if ends is not None:
            batch, places = collate_steps([sequences[i] for i in rows], ends[rows], pad_id=pad_id)
            scores[rows] = module(batch.to(device)).cpu()[places.clamp(min=0)].where(places >= 0, torch.nan)
            return
        last = [module.score_head.last_position(sequences[i]) for i in rows]
        batch = collate_tokens([sequences[i] for i in rows], last, pad_id=pad_id, ends=[i + 1 for i in last])
        if sight is not None:
            batch = replace(batch, pictures=sight.beside([sequences[i] for i in rows]))
        scores[rows] = module(batch.to(device)).cpu()

    own = [sequences[i] for i in known]
    together = passes is None or module.score_head.batchable  # otherwise the model's forward runs once for each sequence
    parts = module.backend.microbatches(own, max_tokens=microbatch_tokens) if together else [[i] for i in range(len(own))]
    missing = 0 if passes is None else passes(len(parts)) - len(parts)  # before the passes: it is a collective too
    module.backend.map(forward, parts)
    for _ in range(missing):
        module(collate_tokens([[0, 1, 2, 3]], [3], pad_id=pad_id).to(device))
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
    """Return the first `count` members of a reward model (None: all), frozen. A model that is no ensemble has one member.

    Args:
        label: as for ScalarModule.
    Raises:
        ValueError: a folder holds no model with scores.
    """
    options = {"trust_remote_code": trust_remote_code, "training_dtype": training_dtype}
    return [frozen(load_member(member, label, **options), device=device, dtype=dtype) for member in member_folders(folder)[:count]]


def load_member(folder: Path, label: str | int | None, **options: Any) -> ScalarModule:
    """Return a reward model on the CPU.

    Args:
        label: as for ScalarModule.
        options: arguments of `load_scalar_model`.
    Raises:
        ValueError: the folder holds no model with scores.
    """
    model = load_scalar_model(folder, **options)
    try:
        return ScalarModule(model, label=label)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def score_by_members(members: Sequence[ScalarModule], sequences: list[list[int] | None], **options: Any) -> torch.Tensor:
    """Return raw scores [N, members] on the CPU, or [N, members, S] with `ends`; options are those of `score_sequences`."""
    return torch.stack([score_sequences(member, sequences, **options) for member in members], 1)
