"""A rank of RL training in the test's own process."""

from __future__ import annotations

from pathlib import Path

import torch
from tiny_models import rl_job

from rlhf_core.trainers.rl.minibatch import Minibatch
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import TrainBatch

# A critic whose values differ from the first step on.
SETTINGS = {"rl.max_grad_norm": 0.5, "rl.rollout.temperature": 0.8, "rl.ppo.critic_init": "reward_model"}
# What rounding may come to, which differs from processor to processor: of weights after a step of 1.7e-4 or more, and of a loss, which is a
# small difference of large sums.
ROUNDING, SUMS = 5e-6, 2e-6


def connected(folders: tuple[Path, Path], **overrides) -> TrainerRank:
    rank = TrainerRank(0, 1, rl_job(*folders, **SETTINGS | overrides))
    rank.connect(rank.address())
    return rank


def update(rank: TrainerRank, minibatches: list[Minibatch], *, kl_coef: float = 0.15, train_policy: bool = True) -> dict[str, float]:
    return rank.update(minibatches, kl_coef=kl_coef, train_policy=train_policy).totals


def resident(rank: TrainerRank, folder: Path) -> dict[str, torch.Tensor]:
    """Weights of policy and critic, as they are saved."""
    rank.save(str(folder))
    critic = next((folder / "critic").glob("*.pt"))
    state = torch.load(critic, weights_only=False)["module"]
    return {**rank.weights(), **{f"critic.{name}": tensor for name, tensor in state.items()}}


def prompt_and_response(batch: TrainBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the prompt, and of the whole response, whatever of it is trained on."""
    start, ids = int(batch.sequences.starts[row]), torch.tensor(batch.sequences.lists()[row])
    return ids[:start], ids[start:]


def trained(batch: TrainBatch, row: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids of the prompt, and of what is trained on of a response without a gap."""
    prompt, response = prompt_and_response(batch, row)
    return prompt, response[: int(batch.ends[row])]
