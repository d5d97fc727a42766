"""Which sections of params.yaml each stage of dvc.yaml reads, and what dvc.yaml says with params filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlhf_core.config.base import ConfigError
from rlhf_core.config.reading import read_yaml_text

# Which sections of params.yaml, or single keys, each stage reads; dvc.yaml says the same (a contract test compares them).
STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "prepare_data": ("seed", "data", "model", "validation.max_dropped_fraction"),
    "validate_data": ("validation", "model", "reward"),
    "check_model": (
        *("model", "alignment", "sft.lora", "sft.zero_stage", "reward.enabled", "reward.lora", "rl.reward.scorers"),
        *("rl.trainer.ranks", "rl.trainer.gpus_per_rank", "rl.rollout.engines", "rl.rollout.gpus_per_engine"),
        *("rl.rollout.backend", "rejection_sampling.scorers", "rejection_sampling.sampling.backend", "${alignment.method}.lora"),
    ),
    "train_sft": ("seed", "model", "sft"),
    "train_reward": ("seed", "model", "reward"),
    "gate_reward": ("model", "reward", "gate"),
    "train_policy": ("seed", "model", "sft.train_on", "sft.train_on_thoughts", "${alignment.method}"),
    "evaluate": ("seed", "model", "rl", "evaluation"),
    "report": (
        *("seed", "model", "data", "sft", "reward", "gate", "alignment", "rl"),
        *("dpo", "kto", "rejection_sampling", "conditional_sft", "evaluation", "report"),
    ),
}
# The same of rounds/dvc.yaml, whose stages each round of iterative DPO has.
ROUND_STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "sample_round": ("seed", "model", "reward", "iterative", "evaluation.max_new_tokens"),
    "validate_round": ("validation", "model", "iterative"),
    "train_round": ("seed", "model", "dpo", "iterative"),
    "evaluate_round": ("seed", "model", "iterative", "evaluation"),
}
# Sections that change no result: no stage depends on them.
UNTRACKED_SECTIONS = ("checkpoints", "cluster", "tracking", "flow", "promotion")


def read_stages(path: Path, params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The stages of a dvc.yaml by name, with `${section.key}` in it replaced from params as DVC does.

    Raises:
        ConfigError: it isn't YAML, or asks for a key that params don't have.
    """
    return read_yaml_text(fill_in(path.read_text(encoding="utf-8"), params), str(path))["stages"]


def fill_in(text: str, params: dict[str, Any]) -> str:
    """`${section.key}` replaced by what params say.

    Raises:
        ConfigError: params have no such key.
    """

    def value(found: re.Match[str]) -> str:
        node: Any = params
        for part in found[1].split("."):
            if not isinstance(node, dict) or part not in node:
                raise ConfigError(f"dvc.yaml: expected a key of params.yaml in {found[0]}, got none of that name; correct its spelling")
            node = node[part]
        return str(node)

    return re.sub(r"\$\{([\w.]+)\}", value, text)
