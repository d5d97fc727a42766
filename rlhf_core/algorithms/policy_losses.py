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
    dual_clip: float | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate objective, negated.

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A),   ratio = exp(logprobs - old_logprobs);
    with dual_clip, where A < 0, at most -dual_clip * A
    Source: Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 7; two bounds: DAPO, https://arxiv.org/abs/2503.14476;
    dual clip: Ye et al. 2020, https://arxiv.org/abs/1912.09729, equation 5.

    Args:
        logprobs: [B, R], with gradient.
        old_logprobs, advantages: [B, R]; no gradient is taken.
        response_mask: [B, R] bool; masked entries may hold anything and have loss and gradient 0.
        dual_clip: above 1; None: the loss of a token with a negative advantage grows with its ratio without bound.
    Returns:
        token_loss [B, R] for `aggregate`, and detached scalars over the unmasked tokens, the first two to be added over micro-batches
        and ranks and divided by the step's token count:
        clip_frac_sum: tokens on which a clipping holds, so that they have no gradient;
        approx_kl_sum: of ratio - 1 - log ratio, which estimates KL(old || current) and is never negative;
        ratio_max, ratio_min: the largest and the smallest ratio (0 and infinity without tokens).
    """
    logprobs, log_ratio, advantages = _kept(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss, held = torch.maximum(unclipped, clipped), clipped > unclipped
    if dual_clip is not None:
        bound = (-dual_clip * advantages).where(advantages < 0, torch.inf)
        token_loss, held = torch.minimum(token_loss, bound), held | (token_loss > bound)
    return token_loss, _statistics(log_ratio, ratio, held, response_mask)


def gspo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Clipped surrogate objective of whole responses, negated: the ratio is the geometric mean of the tokens' ratios.

    -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A),   s = exp(mean over the response's tokens of logprobs - old_logprobs)
    Source: Zheng et al. 2025, https://arxiv.org/abs/2507.18071, equations 5 and 7, whose bounds are far narrower than PPO's (3e-4, 4e-4).

    A is the mean of the response's advantages, which the paper's algorithm has all equal. The loss stands at each token of the response,
    so that the sequence_mean of `aggregate` gives the mean over responses, and its gradient; other modes weigh long responses more.

    Arguments and result as of `ppo_clip`, with the tokens of the responses that are held in clip_frac_sum, the tokens' own ratios in
    approx_kl_sum and the extremes of s in ratio_max and ratio_min.
    """
    logprobs, log_ratio, advantages = _kept(logprobs, old_logprobs, advantages, response_mask)
    lengths = response_mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (log_ratio.sum(1, keepdim=True) / lengths).exp()
    advantage = advantages.sum(1, keepdim=True) / lengths
    unclipped = -advantage * ratio
    clipped = -advantage * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    token_loss = torch.maximum(unclipped, clipped).where(response_mask, 0.0)
    held = (clipped > unclipped) & response_mask
    return token_loss, _statistics(log_ratio, ratio.expand_as(log_ratio), held, response_mask)


def cispo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """REINFORCE with a clipped importance weight, negated: every token keeps a gradient, however far its ratio has gone.

    -constant(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprobs,   ratio = exp(logprobs - old_logprobs)
    Source: MiniMax-M1, https://arxiv.org/abs/2506.13585, equations 4 and 5; the paper leaves the lower bound out, that is clip_low near 1.

    Arguments and result as of `ppo_clip`, with the tokens whose weight is clipped in clip_frac_sum.
    """
    logprobs, log_ratio, advantages = _kept(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, _statistics(log_ratio, ratio, (weight != ratio) & response_mask, response_mask)


def _kept(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, response_mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, log ratios and advantages [B, R], all 0 where masked."""
    logprobs = logprobs.where(response_mask, 0.0)
    return logprobs, logprobs - old_logprobs.detach().where(response_mask, 0.0), advantages.detach().where(response_mask, 0.0)


@torch.no_grad()
def _statistics(log_ratio: torch.Tensor, ratio: torch.Tensor, held: torch.Tensor, response_mask: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "clip_frac_sum": held.sum().to(ratio.dtype),
        "approx_kl_sum": (torch.expm1(log_ratio) - log_ratio).sum(),
        "ratio_max": ratio.where(response_mask, 0.0).amax(),
        "ratio_min": ratio.where(response_mask, torch.inf).amin(),
    }


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


# By rl.policy_loss.
POLICY_LOSSES = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo}
