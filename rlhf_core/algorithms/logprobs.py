"""Log-probability and entropy of tokens from logits, at the temperature at which the tokens were sampled."""

from __future__ import annotations

import torch
from torch.autograd import Function
from torch.nn import functional as F


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Log-probability of each given token.

    log p(id) = z[id] - logsumexp(z),   z = logits / temperature

    Torch's cross-entropy, which keeps one tensor of the logits' size in float32 for the backward pass and on a CPU takes half the time of
    the equation written out. Rounding is about 1e-7 of the normaliser's size.

    Args:
        logits: [N, V]; bfloat16 and float16 are computed in float32.
        token_ids: [N] int64.
        temperature: above 0, the one used for sampling; otherwise ratios and KL compare different distributions.
    Returns:
        [N], natural logarithms.
    """
    return -F.cross_entropy(scaled_logits(logits, temperature), token_ids, reduction="none")


def token_logprobs_and_entropy(logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """`token_logprobs`, and `token_entropy` without a gradient, in fewer passes over the logits.

    Returns:
        [N], [N].
    """
    return _LogprobsAndEntropy.apply(scaled_logits(logits, temperature), token_ids)


class _LogprobsAndEntropy(Function):
    @staticmethod
    def forward(ctx, scaled, token_ids):
        all_logprobs = scaled.log_softmax(-1)
        logprobs = all_logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
        probabilities = all_logprobs.exp()
        ctx.save_for_backward(probabilities, token_ids)
        lowest = torch.finfo(all_logprobs.dtype).min  # in place of -inf, which times 0 is NaN
        entropy = -torch.linalg.vecdot(probabilities, all_logprobs.clamp_(min=lowest))
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        probabilities, token_ids = ctx.saved_tensors
        return (probabilities * -grad.unsqueeze(-1)).scatter_add_(-1, token_ids.unsqueeze(-1), grad.unsqueeze(-1)), None


def sampler_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, *, temperature: float, top_k: int | None, top_p: float) -> torch.Tensor:
    """Log-probability of each given token under what it was sampled from: the tokens that top-k and top-p leave, renormalised.

    A given token always stays: it was sampled, so it can only have fallen out by rounding at the border.

    Args:
        logits, token_ids, temperature, top_k, top_p: as of `token_logprobs` and `left_logits`.
    Returns:
        [N], natural logarithms.
    """
    ids = token_ids.unsqueeze(-1)
    sampled = scaled_logits(logits, temperature).gather(-1, ids)
    left = left_logits(logits, temperature=temperature, top_k=top_k, top_p=top_p).scatter(-1, ids, sampled)
    return sampled.squeeze(-1) - left.logsumexp(-1)


def left_logits(logits: torch.Tensor, *, temperature: float, top_k: int | None, top_p: float) -> torch.Tensor:
    """Logits at a temperature, -inf where top-k or top-p leave a token out.

    First the top_k largest logits stay (ties with the smallest of them too), then of those the most probable ones, up to and including
    the first at which their summed probability passes top_p; that is vLLM's order.

    Args:
        logits: [N, V].
        temperature: above 0.
        top_k: None: all tokens.
        top_p: above 0, at most 1; 1: all tokens.
    Returns:
        [N, V], float32 at least.
    """
    scaled = scaled_logits(logits, temperature)
    if top_k is None and top_p == 1.0:
        return scaled
    values, order = scaled.sort(-1)
    if top_k is not None and top_k < values.shape[-1]:
        values = values.masked_fill(values < values[:, -top_k, None], -torch.inf)
    if top_p < 1.0:
        dropped = values.softmax(-1).cumsum(-1) <= 1 - torch.tensor(top_p, dtype=values.dtype)
        dropped[:, -1] = False
        values = values.masked_fill(dropped, -torch.inf)
    return torch.empty_like(values).scatter(-1, order, values)


def token_entropy(logits: torch.Tensor, *, temperature: float) -> torch.Tensor:
    """Entropy of the next-token distribution, in nats: -sum_v p_v log p_v.

    Args:
        logits: [N, V]; -inf (a forbidden token) has probability 0 and adds nothing.
        temperature: above 0.
    Returns:
        [N], with gradient.
    """
    logprobs = scaled_logits(logits, temperature).log_softmax(-1)
    impossible = logprobs == -torch.inf
    return -(logprobs.exp() * logprobs.masked_fill(impossible, 0.0)).sum(-1)


def scaled_logits(logits: torch.Tensor, temperature: float) -> torch.Tensor:
    """Over the temperature, in float32 at least."""
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return precise if temperature == 1.0 else precise / temperature
