"""Divergences of a student p from a teacher q at each token of the student's own responses, by rl.distillation.loss.

Source: Agarwal et al. 2024 (GKD), https://arxiv.org/abs/2306.13649, on the student's samples (lambda 1). As there, no gradient goes through
the sampling: a token's loss changes the student at that token and not what it makes the student write later.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def sampled_reverse_kl(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, response_mask: torch.Tensor
) -> torch.Tensor:
    """Return an estimate of KL(p || q) at each token, from the sampled token alone: the policy gradient with advantage log q - log p.

    (p / p_old) * constant(log p - log q),   whose mean over tokens of p_old is the KL, and whose gradient is in expectation that of the KL,
        sum_v p_v (log p_v - log q_v) grad log p_v, on and off policy
    Source: Lu 2025, https://thinkingmachines.ai/blog/on-policy-distillation/ (reverse KL per token, discount 0); the gradient is that of
    `k2` in kl.py, with the ratio that off-policy samples need.

    Args:
        logprobs: [B, R] of the student, with gradient.
        old_logprobs: [B, R] of the policy that sampled; no gradient is taken.
        teacher_logprobs: [B, R] of the teacher; no gradient is taken.
        response_mask: [B, R] bool; masked entries are 0 in value and gradient even where they hold NaN.
    Returns:
        [B, R], to be aggregated like the policy loss.
    """
    logprobs, old, teacher = (x.where(response_mask, 0.0) for x in (logprobs, old_logprobs.detach(), teacher_logprobs.detach()))
    return torch.exp(logprobs - old) * (logprobs.detach() - teacher)


def reverse_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(p || q) = sum_v p_v (log p_v - log q_v): the student leaves out what the teacher finds unlikely.

    Source: Gu et al. 2024 (MiniLLM), https://arxiv.org/abs/2306.08543, section 2; the gradient there, of the whole response's KL, also has
    the divergence of later tokens, and this is its single-step part.

    Args:
        logprobs, teacher_logprobs: [..., V] of the same tokens, finite.
    Returns:
        [...], in nats.
    """
    return (logprobs.exp() * (logprobs - teacher_logprobs)).sum(-1)


def forward_kl(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor) -> torch.Tensor:
    """KL(q || p) = sum_v q_v (log q_v - log p_v): the student covers all that the teacher may write.

    Source: Hinton et al. 2015, https://arxiv.org/abs/1503.02531, up to the teacher's entropy; Agarwal et al. 2024, section 3.

    Arguments and result as of `reverse_kl`.
    """
    return (teacher_logprobs.exp() * (teacher_logprobs - logprobs)).sum(-1)


def jsd(logprobs: torch.Tensor, teacher_logprobs: torch.Tensor, *, beta: float) -> torch.Tensor:
    """Return the generalised Jensen-Shannon divergence: between forward KL (beta near 0) and reverse KL (beta near 1), and bounded.

    beta KL(q || m) + (1 - beta) KL(p || m),   m = beta q + (1 - beta) p
    Source: Agarwal et al. 2024, equation 1. Divided by beta it becomes the forward KL as beta goes to 0, divided by 1 - beta the reverse KL
    as beta goes to 1.

    Arguments and result as of `reverse_kl`; beta between 0 and 1.
    """
    mixture = torch.logaddexp(teacher_logprobs + math.log(beta), logprobs + math.log1p(-beta))
    return beta * forward_kl(mixture, teacher_logprobs) + (1.0 - beta) * forward_kl(mixture, logprobs)


MOST = -1e-7  # the largest log of a sum of probabilities, which leaves 1e-7 for the rest


def with_rest(logprobs: torch.Tensor) -> torch.Tensor:
    """Return the distribution over some tokens and all others as one, [..., K + 1].

    log p_rest = log(max(1 - sum_k p_k, 1e-7)): without the limit a sum that rounds to 1 in float32 would give -inf, whose divergence is
    infinite or NaN. Where the limit holds, the rest has no gradient.
    A divergence of two of these is at most that of the whole distributions, 0 where they are equal, and grows with K towards it (data
    processing inequality: Cover and Thomas 2006, Elements of Information Theory, section 2.8).

    Args:
        logprobs: [..., K] of different tokens of one distribution.
    """
    rest = torch.log(-torch.expm1(logprobs.logsumexp(-1, keepdim=True).clamp(max=MOST)))
    return torch.cat([logprobs, rest], -1)


def weighted(divergences: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """Return the divergences from several teachers, as one: their mean by the teachers' weights.

    For the forward KL it has the gradient of the KL from the mixture of the teachers; for the reverse KL that from their geometric mean.
    """
    return sum(weight * divergence for weight, divergence in zip(weights, divergences, strict=True)) / sum(weights)


# By rl.distillation.loss, of the whole vocabulary or of what `with_rest` returns.
DIVERGENCES = {"reverse_kl": reverse_kl, "forward_kl": forward_kl, "jsd": jsd}
