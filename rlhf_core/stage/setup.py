"""How a stage was trained, for its metrics: ranks, sharding, rollout engines and adapters, from the configuration that ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlhf_core.config import RlConfig, SharedTrainingConfig, TrainerConfig

SHARDING = ("sequence_parallel", "zero_stage", "offload_optimizer", "offload_parameters", "gradient_checkpointing")


def training_setup(config: SharedTrainingConfig) -> dict[str, Any]:
    """Return how a supervised section trains; `lora` is None if all weights are trained."""
    return {"ranks": config.ranks, **_sharding(config), "lora": _adapters(config)}


def rl_setup(rl: RlConfig, placed: Mapping[str, Any]) -> dict[str, Any]:
    """Return how online RL trains, and how its rollout engines are placed.

    Args:
        placed: what the driver recorded, with `auto` of rl.rollout and the GPUs' shares resolved (trainers/rl/job.py: PLACEMENT).
    """
    rollout = rl.rollout
    return {
        "ranks": rl.ranks,
        "groups": [{"roles": list(group.roles), "ranks": group.ranks} for group in rl.role_groups],
        **_sharding(rl.trainer),
        "engines": rollout.engines,
        "backend": rollout.backend,
        "tensor_parallel_size": rollout.tensor_parallel_size,
        "take_turns": placed["take_turns"],
        "dispatch": placed["dispatch"],
        "weight_transfer": placed["weight_transfer"],
        "gpus": {"in_cluster": placed["gpus"], "per_rank": placed["per_rank"], "per_engine": placed["per_engine"]}
        if placed["gpus"]
        else None,
        "lora": _adapters(rl),
    }


def _sharding(config: SharedTrainingConfig | TrainerConfig) -> dict[str, Any]:
    return {name: getattr(config, name) for name in SHARDING}


def _adapters(config: SharedTrainingConfig | RlConfig) -> dict[str, Any] | None:
    return None if config.lora is None else config.lora.model_dump()
