"""Losses on pairs of which a person preferred one."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid


def bradley_terry(
    chosen_scores: torch.Tensor, rejected_scores: torch.Tensor, *, margin: float | torch.Tensor, centering_coef: float
) -> torch.Tensor:
    """Negative log-likelihood of the preferences under a Bradley-Terry model, per pair.

    -log sigmoid(s_chosen - s_rejected - margin) + centering_coef * (s_chosen + s_rejected)^2

    Sources: Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 1; the margin, Llama 2, https://arxiv.org/abs/2307.09288,
    equation 2; the centring, which fixes the scores' free offset, Eisenstein et al. 2023, https://arxiv.org/abs/2312.09244.

    Args:
        chosen_scores, rejected_scores: [B].
        margin: by how much the chosen score should lead; one number, or [B].
        centering_coef: 0 leaves the offset free.
    Returns:
        [B]; sum and divide by the pairs of the optimizer step.
    """
    likelihood = logsigmoid(chosen_scores - rejected_scores - margin)
    return centering_coef * (chosen_scores + rejected_scores).square() - likelihood
