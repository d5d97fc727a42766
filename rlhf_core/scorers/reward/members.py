"""Folders of reward models and of an ensemble's members, and the combined score."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import ScorerConfig
from rlhf_core.models.folder import read_settings, step_separator

if TYPE_CHECKING:
    import torch


def member_folders(folder: Path) -> list[Path]:
    """Return the folders of a reward model's members: its own folder, then the subfolders member_1, member_2 and so on."""
    further = [p for p in folder.glob("member_*") if (p / "config.json").is_file()]
    return [folder, *sorted(further, key=lambda p: int(p.name.removeprefix("member_")))]


def combine_members(scores: torch.Tensor, *, std_coef: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the score of an ensemble, mean - std_coef * std over the members, and the std, which measures disagreement. [N] each.

    The std is biased (denominator: number of members), and 0 with one member. The penalty keeps a policy from responses that only some
    members score highly.
    Source: Coste et al. 2024, https://arxiv.org/abs/2310.02743, who subtract the variance; Eisenstein et al. 2024,
    https://arxiv.org/abs/2312.09244, who subtract the standard deviation

    Args:
        scores: [N, members].
    """
    std = scores.std(1, correction=0)
    return scores.mean(1) - std_coef * std, std


def check_ready_made(scorer: ScorerConfig, folder: Path) -> None:
    """Check a ready-made reward model by its files. Loading it checks the rest.

    Raises:
        ValueError: the model needs a label or a chat template, is an encoder-decoder, or scores no steps where the scorer has `steps`.
    """
    check_scores_steps(scorer, folder)
    config = read_settings(folder, "config.json")
    names = [str(name) for name in (config.get("id2label") or {}).values()]
    if scorer.label is None and len(names) > 1:
        raise ValueError(
            f"scorer {scorer.name}: expected a label of {folder}, which has {', '.join(names)}, got none; set label to the one to reward"
        )
    if config.get("is_encoder_decoder"):
        raise ValueError(f"scorer {scorer.name}: expected an encoder or a decoder at {folder}, got an encoder-decoder; use another model")
    has_template = (folder / "chat_template.jinja").is_file() or (folder / "additional_chat_templates").is_dir()
    if not has_template and not read_settings(folder, "tokenizer_config.json").get("chat_template"):
        raise ValueError(
            f"scorer {scorer.name}: expected a chat template at {folder}, got none; add a chat_template.jinja that writes what "
            "the model was trained on (docs/scorers.md)"
        )


def check_scores_steps(scorer: ScorerConfig, folder: Path) -> None:
    """Check that the model of a scorer with `steps` is a process reward model.

    Raises:
        ValueError: it scores whole responses.
    """
    if scorer.steps is not None and step_separator(folder) is None:
        raise ValueError(
            f"scorer {scorer.name}: expected a process reward model at {folder} with steps: {scorer.steps}, got one that scores whole "
            "responses; remove steps"
        )


def check_separator(folder: Path, separator: str | None) -> None:
    """Check that `reward.step_separator` is that of the ready-made reward model in a folder.

    Raises:
        ValueError: it is another one.
    """
    if (own := step_separator(folder)) != separator:
        raise ValueError(
            f"reward.step_separator: expected that of the model at reward.path, {own!r}, got {separator!r}; set it to the model's, which "
            "is null for one that scores whole responses"
        )
