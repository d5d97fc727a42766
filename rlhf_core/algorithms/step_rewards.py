"""Rewards from scores of steps: one for a response, and what each step adds to it."""

from __future__ import annotations

import torch

# Value before the first step, by aggregate.
START = {"min": 1.0, "sum": 0.0, "last": 0.0}


def running_aggregate(probabilities: torch.Tensor, aggregate: str) -> torch.Tensor:
    """Return the reward of a response up to each of its steps, from the probability that each is right.

    min: F_k = min(p_1, ..., p_k);   sum: F_k = p_1 + ... + p_k;   last: F_k = p_k
    Sources: min, Wang et al. 2024 (Math-Shepherd), https://arxiv.org/abs/2312.08935, section 3.4; for RL Cheng et al. 2025,
    https://arxiv.org/abs/2504.15275, section 3, where a sum rewards further steps. sum, Uesato et al. 2022,
    https://arxiv.org/abs/2211.14275, section 2.5.

    Args:
        probabilities: [B, S], NaN behind a response's last step.
        aggregate: min, sum or last.
    Returns:
        [B, S], NaN where there is no step.
    """
    known = probabilities.isfinite()
    if aggregate == "sum":
        found = probabilities.where(known, 0.0).cumsum(1)
    elif aggregate == "min":
        found = probabilities.where(known, torch.inf).cummin(1).values
    else:
        found = probabilities
    return found.where(known, torch.nan)


def aggregate_of(probabilities: torch.Tensor, aggregate: str) -> torch.Tensor:
    """Return the reward of each response [B]: `running_aggregate` at its last step; NaN without steps."""
    last = probabilities.isfinite().sum(1) - 1
    if not probabilities.shape[1]:
        return torch.full((len(probabilities),), torch.nan)
    found = running_aggregate(probabilities, aggregate).gather(1, last.clamp(min=0)[:, None])[:, 0]
    return found.where(last >= 0, torch.nan)


def step_rewards(probabilities: torch.Tensor, aggregate: str) -> torch.Tensor:
    """What each step adds to the reward of its response [B, S], 0 where there is none: r_k = F_k - F_(k-1), F_0 = START.

    sum: the step's own probability. min: by how much the step lowers the least probability. last: by how much the step changes the
    probability. The rewards of all steps are the response's, less START.
    """
    running = running_aggregate(probabilities, aggregate)
    before = torch.cat([torch.full_like(running[:, :1], START[aggregate]), running[:, :-1]], 1)
    return (running - before).where(running.isfinite(), 0.0)
