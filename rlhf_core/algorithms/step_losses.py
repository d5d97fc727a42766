"""The loss of process reward models: functions of tensors."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def step_cross_entropy(scores: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the labels of steps, per step, where sigmoid(score) is the probability that a step is right.

    -log sigmoid(s) for a right step, -log sigmoid(-s) for a wrong one; with two classes it is softmax cross-entropy of the logits (0, s).
    Source: Uesato et al. 2022, https://arxiv.org/abs/2211.14275, section 2.4; Wang et al. 2024 (Math-Shepherd),
    https://arxiv.org/abs/2312.08935, equation 2.

    Args:
        scores: [N]. right: [N] bool.
    Returns:
        [N]; sum and divide by the steps of the optimizer step.
    """
    return -logsigmoid(torch.where(right, scores, -scores))
