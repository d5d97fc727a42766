"""The divergence of a model's next-token distributions from those of teachers, some rows at a time.

The logits of all rows never exist together, neither the model's nor a teacher's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd import Function

from rlhf_core.algorithms.distillation import DIVERGENCES, weighted, with_rest
from rlhf_core.algorithms.logprobs import scaled_logits

Projection = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Target:
    """What a teacher computes for N tokens in the update.

    states: [N, H], hidden states that predict the tokens, or their logits.    logits: from some rows of `states` to their logits [n, V].
    weight: of this teacher among several.
    """

    states: torch.Tensor
    logits: Projection
    weight: float

    def compared(self, logprobs: torch.Tensor, rows: slice, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's and the teacher's log-probabilities at some of the tokens, [n, V] each; see `Divergence`."""
        with torch.no_grad():
            logits = scaled_logits(self.logits(self.states[rows]), temperature)
            common = min(logits.shape[-1], logprobs.shape[-1])
            teacher = logits[:, :common].log_softmax(-1)
        return logprobs if common == logprobs.shape[-1] else logprobs[:, :common].log_softmax(-1), teacher


@dataclass(frozen=True)
class TopTarget:
    """A teacher's likeliest tokens at N tokens, known before the update.

    logprobs: [N, K], at the temperature of the update.    ids: [N, K] int64.    weight: of this teacher among several.
    """

    logprobs: torch.Tensor
    ids: torch.Tensor
    weight: float

    def compared(self, logprobs: torch.Tensor, rows: slice, *, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's and the teacher's log-probabilities of these tokens and of the rest, [n, K + 1] each; see `Divergence`."""
        return with_rest(logprobs.gather(-1, self.ids[rows])), with_rest(self.logprobs[rows].to(logprobs.dtype))


@torch.no_grad()
def likeliest(
    states: torch.Tensor, logits: Projection, pieces: Sequence[slice], *, count: int, vocabulary: int, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and ids of a teacher's likeliest tokens, [N, count] each, the likeliest first.

    Args:
        states, logits: as of Target.    pieces: rows whose logits exist together.    vocabulary: ids from which they are chosen.
    """
    found = [scaled_logits(logits(states[rows]), temperature).log_softmax(-1)[:, :vocabulary].topk(count) for rows in pieces]
    if not found:
        return states.new_zeros(0, count), torch.zeros(0, count, dtype=torch.int64, device=states.device)
    return torch.cat([top.values for top in found]).float(), torch.cat([top.indices for top in found])


@dataclass(frozen=True)
class Divergence:
    """A divergence from teachers at the same N tokens.

    kind: of DIVERGENCES.    options: its further arguments.
    """

    kind: str
    options: dict[str, float]
    targets: Sequence[Target | TopTarget]

    def __call__(self, logprobs: torch.Tensor, rows: slice, *, temperature: float) -> torch.Tensor:
        """Return the divergence [n] at some of the tokens.

        Models whose vocabularies are padded to other sizes are compared on the ids that both have.

        Args:
            logprobs: [n, V] of the model at these tokens, at this temperature.
        """
        found = []
        for target in self.targets:
            found.append(DIVERGENCES[self.kind](*target.compared(logprobs, rows, temperature=temperature), **self.options))
        return weighted(found, [target.weight for target in self.targets])


def token_outputs(
    logits: torch.Tensor, token_ids: torch.Tensor, divergence: Divergence, rows: slice, *, temperature: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probability of each given token, entropy without a gradient, and divergence, [n] each.

    Args:
        logits: [n, V].    token_ids: [n].    rows: of the divergence's targets, to which these belong.
    """
    logprobs = scaled_logits(logits, temperature).log_softmax(-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)
    with torch.no_grad():
        lowest = torch.finfo(logprobs.dtype).min  # in place of -inf, which times 0 is NaN
        entropy = -torch.linalg.vecdot(logprobs.exp(), logprobs.clamp(min=lowest))
    return chosen, entropy, divergence(logprobs, rows, temperature=temperature)


class InPieces(Function):
    """Outputs [N] of a head's product with all hidden states, some rows at a time; in the backward pass each piece is computed again.

    Args:
        hidden: [N, H].    weight: [V, H].
        outputs: from a piece's product [n, V] and its rows to log-probabilities, entropy and divergence, [n] each.
        pieces: the rows of each piece.
    """

    @staticmethod
    def forward(ctx, hidden, weight, outputs, pieces):
        ctx.save_for_backward(hidden, weight)
        ctx.outputs, ctx.pieces = outputs, pieces
        found = [outputs(hidden[piece] @ weight.t(), piece) for piece in pieces]
        logprobs, entropy, divergence = (torch.cat(parts) for parts in zip(*found, strict=True)) if found else hidden.new_zeros(3, 0)
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, divergence

    @staticmethod
    def backward(ctx, logprobs_grad, _, divergence_grad):
        hidden, weight = ctx.saved_tensors
        hidden_grad = torch.zeros_like(hidden)
        weight_grad = torch.zeros_like(weight, dtype=logprobs_grad.dtype) if ctx.needs_input_grad[1] else None  # with adapters it is frozen
        for piece in ctx.pieces:
            with torch.enable_grad():
                product = (hidden[piece] @ weight.t()).detach().requires_grad_()
                logprobs, _, divergence = ctx.outputs(product, piece)
            (grad,) = torch.autograd.grad([logprobs, divergence], product, [logprobs_grad[piece], divergence_grad[piece]])
            torch.mm(grad.to(weight.dtype), weight, out=hidden_grad[piece])
            if weight_grad is not None:
                weight_grad += grad.to(weight.dtype).t() @ hidden[piece]
        return hidden_grad, None if weight_grad is None else weight_grad.to(weight.dtype), None, None
