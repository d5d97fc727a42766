"""Advantage estimators: from one reward per response to an advantage per token. online.py lists them by rl.algorithm.

No gradient flows through the results. A score that isn't finite marks a response that could not be scored; it is not a reward of 0.
Statistics are computed in float64 and returned in the dtype of the input.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch


@torch.no_grad()
def token_rewards(scores: torch.Tensor, kl: torch.Tensor, response_mask: torch.Tensor, *, kl_coef: float) -> torch.Tensor:
    """Rewards per token: the score at the last sampled token, less the KL penalty at each.

    r_t = -kl_coef * kl_t + (score if t is the row's last True of response_mask)
    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, equation 2.

    Args:
        scores: [B]; NaN: could not be scored.
        kl: [B, R], any estimate of KL(policy || reference) per token; masked entries may hold anything.
        response_mask: [B, R] bool.
        kl_coef: 0 where the KL is a term of the loss.
    Returns:
        [B, R], 0 where masked. The row of an unscored response is 0, which is not its reward: clear its mask before `gae` and the
        losses, or the critic learns a reward of 0.
    """
    scored = scores.isfinite()
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    last = positions.where(response_mask, -1).amax(1, keepdim=True)
    rewards = -kl_coef * kl + scores.unsqueeze(1) * (positions == last)
    return rewards.where(response_mask & scored.unsqueeze(1), 0.0)


def overlong_penalty(lengths: torch.Tensor, *, max_new_tokens: int, buffer: int, penalty: float) -> torch.Tensor:
    """Subtracted from the reward of a response whose length comes close to the limit.

    penalty * clip((length - (max_new_tokens - buffer)) / buffer, 0, 1)
    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13, whose penalty is 1.

    Args:
        lengths: [B] sampled tokens, the end token included.
        max_new_tokens: length at which the penalty is full.
        buffer: tokens before that limit over which the penalty grows; above 0.
        penalty: in the reward's units.
    Returns:
        [B] float, between 0 and penalty.
    """
    return penalty * ((lengths - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)


@torch.no_grad()
def gae(
    token_rewards: torch.Tensor, values: torch.Tensor, response_mask: torch.Tensor, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalized advantage estimation over the response tokens; the response ends the episode, truncated or not.

    A_t = d_t + gamma * gae_lambda * A_{t+1},   d_t = r_t + gamma * V_{t+1} - V_t
    Source: Schulman et al. 2016, https://arxiv.org/abs/1506.02438, equations 11 and 16.

    Args:
        token_rewards: [B, R], KL penalty already subtracted. Rewards of masked tokens are ignored.
        values: [B, R], in reward units, before each token is taken.
        response_mask: [B, R] bool. t + 1 is the next unmasked token: values and advantages are carried across a gap (a tool's
            output) without a discount. Masked entries may hold anything.
    Returns:
        advantages [B, R], not whitened; returns [B, R] = these advantages + values. Both 0 where masked.
    """
    advantages = torch.zeros_like(values)
    next_value = next_advantage = torch.zeros_like(values[:, 0])
    for t in reversed(range(values.shape[1])):
        sampled = response_mask[:, t]
        delta = token_rewards[:, t] + gamma * next_value - values[:, t]
        next_advantage = (delta + gamma * gae_lambda * next_advantage).where(sampled, next_advantage)
        next_value = values[:, t].where(sampled, next_value)
        advantages[:, t] = next_advantage.where(sampled, 0.0)
    return advantages, (advantages + values).where(response_mask, 0.0)


@torch.no_grad()
def ppo(
    token_rewards: torch.Tensor,
    values: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    whiten_advantages: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's advantages: `gae`, whitened over the batch if whiten_advantages.

    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 11.

    Arguments and result as of `gae`; the returns are those of the unwhitened advantages.
    """
    advantages, returns = gae(token_rewards, values, response_mask, gamma=gamma, gae_lambda=gae_lambda)
    return whiten(advantages, response_mask) if whiten_advantages else advantages, returns


@torch.no_grad()
def grpo(
    rewards: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor, *, normalize_std: bool, std_floor: float = 1e-4
) -> torch.Tensor:
    """Advantages relative to the group: the rewards of the other samples of the prompt are the baseline.

    A_i = (r_i - mean(r)) / max(std(r), std_floor),   or without the division
    Source: Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2.

    The std is unbiased (n - 1). The floor replaces a smaller std, so that nearly equal rewards don't become large advantages.

    Args:
        rewards: [B], one per response. Where the KL is placed in the reward, kl_coef times its sum over the sampled tokens is already
            subtracted, so *before* the group's baseline. NaN: unscored, left out of the group's statistics, advantage 0.
        group_ids: [B] int64, any numbers in any order; equal for samples of one prompt.
        response_mask: [B, R] bool. A row without True is left out of the statistics too.
    Returns:
        [B, R], the response's advantage at each of its tokens, 0 where masked. A group of one and a group of equal rewards get 0.
    """
    groups = _Groups.of(rewards, group_ids, response_mask)
    advantages = groups.standardized(std_floor) if normalize_std else groups.centered
    return _per_token(advantages, rewards, response_mask)


@torch.no_grad()
def gdpo(
    scores: torch.Tensor,
    weights: torch.Tensor,
    penalties: torch.Tensor,
    group_ids: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    std_floor: float = 1e-4,
) -> torch.Tensor:
    """GDPO: each scorer's scores are normalised within the group before their sum, so that none is lost beside one that varies more.

    A_i = S_i / max(std(S), std_floor),   S as of `decoupled_rewards`; std over the batch's responses, whose mean S is 0
    Source: Liu et al. 2026, https://arxiv.org/abs/2601.05242.

    Arguments as of `decoupled_rewards`.
    Returns:
        [B, R], the response's advantage at each of its tokens, 0 where masked. A group whose S are equal gets 0.
    """
    groups = _Groups.of(decoupled_rewards(scores, weights, penalties, group_ids, response_mask), group_ids, response_mask)
    std = (groups.centered.square().sum() / (groups.counted.sum() - 1).clamp(min=1)).sqrt()
    return _per_token(groups.centered / std.clamp(min=std_floor), penalties, response_mask)


@torch.no_grad()
def decoupled_rewards(
    scores: torch.Tensor, weights: torch.Tensor, penalties: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """Return the weighted sum of scores that are normalised by scorer and group, less the penalties.

    S_i = sum_k w_k (r_ik - mean(r_k)) / max(std(r_k), 1e-4) - (p_i - mean(p)),   means and unbiased stds over the group
    The paper has no penalties. They aren't normalised: in a group with one truncated response their std would blow them up.

    Args:
        scores: [B, K], a column for each scorer. NaN: could not be scored; a response that lacks one of its scores is left out of all
            statistics, because the missing part of its sum isn't 0.
        weights: [K].
        penalties: [B], of length and KL, in units of a normalised score.
        group_ids, response_mask: as of `grpo`.
    Returns:
        [B] float64; NaN where a score is missing, or the row is masked.
    """
    counted = scores.isfinite().all(1) & response_mask.any(1)
    mask = response_mask & counted[:, None]
    total = score_deviations(scores, group_ids, mask, standardized=True) @ weights.double()
    return (total - _Groups.of(penalties, group_ids, mask, warns=False).centered).where(counted, torch.nan)


@torch.no_grad()
def score_deviations(scores: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor, *, standardized: bool) -> torch.Tensor:
    """Return each scorer's scores less their group's mean, and standardized over its std too: [B, K] float64; 0 where not counted.

    Args:
        scores: [B, K]; group_ids, response_mask: as of `grpo`.
    """
    by_scorer = [_Groups.of(of_one, group_ids, response_mask, warns=False) for of_one in scores.unbind(1)]
    return torch.stack([groups.standardized(1e-4) if standardized else groups.centered for groups in by_scorer], 1)


def dr_grpo(rewards: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """GRPO without the division by the std, which gives prompts that are too easy or too hard more weight.

    A_i = r_i - mean(r)
    Source: Liu et al. 2025, https://arxiv.org/abs/2503.20783, section 3.2; the paper's loss is the constant_horizon of `aggregate`.

    Arguments, result and degenerate groups as of `grpo`.
    """
    return grpo(rewards, group_ids, response_mask, normalize_std=False)


@torch.no_grad()
def rloo(rewards: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """REINFORCE with the mean of the group's other responses as baseline.

    A_i = r_i - (sum(r) - r_i) / (n - 1) = (r_i - mean(r)) * n / (n - 1),   n = scored responses of the group
    Source: Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, after Kool et al. 2019.

    Arguments, result and degenerate groups as of `grpo`.
    """
    groups = _Groups.of(rewards, group_ids, response_mask)
    leave_one_out = groups.count / (groups.count - 1).clamp(min=1)
    return _per_token(groups.centered * leave_one_out[groups.group], rewards, response_mask)


@torch.no_grad()
def reinforce_pp(token_rewards: torch.Tensor, response_mask: torch.Tensor, *, gamma: float = 1.0) -> torch.Tensor:
    """REINFORCE++: the rewards to go of each token, with the whole batch's mean as baseline.

    A_t = (G_t - mean(G)) / std(G),   G_t = r_t + gamma * G_{t+1};   mean and std over all sampled tokens of the batch
    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262.

    Args:
        token_rewards: [B, R], KL penalty already subtracted, of the whole rollout batch, as from `token_rewards`.
        response_mask: [B, R] bool; clear it where a response could not be scored. Masked entries may hold anything; gaps carry G
            without a discount, as in `gae`.
    Returns:
        [B, R], 0 where masked.
    """
    to_go, _ = gae(token_rewards, torch.zeros_like(token_rewards), response_mask, gamma=gamma, gae_lambda=1.0)
    return whiten(to_go, response_mask)


@torch.no_grad()
def reinforce_pp_baseline(rewards: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """REINFORCE++ with the group's mean as baseline: rewards less that mean, then whitened over the whole batch.

    A_i = (a_i - mean(a)) / std(a),   a_i = r_i - mean of its group;   mean and std over all sampled tokens of the batch
    Source: Hu et al. 2025, https://arxiv.org/abs/2501.03262.

    The std is the batch's, so a group whose rewards hardly differ gets small advantages; `grpo` scales all groups alike.
    A group of one and a group of equal rewards have a = 0 in the batch's statistics, and get advantage 0.

    Arguments as of `grpo`; a response that is left out of its group's statistics is left out of the batch's too.
    Returns:
        [B, R], the response's advantage at each of its tokens, 0 where masked.
    """
    groups = _Groups.of(rewards, group_ids, response_mask)
    white = whiten(_per_token(groups.centered, rewards, response_mask), response_mask & groups.counted[:, None])
    return white.where(groups.informative[groups.group][:, None], 0.0)


@torch.no_grad()
def remax(rewards: torch.Tensor, baseline_rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """ReMax: the reward of the greedy response to the same prompt is the baseline.

    A_i = r_i - r_i(greedy)
    Source: Li et al. 2023, https://arxiv.org/abs/2310.10505, algorithm 1.

    Args:
        rewards, baseline_rewards: [B], of the sampled and of the greedy response. NaN in either: advantage 0.
        response_mask: [B, R] bool, of the sampled response.
    Returns:
        [B, R], the response's advantage at each of its tokens, 0 where masked.
    """
    known = rewards.isfinite() & baseline_rewards.isfinite()
    return _per_token((rewards - baseline_rewards).where(known, 0.0), rewards, response_mask)


@torch.no_grad()
def whiten(advantages: torch.Tensor, mask: torch.Tensor, *, shift_mean: bool = True, std_floor: float = 1e-4) -> torch.Tensor:
    """Advantages with mean 0 and std 1 over all unmasked entries.

    Pass the whole rollout batch, of all ranks, before it is split into minibatches: statistics of a part differ. The std is unbiased
    (n - 1) and at least std_floor.

    Args:
        advantages: [B, R]; masked entries may hold anything.
        mask: [B, R] bool.
        shift_mean: False: the mean stays.
    Returns:
        [B, R], 0 where masked.
    """
    kept = advantages.double().where(mask, 0.0)
    count = mask.sum()
    mean = kept.sum() / count.clamp(min=1)
    centered = (kept - mean).where(mask, 0.0)
    std = (centered.square().sum() / (count - 1).clamp(min=1)).sqrt()
    white = centered / std.clamp(min=std_floor)
    if not shift_mean:
        white = white + mean
    return white.where(mask, 0.0).to(advantages.dtype)


@dataclass(frozen=True)
class _Groups:
    """Rewards less their group's mean, and the groups' statistics.

    centered: [B] float64, exactly 0 in a group without variance.    group: [B] int64, 0 to G - 1.    counted: [B] bool.
    count: [G] float64, counted samples.    informative: [G] bool, the counted samples' rewards differ.
    """

    centered: torch.Tensor
    group: torch.Tensor
    counted: torch.Tensor
    count: torch.Tensor
    informative: torch.Tensor

    def standardized(self, std_floor: float) -> torch.Tensor:
        """`centered` over the group's unbiased std, which is at least std_floor."""
        squares = torch.zeros_like(self.count).index_add(0, self.group, self.centered.square())
        std = (squares / (self.count - 1).clamp(min=1)).sqrt()
        return self.centered / std.clamp(min=std_floor)[self.group]

    @classmethod
    def of(cls, rewards: torch.Tensor, group_ids: torch.Tensor, response_mask: torch.Tensor, *, warns: bool = True) -> _Groups:
        counted = rewards.isfinite() & response_mask.any(1)
        ids, group = group_ids.unique(return_inverse=True)
        known = rewards.double().where(counted, 0.0)
        zeros = known.new_zeros(len(ids))
        count = zeros.index_add(0, group, counted.double())
        mean = zeros.index_add(0, group, known) / count.clamp(min=1)
        highest = zeros.scatter_reduce(0, group, known.where(counted, -torch.inf), "amax", include_self=False)
        lowest = zeros.scatter_reduce(0, group, known.where(counted, torch.inf), "amin", include_self=False)
        informative = highest > lowest
        if warns and counted.any() and not informative.all():
            # A constant message, which Python shows once.
            warnings.warn("groups of equal rewards, or with fewer than two scored responses, get advantage 0", RuntimeWarning, stacklevel=1)
        centered = (known - mean[group]).where(counted & informative[group], 0.0)
        return cls(centered, group, counted, count, informative)


def _per_token(advantage: torch.Tensor, rewards: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    return advantage.to(rewards.dtype).unsqueeze(1).where(response_mask, 0.0)
