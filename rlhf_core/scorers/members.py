"""The members of a reward model: where they are, and their scores as one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def member_folders(folder: Path) -> list[Path]:
    """Of a reward model: its own folder, and those of an ensemble's further members beside its files, in their order."""
    further = [p for p in folder.glob("member_*") if (p / "config.json").is_file()]
    return [folder, *sorted(further, key=lambda p: int(p.name.removeprefix("member_")))]


def combine_members(scores: torch.Tensor, *, std_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """An ensemble's score, mean - std_coef * std over its members, and that std: how far they disagree. [N] each.

    std has the number of members in its denominator; with one member it is 0. Lower scores where the members disagree keep a policy from
    what only some of them like.
    Source: Coste et al. 2024, https://arxiv.org/abs/2310.02743, there with the variance; with the standard deviation
    Eisenstein et al. 2024, https://arxiv.org/abs/2312.09244

    Args:
        scores: [N, members].
    """
    std = scores.std(1, correction=0)
    return scores.mean(1) - std_coef * std, std
