"""Importance weights for samples of a rollout engine whose probabilities differ from the trainer's."""

from __future__ import annotations

import math

import torch


@torch.no_grad()
def importance_weights(
    old_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, response_mask: torch.Tensor, *, kind: str, low: float, high: float
) -> tuple[torch.Tensor, dict[str, float]]:
    """Return the factor of each token's policy loss, and the mismatch between rollout engine and trainer.

    With ratio_t = exp(old_logprobs_t - rollout_logprobs_t):
    none:          1
    tis:           min(ratio_t, high)
    icepop:        ratio_t if low <= ratio_t <= high, else 0
    sequence_tis:  min(product of the response's ratios, high), at each of its tokens
    sequence_mask: 1 if low <= geometric mean of the response's ratios <= high, else 0, at each of its tokens

    Sources: tis: Yao et al. 2025, https://fengyao.notion.site/off-policy-rl; icepop: Ring-1T, https://arxiv.org/abs/2510.18855; the two
    for sequences: Liu et al. 2025, "When speed kills stability", https://richardli.xyz/rl-collapse.

    sequence_tis uses the product, which is the importance ratio of the whole response. sequence_mask rejects whole responses: bounds on
    the product would reject long responses for their length, while the geometric mean has the same bounds at any length. It stays close
    to 1, so its bounds have to be closer than a token's.

    Args:
        old_logprobs: [B, R], the trainer's before the update, of the distribution that was sampled from.
        rollout_logprobs: [B, R], the rollout engine's.
        response_mask: [B, R] bool; masked entries may hold anything.
        kind: none, tis, icepop, sequence_tis or sequence_mask.
        low, high: bounds; none uses neither, tis and sequence_tis only high.
    Returns:
        Weights [B, R], constants, 1 where masked; and over the unmasked tokens, for every kind (NaN without tokens):
        mismatch_mean, mismatch_max: of |log ratio|;
        ratio_mean: of the ratio, 1 in expectation;
        mismatch_kl: mean of ratio - 1 - log ratio, which estimates KL(rollout engine || trainer) and is never negative;
        corrected_fraction: tokens whose weight was truncated or set to 0.
    Raises:
        ValueError: another kind.
    """
    log_ratio = (old_logprobs.double() - rollout_logprobs.double()).where(response_mask, 0.0)
    ratio = log_ratio.exp()
    if kind == "none":
        weights, corrected = torch.ones_like(ratio), torch.zeros_like(response_mask)
    elif kind == "tis":
        weights, corrected = ratio.clamp(max=high), ratio > high
    elif kind == "icepop":
        corrected = (ratio < low) | (ratio > high)
        weights = ratio.masked_fill(corrected, 0.0)
    elif kind == "sequence_tis":
        product = log_ratio.sum(1, keepdim=True).exp().expand_as(ratio)
        weights, corrected = product.clamp(max=high), product > high
    elif kind == "sequence_mask":
        mean = (log_ratio.sum(1, keepdim=True) / response_mask.sum(1, keepdim=True).clamp(min=1)).exp().expand_as(ratio)
        corrected = (mean < low) | (mean > high)
        weights = (~corrected).to(ratio.dtype)
    else:
        raise ValueError(
            f"correction: expected none, tis, icepop, sequence_tis or sequence_mask, got {kind}; see rl.correction.kind in params.yaml"
        )
    tokens = int(response_mask.sum()) or math.nan
    metrics = {
        "mismatch_mean": float(log_ratio.abs().sum()) / tokens,
        "mismatch_max": float(log_ratio.abs().max()) if response_mask.any() else math.nan,
        "ratio_mean": float(ratio.where(response_mask, 0.0).sum()) / tokens,
        "mismatch_kl": float((torch.expm1(log_ratio) - log_ratio).sum()) / tokens,
        "corrected_fraction": int((corrected & response_mask).sum()) / tokens,
    }
    return weights.where(response_mask, 1.0).to(old_logprobs.dtype), metrics
