"""Credit by turn: rewards that lie where they were given, and GRPO with a reward for each turn."""

from __future__ import annotations

import torch


def placed_rewards(turn_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Rewards of turns on the last trained token up to where they were given.

    Args:
        turn_rewards: [B, R], at any tokens.
        response_mask: [B, R] bool, True = trained on.
    Returns:
        [B, R], 0 where masked. A reward before the first trained token is left out: no trained token could have earned it.
    """
    columns = torch.arange(response_mask.shape[1], device=response_mask.device)
    before = columns.where(response_mask, -1).cummax(1).values
    given = turn_rewards.where(before >= 0, 0.0)
    return torch.zeros_like(turn_rewards).scatter_add(1, before.clamp(min=0), given).where(response_mask, 0.0)


@torch.no_grad()
def grpo_by_turn(
    token_rewards: torch.Tensor,
    turns: torch.Tensor,
    group_ids: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    normalize_std: bool,
    std_floor: float = 1e-4,
) -> torch.Tensor:
    """GRPO with a reward for each turn ("process supervision"): a token's advantage is the sum over its own and later turns.

    A_k = sum over j >= k of (r_j - mean(r)) / max(std(r), std_floor);   mean and std over all turns of the group's samples
    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.3.

    The std is unbiased (n - 1). A turn without a trained token is none.

    Args:
        token_rewards: [B, R], KL penalty already subtracted; the reward of a turn is their sum over its trained tokens.
        turns: [B, R] int64, number of each token's turn from 0 on; any number where masked.
        group_ids: [B] int64.
        response_mask: [B, R] bool; clear it where a response could not be scored.
    Returns:
        [B, R], 0 where masked. The only trained sample of a group gets 0, and so does a group whose turns have equal rewards.
    """
    rows, count = len(turns), int(turns.max()) + 1
    zeros, turns = token_rewards.new_zeros(rows, count, dtype=torch.float64), turns.clamp(min=0)
    known = token_rewards.double().where(response_mask, 0.0)
    rewards = zeros.scatter_add(1, turns, known)
    trained = zeros.scatter_add(1, turns, response_mask.double()) > 0
    ids, group = group_ids.unique(return_inverse=True)
    per_group = zeros.new_zeros(len(ids))
    samples = per_group.index_add(0, group, trained.any(1).double())
    number = per_group.index_add(0, group, trained.sum(1).double()).clamp(min=1)
    mean = per_group.index_add(0, group, rewards.where(trained, 0.0).sum(1)) / number
    centered = (rewards - mean[group, None]).where(trained & (samples[group, None] > 1), 0.0)
    if normalize_std:
        squares = per_group.index_add(0, group, centered.square().sum(1))
        std = (squares / (number - 1).clamp(min=1)).sqrt()
        centered = centered / std.clamp(min=std_floor)[group, None]
    to_go = centered.flip(1).cumsum(1).flip(1)
    return to_go.gather(1, turns).to(token_rewards.dtype).where(response_mask, 0.0)
