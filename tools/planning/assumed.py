"""The workload that a prediction is of: each quantity with what it comes from."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from typing import Any

from rlhf_core.config import Params
from tools.planning.plan import Workload


@dataclass(frozen=True)
class Assumed:
    """source: the option, or the key of params.yaml, that says so."""

    name: str
    value: int | float | str
    unit: str
    source: str


def assumed(work: Workload, params: Params, given: argparse.Namespace) -> list[Assumed]:
    """What one step has to do, and how many steps there are."""

    def source(option: str, key: str) -> str:
        return f"--{option.replace('_', '-')}" if getattr(given, option) is not None else key

    algorithm = given.algorithm or params.rl.algorithm
    return [
        Assumed(
            "model", work.policy.parameters, "parameters", source("model", "model.path" if params.model.path else "model.architecture")
        ),
        Assumed("dtype", work.dtype, "", source("dtype", "model.dtype")),
        Assumed("algorithm", algorithm, "", source("algorithm", "rl.algorithm")),
        Assumed("steps", params.rl.steps, "in the run; seconds are of one", "rl.steps"),
        Assumed("samples", work.samples, "responses a step", source("samples", "rl.samples_per_step")),
        Assumed("group size", work.group_size, "responses to a prompt", source("group_size", f"rl.{algorithm}.group_size")),
        Assumed("prompts", work.samples // work.group_size, "a step", "samples / group size"),
        Assumed("prompt length", work.prompt_length, "tokens", source("prompt_length", "model.max_length - rl.rollout.max_new_tokens")),
        Assumed("response length", work.response_length, "tokens", source("response_length", "rl.rollout.max_new_tokens")),
        Assumed("longest response", work.longest, "tokens", source("longest", source("response_length", "rl.rollout.max_new_tokens"))),
        Assumed("minibatch", work.minibatch, "samples an optimizer step", source("minibatch", "rl.minibatch_size")),
        Assumed("epochs", work.epochs, "passes over a step's samples", source("epochs", "rl.epochs")),
        Assumed("microbatch", work.microbatch_tokens, "tokens a forward pass", source("microbatch_tokens", "rl.trainer.microbatch_tokens")),
        Assumed("reward models", len(work.reward_models), "", _rewards_from(given)),
        Assumed("reference", "yes" if work.reference else "no", "", source("reference", "rl.kl")),
    ]


def _rewards_from(given: argparse.Namespace) -> str:
    return "--no-reward-model" if given.no_reward_model else "--reward-model" if given.reward_model else "rl.reward.scorers"


def workload_text(found: list[Assumed]) -> str:
    lines = [f"  {a.name:<18} {_shown(a.value):>14} {a.unit}".rstrip().ljust(66) + f" {a.source}" for a in found]
    return "\n".join(["Assumed workload:", "", *lines])


def workload_values(found: list[Assumed]) -> dict[str, dict[str, Any]]:
    """By name."""
    return {a.name: {key: value for key, value in asdict(a).items() if key != "name"} for a in found}


def _shown(value: int | float | str) -> str:
    return value if isinstance(value, str) else f"{value:,.10g}"
