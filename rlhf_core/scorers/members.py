"""The members of an ensemble of reward models: their folders, and the combined score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def member_folders(folder: Path) -> list[Path]:
    """The folders of a reward model's members: the model's own folder, then its subfolders member_1, member_2 and so on."""
    further = [p for p in folder.glob("member_*") if (p / "config.json").is_file()]
    return [folder, *sorted(further, key=lambda p: int(p.name.removeprefix("member_")))]


def combine_members(scores: torch.Tensor, *, std_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Score of an ensemble, mean - std_coef * std over the members, and the std, which measures disagreement. [N] each.

    The std is biased (denominator: number of members), and 0 with one member. The penalty keeps a policy from responses that only some
    members score highly.
    Source: Coste et al. 2024, https://arxiv.org/abs/2310.02743, there with the variance; with the standard deviation
    Eisenstein et al. 2024, https://arxiv.org/abs/2312.09244

    Args:
        scores: [N, members].
    """
    std = scores.std(1, correction=0)
    return scores.mean(1) - std_coef * std, std
