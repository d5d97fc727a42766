"""How much each scorer drives the update: its share of the advantages' variance, and how far scorers agree."""

from __future__ import annotations

import math
from itertools import combinations

import torch

from rlhf_core.algorithms.advantages import score_deviations
from rlhf_core.config import RlConfig
from rlhf_core.trainers.rl.metrics import Metrics, correlation


@torch.no_grad()
def scorer_shares(
    advantages: torch.Tensor, mask: torch.Tensor, scores: torch.Tensor, rewards: torch.Tensor, group_ids: torch.Tensor, rl: RlConfig
) -> Metrics:
    """Return each rewarded scorer's share, and the correlation of each pair of them; nothing with a single one.

    share_k = sum_i s d_ik A_i / sum_i s D_i A_i
    A_i is the mean advantage over the response's tokens, d_ik the scorer's weighted part of the reward and D_i the whole reward, both less
    the mean of what the response is compared with, and s the factor that turns D into A there (least squares). Where A is linear in the
    reward, as in every algorithm but those with a critic or a greedy baseline, this is Cov(s d_k, A) / Var(A). The shares add up to 1 less
    that of penalties, KL and clipping. A scorer that works against the sum has a negative share.

    The correlation is that of two scorers' unweighted deviations d.

    Args:
        advantages: [B, R]; mask: [B, R] bool, trained on. scores: [B, K], normalised, of the rewarded scorers in their order.
        rewards: [B], what the estimator compares: for gdpo the decoupled rewards. group_ids: [B].
    Returns:
        share_<name> and correlation_<first>.<second>; NaN where no advantage differs from 0, or a scorer doesn't vary.
    """
    names = [s.name for s in rl.reward.rewarded]
    if len(names) < 2:
        return {}
    ids = group_ids if rl.spec.compares_samples else torch.zeros_like(group_ids)
    deviations = score_deviations(scores, ids, mask, standardized=rl.spec.decoupled)
    whole = score_deviations(rewards[:, None], ids, mask, standardized=False)[:, 0]
    advantage = advantages.double().where(mask, 0.0).sum(1) / mask.sum(1).clamp(min=1)
    weights = advantage * _factor(advantage, whole, ids)
    total = float((weights * whole).sum())
    parts = zip(rl.reward.rewarded, deviations.unbind(1), strict=True)
    shares = {f"share_{s.name}": float((weights * s.weight * d).sum()) / total if total else math.nan for s, d in parts}
    learned = mask.any(1)
    pairs = combinations(zip(names, deviations[learned].unbind(1), strict=True), 2)
    return shares | {f"correlation_{a}.{b}": correlation(first, second) for (a, first), (b, second) in pairs}


def _factor(advantage: torch.Tensor, whole: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[B], in each group the factor by which the rewards' deviations fit the advantages best; 0 in a group without deviations."""
    unique, group = ids.unique(return_inverse=True)
    zeros = torch.zeros(len(unique), dtype=torch.float64)
    squares = zeros.index_add(0, group, whole.square())
    factor = zeros.index_add(0, group, advantage * whole) / squares.where(squares > 0, 1.0)
    return factor[group]
