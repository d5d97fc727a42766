"""Estimates of the reverse KL, KL(policy || reference) = E_policy[log policy - log reference], from single sampled tokens.

Source: Schulman 2020, http://joschu.net/blog/kl-approx.html
As a number, in the reward, each of the three works. As a term of the loss it is the gradient that counts: see kl_loss_term.
Masked entries may hold anything, NaN too: token_rewards and aggregate drop them.
"""

from __future__ import annotations

import math

import torch


def k1(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """log p - log q: unbiased, high variance, of either sign per token.

    Its gradient is the score function, whose expectation under the policy is 0: of no use in a loss.
    """
    return logprobs - ref_logprobs


def k2(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """(log p - log q)^2 / 2: biased as a number (right to second order where p is near q), never negative.

    Its gradient, (log p - log q) * grad log p, is without bias that of the reverse KL, for samples of the policy itself.
    """
    return 0.5 * (logprobs - ref_logprobs).square()


def k3(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """q/p - 1 - log(q/p): unbiased where q has no mass outside p's support, never negative, lower variance than k1.

    Its own gradient is that of the forward KL(q || p) in expectation; it needs the ratio that kl_loss_term puts before it.
    Not clamped: a token that the policy makes e^20 times less likely than the reference costs e^20.
    """
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def kl_loss_term(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    response_mask: torch.Tensor | None = None,
    *,
    estimator: str,
) -> torch.Tensor:
    """Return the KL penalty per token as a term of the loss: its gradient is in expectation that of KL(policy || reference).

    k2: as it is. Exact for samples of the current policy; after further updates on the same rollouts it lacks the ratio.
    k3: exp(log p - log p_old) * k3, the ratio live. Exact for samples of the old policy too, since
        E_old[(p / p_old) k3] = E_p[k3] = KL, whatever p is.

    Args:
        logprobs: [B, R] of the policy, with gradient.
        old_logprobs: [B, R] of the policy that sampled; no gradient is taken.
        ref_logprobs: [B, R] of the reference; no gradient is taken.
        response_mask: [B, R] bool; masked entries are 0 in value and gradient even where they hold NaN. None: all count.
        estimator: k2 or k3.
    Returns:
        [B, R], to be aggregated like the policy loss.
    Raises:
        ValueError: k1, which has no useful gradient, or an unknown name.
    """
    old_logprobs, ref_logprobs = old_logprobs.detach(), ref_logprobs.detach()
    if response_mask is not None:
        logprobs, old_logprobs, ref_logprobs = (x.where(response_mask, 0.0) for x in (logprobs, old_logprobs, ref_logprobs))
    if estimator == "k2":
        return k2(logprobs, ref_logprobs)
    if estimator == "k3":
        return torch.exp(logprobs - old_logprobs) * k3(logprobs, ref_logprobs)
    raise ValueError(
        f"KL estimator in the loss: expected k2 or k3, got {estimator}; k1 belongs in the reward, its gradient is 0 in expectation"
    )


def adaptive_kl_coef(coef: float, kl: float, *, target: float, horizon: int, samples: int) -> float:
    """Return the KL coefficient after a step, adapted so that the KL approaches its target.

    coef * (1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)
    Source: Ziegler et al. 2019, https://arxiv.org/abs/1909.08593, section 2.2, with samples / horizon in place of its constant 0.1.

    Args:
        coef: of the step.
        kl: of the step's responses from the reference, mean over responses, in nats per response.
        target: in the same units.
        horizon: samples in which the coefficient can change by a fifth.
        samples: responses of the step.
    Raises:
        ValueError: a KL that isn't finite, or a horizon so short that one step could make the coefficient 0 or negative.
    """
    if not math.isfinite(kl):
        raise ValueError(
            f"adaptive KL coefficient: expected a finite KL, got {kl}; look at the policy's and the reference's log-probabilities"
        )
    if horizon <= 0.2 * samples:
        raise ValueError(f"rl.kl.horizon: expected more than a fifth of a step's {samples} samples, got {horizon}; raise it")
    return coef * (1.0 + min(max(kl / target - 1.0, -0.2), 0.2) * samples / horizon)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}
