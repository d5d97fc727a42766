"""Losses of policy, critic and expert router, and their sum over the tokens of an optimizer step.

Masked entries are replaced before any arithmetic: NaN times 0 would be NaN, in gradients too.
"""

from __future__ import annotations

import torch

_LEAST = -50.0  # log-probability below which one of all other tokens counts as this


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
        clip_frac_sum: tokens that are clipped, and so have no gradient;
        approx_kl_sum: of ratio - 1 - log ratio, which estimates KL(old || current) and is never negative;
        ratio_max, ratio_min: the largest and the smallest ratio (0 and infinity without tokens).
    """
    logprobs, log_ratio, advantages = _masked(logprobs, old_logprobs, advantages, response_mask)
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

    A is the mean of the response's advantages, which the paper's algorithm has all equal. Each token of the response has the
    response's loss, so that the sequence_mean of `aggregate` is the mean over responses; other modes give long responses more weight.

    Arguments and result as of `ppo_clip`, with the tokens of the clipped responses in clip_frac_sum, the tokens' own ratios in
    approx_kl_sum and the extremes of s in ratio_max and ratio_min.
    """
    logprobs, log_ratio, advantages = _masked(logprobs, old_logprobs, advantages, response_mask)
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
    logprobs, log_ratio, advantages = _masked(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs, _statistics(log_ratio, ratio, (weight != ratio) & response_mask, response_mask)


def dppo_tv(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """DPPO, negated, with a bound on the change of the token's probability: the binary total variation from the old policy.

    -M * ratio * A,   M = 0 where A > 0 and p - p_old > clip_high, or A < 0 and p_old - p > clip_low, else 1;
    p = exp(logprobs), ratio = p / p_old
    Source: Qi et al. 2026, https://arxiv.org/abs/2602.04879, whose bounds are probabilities.

    A rare token may get many times its probability, and a frequent one may not get 1.2 times its own: `ppo_clip` has it the other way
    around. So ratios have no bound.

    Arguments and result as of `ppo_clip`, with the masked tokens in clip_frac_sum.
    """
    change = (logprobs.detach().exp() - old_logprobs.exp()).where(response_mask, 0.0)
    return _dppo(
        logprobs, old_logprobs, advantages, response_mask, (advantages > 0) & (change > clip_high), (advantages < 0) & (change < -clip_low)
    )


def dppo_kl(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """DPPO, negated, with a bound on the binary KL divergence: of the old policy from the current one, each as this token or another.

    -M * ratio * A,   D = p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p));
    M = 0 where A > 0, p > p_old and D > clip_high, or A < 0, p < p_old and D > clip_low, else 1
    Source: as of `dppo_tv`; the bounds are nats, and far narrower than those of ratios.

    Arguments and result as of `dppo_tv`.
    """
    new, old = (x.detach().where(response_mask, -1.0).double() for x in (logprobs, old_logprobs))
    others, old_others = (torch.log(-torch.expm1(x)).clamp(min=_LEAST) for x in (new, old))
    divergence = old.exp() * (old - new) + old_others.exp() * (old_others - others)
    high = (advantages > 0) & (new > old) & (divergence > clip_high)
    return _dppo(logprobs, old_logprobs, advantages, response_mask, high, (advantages < 0) & (new < old) & (divergence > clip_low))


def _dppo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    too_high: torch.Tensor,
    too_low: torch.Tensor,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and statistics without the tokens that have gone too far: [B, R] bool, upwards and downwards."""
    _, log_ratio, advantages = _masked(logprobs, old_logprobs, advantages, response_mask)
    held = (too_high | too_low) & response_mask
    ratio = log_ratio.exp()
    return (-advantages * ratio).masked_fill(held, 0.0), _statistics(log_ratio, ratio, held, response_mask)


def sapo(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    response_mask: torch.Tensor,
    *,
    positive_temperature: float,
    negative_temperature: float,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """SAPO, negated: a gate that fades a token's gradient smoothly as its ratio leaves 1, in place of a bound.

    -4 / tau * sigmoid(tau * (ratio - 1)) * A,   tau = positive_temperature where A > 0, else negative_temperature
    Source: Gao et al. 2025, https://arxiv.org/abs/2511.20347, with 1 and 1.05.

    The derivative by the ratio is A * sech^2(tau * (ratio - 1) / 2), which is A at ratio 1. At that point the loss is -2 A / tau.

    Arguments and result as of `ppo_clip`; no token is clipped.
    """
    _, log_ratio, advantages = _masked(logprobs, old_logprobs, advantages, response_mask)
    ratio = log_ratio.clamp(max=20.0).exp()  # the gate is flat there; an infinite ratio would have the gradient NaN
    tau = torch.full_like(advantages, negative_temperature).masked_fill(advantages > 0, positive_temperature)
    token_loss = -4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)) * advantages
    return token_loss, _statistics(log_ratio, log_ratio.exp(), torch.zeros_like(response_mask), response_mask)


def _masked(
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
    """Squared error of the critic: the larger of the new value's and that of the new value clipped to the neighbourhood of the old one.

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


def aggregate(
    token_loss: torch.Tensor, response_mask: torch.Tensor, *, mode: str, num_loss_tokens: int, num_sequences: int, horizon: int
) -> torch.Tensor:
    """This part's share of the step's loss.

    token_mean:       sum of the masked tokens / num_loss_tokens
    sequence_mean:    sum over sequences of the mean over its masked tokens / num_sequences
    constant_horizon: sum of the masked tokens / (num_sequences * horizon)

    The denominators count the whole optimizer step: all micro-batches of all ranks. So the shares *add up* to the step's loss,
    and so do their gradients: neither accumulation nor data parallelism may divide again (an engine that averages over ranks or
    micro-batches has to be multiplied back). token_mean is DAPO's (https://arxiv.org/abs/2503.14476), sequence_mean GRPO's
    (https://arxiv.org/abs/2402.03300), constant_horizon Dr. GRPO's (https://arxiv.org/abs/2503.20783), in which a token counts the same
    whatever the length of its response and of the others.

    Args:
        token_loss: [B, R]; masked entries may hold anything, NaN too, and get gradient 0.
        response_mask: [B, R] bool.
        mode: token_mean, sequence_mean or constant_horizon.
        num_loss_tokens: True entries of the step's masks.
        num_sequences: rows of the step's masks with a True entry; the others add 0.
        horizon: tokens of the longest possible response.
    Returns:
        [] scalar; 0 for a part, or a step, without tokens.
    Raises:
        ValueError: another mode.
    """
    kept = token_loss.where(response_mask, 0.0)
    if mode == "token_mean":
        return kept.sum() / max(num_loss_tokens, 1)
    if mode == "sequence_mean":
        return (kept.sum(-1) / response_mask.sum(-1).clamp(min=1)).sum() / max(num_sequences, 1)
    if mode == "constant_horizon":
        return kept.sum() / (max(num_sequences, 1) * horizon)
    raise ValueError(
        f"loss aggregation: expected token_mean, sequence_mean or constant_horizon, got {mode}; see rl.loss_aggregation in params.yaml"
    )


@torch.no_grad()
def expert_counts(router_logits: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """How often each expert is chosen.

    Args:
        router_logits: [N, E], a row for each token in each layer.
        top_k: experts per token.
    Returns:
        [E] float32; counts of parts add up to that of the whole.
    """
    chosen = router_logits.softmax(-1).topk(top_k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=router_logits.shape[-1]).float()


def load_balancing_loss(router_logits: torch.Tensor, counts: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """This part's share of the step's load-balancing loss.

    E * sum_e f_e * P_e,   f_e = counts_e / M,   P_e = sum over the rows of softmax(router_logits)_e / M
    Source: Fedus et al. 2021 (Switch Transformer), https://arxiv.org/abs/2101.03961, equations 4 to 6; over several layers at once and
    with several experts per token as in the Mixtral and Qwen families of Hugging Face, where it is top_k when all experts get as much.

    M = sum(counts) / top_k rows, of the whole optimizer step: all micro-batches of all ranks. As f has no gradient the shares of the
    parts add up to the step's loss and gradient exactly (Qiu et al. 2025, https://arxiv.org/abs/2501.11873, on why the whole step's
    counts are better than a part's).

    Args:
        router_logits: [N, E] of this part, with gradient; padding isn't among them.
        counts: [E], of the whole step, from `expert_counts`.
        top_k: experts per token.
    Returns:
        [] scalar; 0 for a part, or a step, without tokens.
    """
    rows = (counts.sum() / top_k).clamp(min=1)
    probability = router_logits.float().softmax(-1).sum(0) / rows
    return len(counts) * (counts / rows * probability).sum()


# By rl.policy_loss.
POLICY_LOSSES = {"ppo_clip": ppo_clip, "gspo": gspo, "cispo": cispo, "dppo_tv": dppo_tv, "dppo_kl": dppo_kl, "sapo": sapo}
