"""What a batch of responses shows about the policy that wrote them: repetition, variety, length, distance, agreement. Pure functions."""

from __future__ import annotations

import math

import torch


def repetition(response_ids: torch.Tensor, response_mask: torch.Tensor, *, n: int) -> float:
    """Mean over responses of the share of n-grams that stood in the same response before.

    1 - distinct / all, in each response ("seq-rep-n" of Welleck et al. 2020, https://arxiv.org/abs/1908.04319, section 6).

    Args:
        response_ids: [B, R] int64, from 0 on.
        response_mask: [B, R] bool; an n-gram across a gap doesn't count.
    Returns:
        0 for responses that are too short for an n-gram twice; responses without any are left out (NaN: all are).
    """
    codes, whole = _ngrams(response_ids, response_mask, n=n)
    counts = whole.sum(1)
    if not counts.any():
        return math.nan
    nowhere = -1 - torch.arange(codes.shape[1])  # codes are never negative, so that these equal nothing
    ordered = codes.where(whole, nowhere).sort(1).values
    repeated = (ordered[:, 1:] == ordered[:, :-1]).sum(1)
    return float((repeated / counts.clamp(min=1))[counts > 0].mean())


def distinct(response_ids: torch.Tensor, response_mask: torch.Tensor, *, n: int) -> float:
    """Different n-grams among all n-grams of the whole batch (distinct-n of Li et al. 2016, https://arxiv.org/abs/1510.03055).

    It falls with the number of tokens: compare only batches of about the same size. NaN without n-grams.
    """
    codes, whole = _ngrams(response_ids, response_mask, n=n)
    found = codes[whole]
    return len(found.unique()) / len(found) if len(found) else math.nan


def _ngrams(ids: torch.Tensor, mask: torch.Tensor, *, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A number for each n-gram [B, max(R - n + 1, 0)], different for different ones, and whether all its tokens count."""
    if ids.shape[1] < n:
        return ids[:, :0], mask[:, :0]
    base = int(ids.max()) + 1
    assert base**n < 2**63, f"{n}-grams of {base} tokens don't fit in 64 bits"
    weights = base ** torch.arange(n)
    return (ids.unfold(1, n, 1) * weights).sum(-1), mask.unfold(1, n, 1).all(-1)


def correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Pearson's correlation of two vectors [B] over the rows where both are finite; NaN where one of them doesn't vary."""
    known = first.isfinite() & second.isfinite()
    a, b = first[known].double(), second[known].double()
    if len(a) < 2 or a.min() == a.max() or b.min() == b.max():
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).sum() / (a.square().sum() * b.square().sum()).sqrt())


def rank_correlation(first: torch.Tensor, second: torch.Tensor) -> float:
    """Spearman's correlation of two vectors [B] over the rows where both are finite; ties share the mean of their ranks."""
    known = first.isfinite() & second.isfinite()
    return correlation(_ranks(first[known]), _ranks(second[known]))


def _ranks(values: torch.Tensor) -> torch.Tensor:
    """[B] ranks from 1 on."""
    _, which, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    return (last - (counts - 1) / 2)[which]


def token_kl(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, response_mask: torch.Tensor) -> tuple[float, float, float]:
    """Mean, smallest and largest log ratio of a sampled token, policy over reference, in nats; NaN without tokens.

    The mean estimates the divergence per token (k1); the extremes name the token on which the two differ most.

    Args:
        logprobs, ref_logprobs: [B, R]; response_mask: [B, R] bool, masked entries may hold anything.
    """
    ratios = (logprobs - ref_logprobs)[response_mask]
    return (float(ratios.mean()), float(ratios.min()), float(ratios.max())) if len(ratios) else (math.nan,) * 3
