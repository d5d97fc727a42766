"""Terms of the reward that depend on the response's length alone."""

from __future__ import annotations

import torch


def overlong_penalty(lengths: torch.Tensor, *, max_new_tokens: int, buffer: int, penalty: float) -> torch.Tensor:
    """What to subtract from the reward of a response that comes close to the limit.

    penalty * clip((length - (max_new_tokens - buffer)) / buffer, 0, 1)
    Source: DAPO, https://arxiv.org/abs/2503.14476, equation 13, whose penalty is 1.

    Args:
        lengths: [B] sampled tokens, the end token included.
        max_new_tokens: where the penalty is full.
        buffer: tokens before that over which it grows; above 0.
        penalty: in the reward's units.
    Returns:
        [B] float, between 0 and penalty.
    """
    return penalty * ((lengths - (max_new_tokens - buffer)) / buffer).clamp(0.0, 1.0)
