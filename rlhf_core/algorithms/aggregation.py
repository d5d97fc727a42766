"""From a loss per token to the scalar of an optimizer step, the same however the step is cut into micro-batches and ranks."""

from __future__ import annotations

import torch


def aggregate(
    token_loss: torch.Tensor, response_mask: torch.Tensor, *, mode: str, num_loss_tokens: int, num_sequences: int
) -> torch.Tensor:
    """This part's share of the step's loss.

    token_mean:    sum of the masked tokens / num_loss_tokens
    sequence_mean: sum over sequences of the mean over its masked tokens / num_sequences

    Both denominators count the whole optimizer step: all micro-batches of all ranks. So the shares *add up* to the step's loss,
    and so do their gradients: neither accumulation nor data parallelism may divide again (an engine that averages over ranks or
    micro-batches has to be multiplied back). token_mean is DAPO's (https://arxiv.org/abs/2503.14476), sequence_mean GRPO's
    (https://arxiv.org/abs/2402.03300). Dr. GRPO's constant horizon H (https://arxiv.org/abs/2503.20783) is token_mean with
    num_loss_tokens = num_sequences * H.

    Args:
        token_loss: [B, R]; masked entries may hold anything, NaN too, and get gradient 0.
        response_mask: [B, R] bool.
        mode: token_mean or sequence_mean.
        num_loss_tokens: True entries of the step's masks.
        num_sequences: rows of the step's masks with a True entry; the others add 0.
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
    raise ValueError(f"loss aggregation: expected token_mean or sequence_mean, got {mode}; see rl.loss_aggregation in params.yaml")
