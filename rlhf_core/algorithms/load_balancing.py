"""The load-balancing loss of a mixture of experts: it keeps the router from sending every token to the same few experts."""

from __future__ import annotations

import torch


@torch.no_grad()
def expert_counts(router_logits: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """How often each expert is chosen.

    Args:
        router_logits: [N, E], a row for each token in each layer.
        top_k: experts per token.
    Returns:
        [E] float32; counts of parts add up to that of the whole.
    """
    chosen = router_logits.softmax(-1).topk(top_k, dim=-1).indices
    return torch.bincount(chosen.flatten(), minlength=router_logits.shape[-1]).float()


def load_balancing_loss(router_logits: torch.Tensor, counts: torch.Tensor, *, top_k: int) -> torch.Tensor:
    """This part's share of the step's load-balancing loss.

    E * sum_e f_e * P_e,   f_e = counts_e / M,   P_e = sum over the rows of softmax(router_logits)_e / M
    Source: Fedus et al. 2021 (Switch Transformer), https://arxiv.org/abs/2101.03961, equations 4 to 6; over several layers at once and
    with several experts per token as in the Mixtral and Qwen families of Hugging Face, where it is top_k when all experts get as much.

    M = sum(counts) / top_k rows, of the whole optimizer step: all micro-batches of all ranks. As f has no gradient the shares of the
    parts add up to the step's loss and gradient exactly (Qiu et al. 2025, https://arxiv.org/abs/2501.11873, on why the whole step's
    counts are better than a part's).

    Args:
        router_logits: [N, E] of this part, with gradient; padding isn't among them.
        counts: [E], of the whole step, from `expert_counts`.
        top_k: experts per token.
    Returns:
        [] scalar; 0 for a part, or a step, without tokens.
    """
    rows = (counts.sum() / top_k).clamp(min=1)
    probability = router_logits.float().softmax(-1).sum(0) / rows
    return len(counts) * (counts / rows * probability).sum()
