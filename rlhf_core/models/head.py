"""A language model's head: from hidden states to logits and log-probabilities.

    logits = cap * tanh(scale * head(hidden) / cap)        without a cap: scale * head(hidden)

Most models have a scale of 1 and no cap. Gemma 2 caps; Cohere, Granite and Falcon-H1 scale. `logit_rule` takes a rule from the model's
configuration and compares it with the model's own logits. Where no rule gives them (ModernBERT's decoder has layers before its head), the
model's whole forward computes them.

`LogprobHead` projects some rows at a time, so that the logits of all rows never exist together.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import Function
from transformers import PretrainedConfig, PreTrainedModel

from rlhf_core.algorithms.logprobs import scaled_logits
from rlhf_core.models.divergence import Divergence, InPieces, token_outputs
from rlhf_core.models.probe import PROBE_ERRORS, agree, probing

log = logging.getLogger(__name__)

PROBE = 8  # tokens
SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")  # or divisors
FORBIDDEN = -1e4  # a logit: finite, so that no gradient and no entropy is NaN
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


@dataclass(frozen=True)
class LogitRule:
    """The rule by which logits follow from the head's output.

    forbidden: tokens that sampling never draws, whose logits are so low that they have no probability.
    """

    scale: float = 1.0
    cap: float | None = None
    forbidden: tuple[int, ...] = ()

    def __call__(self, output: torch.Tensor) -> torch.Tensor:
        """Return the logits for the head's output, of the same shape; where they differ, in float32 at least."""
        if self == PLAIN:
            return output
        logits = output.to(torch.promote_types(output.dtype, torch.float32)) * self.scale
        logits = logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap
        return logits.index_fill(-1, torch.tensor(self.forbidden, device=logits.device), FORBIDDEN) if self.forbidden else logits

    def output_gradient(self, gradient: torch.Tensor, logits: torch.Tensor | None) -> torch.Tensor:
        """Return the gradient with respect to the head's output, given that with respect to the logits.

        d logits / d output = scale * (1 - (logits / cap)^2)

        Args:
            logits: unused without a cap.
        """
        if self.cap is not None:
            gradient = gradient * (1 - (logits / self.cap) ** 2)
        return gradient if self.scale == 1.0 else gradient * self.scale


PLAIN = LogitRule()


@torch.no_grad()
def logit_rule(model: PreTrainedModel, hidden_states: Callable[[torch.Tensor], torch.Tensor]) -> LogitRule | None:
    """Return the rule by which the model's logits follow from its hidden states, tried on a few tokens; None if no known rule does.

    Args:
        hidden_states: function from token ids [1, T] to the trunk's output [T, H], computed as in training.
    Raises:
        ValueError: the model gives no logits for each token of a sequence.
    """
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, PROBE), generator=torch.Generator().manual_seed(0))
    with probing(model):
        expected = _expected_logits(model, ids.to(model.device))
        try:
            output = model.get_output_embeddings()(hidden_states(ids.to(model.device)))
        except PROBE_ERRORS as error:
            output, why = None, f"{type(error).__name__}: {error}"
        else:
            why = "none of the rules known for its head's output gives them"
    for rule in _rules(model.config.get_text_config()):
        if output is not None and agree(rule(output), expected):
            return rule
    log.info("model: logits of %s come from its whole forward, which takes longer and more memory (%s)", type(model).__name__, why)
    return None


def _expected_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the logits [T, V] of the model's own forward.

    Raises:
        ValueError: it gives none.
    """
    name = type(model).__name__
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    except PROBE_ERRORS as error:
        raise ValueError(
            f"model: expected a causal language model, got {name}, whose forward ends in {type(error).__name__} on {ids.shape[1]} tokens: "
            f"{error}; choose another one"
        ) from error
    if logits is None or logits.shape[:-1] != ids.shape:
        got = "none" if logits is None else f"some of shape {tuple(logits.shape)}"
        raise ValueError(f"model: expected logits of shape (1, {ids.shape[1]}, V) from {name}'s forward, got {got}; choose another one")
    return logits[0]


def _rules(config: PretrainedConfig) -> Iterator[LogitRule]:
    """The rules to try. Those that the configuration names come first, because near 0 a capped logit hardly differs from another one."""
    values = [getattr(config, name, None) for name in SCALES]
    scales = [scale for value in values if value for scale in (float(value), 1.0 / value)]
    caps = [float(cap) for name in CAPS if (cap := getattr(config, name, None))]
    for scale, cap in itertools.product([*dict.fromkeys([*scales, 1.0])], [*caps, None]):
        yield LogitRule(scale, cap)


# Log-probabilities, some rows at a time

LEAST_ROWS, MOST_ROWS = 512, 1024  # projected at a time; fewer where that keeps them in a CPU's cache
PIECE_BYTES = 1 << 28  # of a piece's logits in float32, between these limits
KEPT_BYTES = 1 << 30  # of probabilities kept for the backward pass; a larger matrix is recomputed there


class LogprobHead(nn.Linear):
    """A language model's head that can also compute log-probabilities without holding the logits of all rows.

    Both are calls of the module, so that ZeRO 3 gathers the weight for them.

    keeps_probabilities: at most KEPT_BYTES of probabilities are kept for the backward pass; False: all are recomputed there.
    """

    def __init__(self, head: nn.Linear):
        nn.Module.__init__(self)
        self.in_features, self.out_features = head.in_features, head.out_features
        self.weight = head.weight
        self.register_parameter("bias", None)
        self.keeps_probabilities = True
        self.train(head.training)

    def forward(
        self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None, *, divergence: Divergence | None = None, **options: Any
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Return the head's output; with token ids the result of `head_logprobs`, or with a divergence of `head_divergence`."""
        if token_ids is None:
            return super().forward(hidden)
        if divergence is not None:
            return head_divergence(self.weight, hidden, token_ids, divergence, **options)
        return head_logprobs(self.weight, hidden, token_ids, keep=self.keeps_probabilities, **options)


