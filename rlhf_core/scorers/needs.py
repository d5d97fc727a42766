"""What scorers need to be there, found out before anything expensive starts: no model is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf_core.config import LABEL_SCORERS, ScorerConfig
from rlhf_core.scorers.members import member_folders
from rlhf_core.scorers.text import TextScorers


def model_folders(scorers: list[ScorerConfig], reward_model: Path) -> dict[str, Path]:
    """The reward model of each scorer of that kind, by the scorer's name; the chain's own where it names no folder."""
    return {s.name: reward_model if s.path is None else Path(s.path) for s in scorers if s.kind == "reward_model"}


def uses_own_reward_model(scorers: list[ScorerConfig]) -> bool:
    return any(s.kind == "reward_model" and s.path is None for s in scorers)


def check_scorers(
    scorers: list[ScorerConfig], *, reward_model: Path, source_judges: dict[str, str], has_labels: Callable[[], bool]
) -> None:
    """What the scorers need is there; nothing is loaded but functions.

    Args:
        has_labels: whether any prompt has a label; asked only where a scorer compares with it.
    Raises:
        ValueError: a reward model's folder, a function or every label is missing.
    """
    members = {s.name: s.members for s in scorers}
    for name, folder in model_folders(scorers, reward_model).items():
        if not (folder / "config.json").is_file():
            raise ValueError(f"scorer {name}: expected a reward model's folder, got none with a config.json at {folder}; correct its path")
        if (found := len(member_folders(folder))) < members[name]:
            raise ValueError(f"scorer {name}: expected an ensemble of {members[name]} at {folder}, got {found}; lower members")
    TextScorers(0, scorers, source_judges)
    comparing = [s.name for s in scorers if s.kind in LABEL_SCORERS]
    if comparing and not has_labels():
        raise ValueError(
            f"scorers {comparing}: expected prompts with labels to compare with, got not a single one; map the column `label` of a source"
        )
