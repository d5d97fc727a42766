"""From a loss per token to the scalar of an optimizer step, the same however the step is cut into micro-batches and ranks."""

from __future__ import annotations

import torch


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
