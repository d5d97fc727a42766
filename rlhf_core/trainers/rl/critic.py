"""PPO's critic: what it starts as, and in what units its values are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_core.config import RlConfig
from rlhf_core.models.build import load_scalar_model, new_scalar_model, scalar_head
from rlhf_core.sampling.scoring import RewardNormalizer
from rlhf_core.trainers.rl.job import RlJob


@dataclass(frozen=True)
class ValueUnits:
    """From what a critic says to values in the units of the rewards: scale * output + offset.

    A critic that starts as the reward model speaks in raw scores, and its head has no bias that could take the offset.
    """

    scale: float = 1.0
    offset: float = 0.0

    def __call__(self, outputs: torch.Tensor) -> torch.Tensor:
        return outputs if self == ValueUnits() else self.scale * outputs + self.offset


def value_units(rl: RlConfig, normalizer: RewardNormalizer) -> ValueUnits:
    """Of a critic that starts as the reward model: what that one's scores are in the reward, by the initial policy's statistics.

    What other scorers add isn't known to it. A critic with a new head starts at 0 in any units.
    """
    if rl.ppo.critic_init != "reward_model":
        return ValueUnits()
    scale = offset = 0.0
    for scorer in rl.reward.own_reward_models:
        mean, std = normalizer.location_and_spread(scorer)
        scale += scorer.weight / std
        offset -= scorer.weight * mean / std
    return ValueUnits(scale, offset)


def initial_critic(job: RlJob, tokenizer: PreTrainedTokenizerBase, how: dict[str, Any]) -> PreTrainedModel:
    """The model that rl.ppo.critic_init names; a new head starts at 0.

    Args:
        tokenizer: the policy's.
        how: arguments of the loaders.
    """
    init = job.rl.ppo.critic_init
    if init == "reward_model":
        return load_scalar_model(job.reward_model, **how)
    model = new_scalar_model(Path(job.sft_model if init == "sft" else job.reward_model), tokenizer, **how)
    if (bias := scalar_head(model).bias) is not None:
        torch.nn.init.zeros_(bias)
    return model
