"""What scorers need to be there, found out before anything expensive starts: no model is loaded here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf_core.config import LABEL_SCORERS, ScorerConfig
from rlhf_core.data.places import locate
from rlhf_core.models.folder import read_settings
from rlhf_core.scorers.members import member_folders
from rlhf_core.scorers.text import TextScorers


def model_folders(scorers: list[ScorerConfig], reward_model: Path) -> dict[str, Path]:
    """The reward model of each scorer of that kind, by the scorer's name; the chain's own where it names no folder."""
    return {s.name: reward_model if s.path is None else ready_made_folder(s) for s in scorers if s.kind == "reward_model"}


def ready_made_folder(scorer: ScorerConfig) -> Path:
    """Of a reward model from elsewhere: found as data are, from a run's worktree too."""
    return locate(scorer.path)


def uses_own_reward_model(scorers: list[ScorerConfig]) -> bool:
    return any(s.kind == "reward_model" and s.path is None for s in scorers)


def check_scorers(
    scorers: list[ScorerConfig], *, reward_model: Path, source_judges: dict[str, str], has_labels: Callable[[], bool]
) -> None:
    """What the scorers need is there; nothing is loaded but functions, and of reward models from elsewhere their settings are read.

    Args:
        has_labels: whether any prompt has a label; asked only where a scorer compares with it.
    Raises:
        ValueError: a reward model's folder, a function or every label is missing, or a reward model from elsewhere can't be read.
    """
    members = {s.name: s.members for s in scorers}
    for name, folder in model_folders(scorers, reward_model).items():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"scorer {name}: expected a reward model's folder, got none with a config.json at {folder}; correct "
                "its path, relative to the project's folder"
            )
        if (found := len(member_folders(folder))) < members[name]:
            raise ValueError(f"scorer {name}: expected an ensemble of {members[name]} at {folder}, got {found}; lower members")
    for scorer in scorers:
        if scorer.kind == "reward_model" and scorer.path is not None:
            check_ready_made(scorer, ready_made_folder(scorer))
    TextScorers(0, scorers, source_judges)
    comparing = [s.name for s in scorers if s.kind in LABEL_SCORERS]
    if comparing and not has_labels():
        raise ValueError(
            f"scorers {comparing}: expected prompts with labels to compare with, got not a single one; map the column `label` of a source"
        )


def check_ready_made(scorer: ScorerConfig, folder: Path) -> None:
    """What files tell of a reward model from elsewhere; the rest is found out when it is loaded (`models.score_head`).

    Raises:
        ValueError: no score can be had from it as it was trained, or not without a label.
    """
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
