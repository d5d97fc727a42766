"""Losses of policy and critic per token. Masked entries are replaced before any arithmetic: NaN times 0 would be NaN, also in gradients."""

from __future__ import annotations

import torch


def ppo_clip(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate objective, negated.

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = exp(logprobs - old_logprobs)
    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7; two bounds: DAPO, https://arxiv.org/abs/2503.14476.

    Args:
        logprobs: [B, R], with gradient.
        old_logprobs, advantages: [B, R]; no gradient is taken.
        response_mask: [B, R] bool; masked entries may hold anything and have loss and gradient 0.
    Returns:
        token_loss [B, R] for `aggregate`, and detached scalars over the unmasked tokens, the first two to be added over micro-batches
        and ranks and divided by the step's token count:
        clip_frac_sum: tokens on which the clipping holds, so that they have no gradient;
        approx_kl_sum: of ratio - 1 - log ratio, which estimates KL(old || current) and is never negative;
        ratio_max: the largest ratio (0 without tokens).
    """
    log_ratio = logprobs.where(response_mask, 0.0) - old_logprobs.detach().where(response_mask, 0.0)
    advantages = advantages.detach().where(response_mask, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    with torch.no_grad():
        stats = {
            "clip_frac_sum": (clipped > unclipped).sum().to(ratio.dtype),
            "approx_kl_sum": (torch.expm1(log_ratio) - log_ratio).sum(),
            "ratio_max": ratio.where(response_mask, 0.0).amax(),
        }
    return torch.maximum(unclipped, clipped), stats


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, response_mask: torch.Tensor, *, value_clip: float | None
) -> torch.Tensor:
    """Squared error of the critic, the worse of the new value and the new value held near the old one.

    0.5 * max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)
    Source: PPO's first implementation (openai/baselines, ppo2); the paper has no clipping here. Discussed in https://arxiv.org/abs/2005.12729.

    Args:
        values: [B, R], with gradient.
        old_values, returns: [B, R]; no gradient is taken. returns = unwhitened advantages + old_values, as from `gae`.
        response_mask: [B, R] bool; masked entries may hold anything and have loss and gradient 0.
        value_clip: in units of the reward; None: plain 0.5 * (V - R)^2.
    Returns:
        token_loss [B, R] for `aggregate`.
    """
    values, old_values, returns = (x.where(response_mask, 0.0) for x in (values, old_values.detach(), returns.detach()))
    error = (values - returns).square()
    if value_clip is not None:
        held = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (held - returns).square())
    return 0.5 * error


POLICY_LOSSES = {"ppo_clip": ppo_clip}
