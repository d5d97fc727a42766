"""Checks what scorers need, before anything expensive starts. No model is loaded here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.config import Params, ScorerConfig
from rlhf_core.data.places import locate
from rlhf_core.progress import Reasons
from rlhf_core.scorers.reward.members import check_ready_made, check_scores_steps, member_folders
from rlhf_core.scorers.text import ScoreItem, TextScorers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIAL_SECONDS = 30.0  # of a service
_TRIAL = ScoreItem(
    prompt="What is 2 + 2?",
    messages=[{"role": "user", "content": "What is 2 + 2?"}],
    response="4",
    label="4",
    metadata={"id": "trial", "source": "trial", "finished": True, "response_length": 1},
    rendered=("What is 2 + 2?\n", "What is 2 + 2?\n4"),
    other="5",
)


def model_folders(scorers: list[ScorerConfig], reward_model: Path) -> dict[str, Path]:
    """Return the folder of each scorer of kind reward_model, by the scorer's name; without a path it is the chain's own reward model."""
    return {s.name: reward_model if s.path is None else ready_made_folder(s) for s in scorers if s.kind == "reward_model"}


def ready_made_folder(scorer: ScorerConfig) -> Path:
    """Return the folder of a ready-made reward model. A relative path is resolved like data paths, in a run's worktree too."""
    return locate(scorer.path)


def uses_own_reward_model(scorers: list[ScorerConfig]) -> bool:
    return any(s.kind == "reward_model" and s.path is None for s in scorers)


def check_scorers(
    scorers: list[ScorerConfig], *, reward_model: Path, source_judges: dict[str, str], has_labels: Callable[[], bool]
) -> None:
    """Check reward models, functions, labels and services. Functions are loaded; for ready-made reward models only the settings are read.

    Args:
        has_labels: function that returns whether any prompt has a label; called only if a scorer compares with labels.
    Raises:
        ValueError: a reward model's folder, a function or every label is missing, or a ready-made reward model or a service can't be used.
    """
    by_name = {s.name: s for s in scorers}
    for name, folder in model_folders(scorers, reward_model).items():
        if not (folder / "config.json").is_file():
            raise ValueError(
                f"scorer {name}: expected a reward model's folder, got no config.json at {folder}; correct its path, which is relative to "
                "the project's folder"
            )
        check_scores_steps(by_name[name], folder)
        if (found := len(member_folders(folder))) < (wanted := by_name[name].members):
            raise ValueError(f"scorer {name}: expected an ensemble of {wanted} at {folder}, got {found}; lower members")
    for scorer in scorers:
        if scorer.kind == "reward_model" and scorer.path is not None:
            check_ready_made(scorer, ready_made_folder(scorer))
    TextScorers(0, scorers, source_judges)
    check_labels(scorers, has_labels)
    try_services(scorers)


def check_labels(scorers: list[ScorerConfig], has_labels: Callable[[], bool]) -> None:
    """Check that a prompt has a label if a scorer compares with labels; see `check_scorers`."""
    comparing = [s.name for s in scorers if s.reads_label]
    if comparing and not has_labels():
        raise ValueError(f"scorers {comparing}: expected prompts with labels, got none with one; map the column `label` of a source")


def try_services(scorers: list[ScorerConfig]) -> dict[str, dict[str, str]]:
    """Ask each service for the score of a made-up response. Returns scorer's name -> what its service says of itself, and its `url`.

    Raises:
        ValueError: a service doesn't answer as it should, or its key is missing.
    """
    found = {}
    for scorer in (s for s in scorers if s.url is not None):
        from rlhf_core.scorers.http import HttpScorer  # imports aiohttp
        from rlhf_core.scorers.llm_judge.scorer import LlmJudge

        service = (HttpScorer if scorer.kind == "http" else LlmJudge)(scorer, Reasons(scorer.name))
        found[scorer.name] = {"url": scorer.url, **service.trial(_TRIAL, seconds=TRIAL_SECONDS)}
    return found


def try_teachers(params: Params, own: PreTrainedTokenizerBase, texts: Sequence[str] = ()) -> None:
    """Ask each teacher at an address about these texts and its vocabulary.

    Args:
        own: tokenizer of the policy.
    Raises:
        ValueError: one can't be asked, or has other tokens.
    """
    for key, service in params.teacher_services.items():
        from rlhf_core.scorers.teacher import TeacherClient  # imports aiohttp

        TeacherClient(service, top=params.rl.distillation.top_k or 0, vocabulary=len(own)).check(texts, own, key=key)