def use_logprob_head(model: PreTrainedModel) -> None:
    """Put a `LogprobHead` with the same weight in the place of the model's head, if that is a plain weight."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and head.bias is None:
        (place,) = (name for name, part in model.named_modules() if part is head)
        parent, _, own = place.rpartition(".")
        setattr(model.get_submodule(parent), own, LogprobHead(head))


def head_logprobs(
    weight: torch.Tensor,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    *,
    temperature: float,
    with_entropy: bool,
    rule: LogitRule = PLAIN,
    keep: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the `token_logprobs` of the logits that the rule makes of the head's output, and their `token_entropy` without a gradient.

    Args:
        weight: [V, H], the head's weight.
        hidden: [N, H]; bfloat16 and float16 are projected as they are, and the logits computed with in float32.
        token_ids: [N] int64.
        keep: whether probabilities may be kept for the backward pass.
    Returns:
        [N], and [N] or None.
    """
    learns = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    logprobs, entropy = _HeadLogprobs.apply(hidden, weight, token_ids, temperature, with_entropy, learns and keep, rule)
    return logprobs, entropy if with_entropy else None


def head_divergence(
    weight: torch.Tensor,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    divergence: Divergence,
    *,
    temperature: float,
    with_entropy: bool,
    rule: LogitRule = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Return the result of `head_logprobs`, and the divergence [N] from the teachers; logits are computed again in the backward pass."""

    def outputs(product: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return token_outputs(rule(product), token_ids[rows], divergence, rows, temperature=temperature)

    of_all = pieces(len(hidden), weight, at_most=rows_at_a_time(len(weight)))
    logprobs, entropy, found = InPieces.apply(hidden, weight, outputs, of_all)
    return logprobs, entropy if with_entropy else None, found


def rows_at_a_time(vocabulary: int) -> int:
    """Return the number of rows of hidden states that are projected together where a CPU's cache doesn't matter."""
    return min(MOST_ROWS, max(LEAST_ROWS, PIECE_BYTES // (4 * vocabulary)))


class _HeadLogprobs(Function):
    @staticmethod
    def forward(ctx, hidden, weight, token_ids, temperature, with_entropy, may_keep, rule):
        precision = torch.promote_types(hidden.dtype, torch.float32)
        logprobs, entropy, normalizer = (hidden.new_zeros(len(hidden), dtype=precision) for _ in range(3))
        keeps = may_keep and rule.cap is None and 4 * len(hidden) * len(weight) <= KEPT_BYTES
        kept = hidden.new_empty(len(hidden) if keeps else 0, len(weight), dtype=precision)
        for piece in pieces(len(hidden), weight, at_most=rows_at_a_time(len(weight))):
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
        for piece in pieces(len(hidden), weight, at_most=rows_at_a_time(len(weight))):
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


# Of a piece's product, for each thread. If the weight alone fills a core's cache, all rows are multiplied at once.
CACHED_BYTES = 1_000_000


def piece_rows(num_rows: int, weight: torch.Tensor, *, at_most: int | None = None) -> int:
    """Return the number of rows to multiply together by a weight [width, inputs]; at least one.

    Args:
        at_most: number of rows if the cache doesn't matter, as on a GPU; None: all rows.
    """
    if weight.device.type == "cpu" and 4 * weight.numel() <= CACHED_BYTES:
        return max(32, CACHED_BYTES // (4 * len(weight)) // 32 * 32) * torch.get_num_threads()
    return max(1, at_most or num_rows)


def pieces(num_rows: int, weight: torch.Tensor, *, at_most: int | None = None) -> list[slice]:
    """Slices of consecutive rows that are multiplied together; for the arguments see `piece_rows`."""
    rows = piece_rows(num_rows, weight, at_most=at_most)
    return [slice(first, first + rows) for first in range(0, num_rows, rows)]
