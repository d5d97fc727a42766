"""The sections of params.yaml that each stage reads, and dvc.yaml with its `${section.key}` filled in."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rlhf_core.config.base import ConfigError
from rlhf_core.config.reading import read_yaml_text

_NAMED_OUTSIDE = (  # keys that name models, data and code outside the project, whose content `hash_inputs` hashes
    *("model", "data", "reward.path", "alignment.method", "external.path", "gate.external"),
    *("rl.reward.scorers", "rl.distillation", "rl.environment"),
    *("rejection_sampling.scorers", "iterative.scorers", "evaluation.scorers", "evaluation.harness"),
)
# Sections and single keys of params.yaml that each stage reads; dvc.yaml lists the same (a contract test compares them).
# A single key has no default, because DVC refuses a listed key that params.yaml lacks.
STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "hash_inputs": _NAMED_OUTSIDE,
    "prepare_data": ("seed", "data", "model", "reward.step_separator", "validation.max_dropped_fraction"),
    "validate_data": (
        *("validation", "model", "sft.enabled", "reward.enabled", "reward.path", "reward.step_separator", "alignment", "rl.ptx"),
        "gate.external",
    ),
    "check_model": (
        *("model", "alignment", "sft.enabled", "sft.lora", "sft.zero_stage", "reward.enabled", "reward.path", "reward.lora"),
        "reward.step_separator",
        *(
            "rl.reward.scorers",
            "rl.distillation",
            "rl.environment",
            "rl.placement",
            "rl.trainer.ranks",
            "rl.trainer.gpus_per_rank",
            "rl.rollout",
            "rl.lora",
        ),
        *("dpo.lora", "kto.lora", "rejection_sampling.scorers", "rejection_sampling.sampling.backend", "rejection_sampling.lora"),
        *("conditional_sft.lora", "external", "evaluation.scorers", "evaluation.backend", "evaluation.harness"),
    ),
    "train_sft": ("seed", "model", "sft"),
    "train_reward": ("seed", "model", "reward"),
    "gate_reward": ("model", "reward", "gate"),
    "train_policy": ("seed", "model", "sft.train_on", "sft.train_on_thoughts", "${alignment.method}"),
    "evaluate": (
        *("seed", "model", "reward.enabled", "rl.rollout.backend", "rl.rollout.stop", "rl.reward.scorers", "rl.environment", "evaluation"),
    ),
    "report": (
        *("seed", "model", "data", "sft", "reward", "gate", "alignment", "rl"),
        *("dpo", "kto", "rejection_sampling", "conditional_sft", "external", "evaluation", "report"),
    ),
}
# The same for rounds/dvc.yaml, which has its stages once for each round of iterative DPO.
ROUND_STAGE_SECTIONS: dict[str, tuple[str, ...]] = {
    "hash_inputs": _NAMED_OUTSIDE,
    "sample_round": ("seed", "model", "reward", "iterative", "evaluation.max_new_tokens"),
    "validate_round": ("validation", "model", "iterative"),
    "train_round": ("seed", "model", "dpo", "iterative"),
    "evaluate_round": ("seed", "model", "iterative", "evaluation"),
}
# Sections of data/inputs.json, the hashes of data and models outside the project, that each stage depends on; both pipelines list the same.
INPUT_SECTIONS: dict[str, tuple[str, ...]] = {
    "prepare_data": ("sources", "judges", "model", "chat_template"),
    "validate_data": ("external",),
    "check_model": ("model", "scorers", "evaluation_scorers", "environment", "reward", "policy", "teachers", "harness"),
    "train_sft": ("model",),
    "train_reward": ("reward",),
    "gate_reward": ("judges", "external", "llm_judges"),
    "train_policy": ("judges", "scorers", "environment", "policy", "teachers"),
    "evaluate": ("judges", "evaluation_scorers", "environment", "harness"),
    "sample_round": ("judges", "round_scorers"),
    "evaluate_round": ("judges", "round_scorers"),
}
# Sections that no stage lists: the values of `training` are part of each section that takes them over, and the others change no result.
UNTRACKED_SECTIONS = ("training", "checkpoints", "cluster", "tracking", "flow", "promotion")


def read_stages(path: Path, params: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the stages of a dvc.yaml by name, with each `${section.key}` replaced from params as DVC does.

    Raises:
        ConfigError: the file isn't YAML, or names a key that params don't have.
    """
    return read_yaml_text(fill_in(path.read_text(encoding="utf-8"), params), str(path))["stages"]


def fill_in(text: str, params: dict[str, Any]) -> str:
    """Return a text in which each `${section.key}` is replaced by its value.

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
