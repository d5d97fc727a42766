"""Log-probabilities straight from hidden states: the vocabulary is projected on for some rows at a time, and all logits are never there."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import Function

from rlhf_core.algorithms.logprobs import scaled_logits
from rlhf_core.models.cpu.pieces import pieces
from rlhf_core.models.logits import PLAIN, LogitRule

# Projected on at a time. Fewer where that keeps them in a CPU's cache: of 3,072 rows in a vocabulary of 390 forward and backward then take
# 0.63 of the time.
MOST_ROWS = 4096
KEPT_BYTES = 1 << 30  # of probabilities for the backward pass; more are computed again


def can_project_in_pieces(head: nn.Module) -> bool:
    """Whether `head_logprobs` computes what this head would: a plain weight, all of it here."""
    return type(head) is nn.Linear and head.bias is None and not hasattr(head.weight, "ds_id")  # ZeRO 3 gathers it when the head is called


def head_logprobs(
    head: nn.Linear, hidden: torch.Tensor, token_ids: torch.Tensor, *, temperature: float, with_entropy: bool, rule: LogitRule = PLAIN
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`token_logprobs` of the logits that the rule makes of the head's output; and `token_entropy`, without a gradient.

    Args:
        hidden: [N, H]; bfloat16 and float16 are projected as they are, and the logits computed with in float32.
        token_ids: [N] int64.
    Returns:
        [N], and [N] or None.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or head.weight.requires_grad)
    logprobs, entropy = _HeadLogprobs.apply(hidden, head.weight, token_ids, temperature, with_entropy, learns, rule)
    return logprobs, entropy if with_entropy else None


class _HeadLogprobs(Function):
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, with_entropy, learns, rule):
        precision = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, normalizer = (hidden.new_zeros(len(hidden), dtype=precision) for _ in range(3))
        keeps = learns and rule.cap is None and 4 * len(hidden) * len(weight) <= KEPT_BYTES
        kept = hidden.new_empty(len(hidden) if keeps else 0, len(weight), dtype=precision)
        for piece in pieces(len(hidden), weight, at_most=MOST_ROWS):
            scaled, chosen = scaled_logits(rule(hidden[piece] @ weight.t()), temperature), token_ids[piece, None]
            all_logprobs = scaled.log_softmax(-1)
            logprobs[piece] = all_logprobs.gather(-1, chosen).squeeze(-1)
            normalizer[piece] = scaled.gather(-1, chosen).squeeze(-1) - logprobs[piece]
            if keeps or with_entropy:
                probabilities = torch.exp(all_logprobs, out=kept[piece] if keeps else None)
            if with_entropy:
                entropy[piece] = -torch.linalg.vecdot(probabilities, all_logprobs)
        ctx.save_for_backward(hidden, weight, token_ids, kept, normalizer)
        ctx.temperature, ctx.keeps, ctx.rule = temperature, keeps, rule
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        hidden, weight, token_ids, kept, normalizer = ctx.saved_tensors
        hidden_grad = torch.empty_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=grad.dtype) if ctx.needs_input_grad[1] else None  # with adapters it is frozen
        for piece in pieces(len(hidden), weight, at_most=MOST_ROWS):
            part, logits = grad[piece, None] / ctx.temperature, None
            if ctx.keeps:
                probabilities = kept[piece]
            else:
                logits = ctx.rule(hidden[piece] @ weight.t())
                probabilities = (scaled_logits(logits, ctx.temperature) - normalizer[piece, None]).exp_()
            logits_grad = (probabilities * -part).scatter_add_(-1, token_ids[piece, None], part)
            output_grad = ctx.rule.output_gradient(logits_grad, logits).to(weight.dtype)
            torch.mm(output_grad, weight, out=hidden_grad[piece])
            if weight_grad is not None:
                weight_grad += output_grad.t() @ hidden[piece]
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None, None, None, None
