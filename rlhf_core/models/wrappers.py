"""What the engines train: modules that return numbers for the tokens that are asked for and for no others.

Sequences are right-padded, prompt and response contiguous. Attention is causal, so no real token ever sees padding and no
attention mask is needed. The vocabulary projection runs on the selected positions only.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from rlhf_core.algorithms.logprobs import sampler_logprobs, token_entropy, token_logprobs, token_logprobs_and_entropy
from rlhf_core.models.build import scalar_head, trunk
from rlhf_core.models.cpu.layout import visible_branches
from rlhf_core.models.cpu.packed import can_pack, packed_states
from rlhf_core.models.head import can_project_in_pieces, head_logprobs
from rlhf_core.models.logits import logit_rule
from rlhf_core.models.masks import attention_arguments
from rlhf_core.models.reading import find_reading, label_index, own_scores
from rlhf_core.models.rotary import changes_with_length, check_length


@dataclass(frozen=True)
class TokenBatch:
    """Token sequences of one micro-batch and the tokens in them that count.

    input_ids: [B, T] int64, right-padded.
    selected: [B, T] bool; N of them are True.
    position_ids: [B, T] int64; None: 0 to T - 1 in each row.
    visible: [B, 1, T, T] bool, which tokens (last) each token sees; None: all before it, and itself, or as segments say.
    predicted_by: [B, T] int64, the position in its row of the token that predicts each selected one; None: the one before it.
    segments: [B, T] int64, where rows are a prefix and branches that see it and themselves: see `visible_branches`.
    """

    input_ids: torch.Tensor
    selected: torch.Tensor
    position_ids: torch.Tensor | None = None
    visible: torch.Tensor | None = None
    predicted_by: torch.Tensor | None = None
    segments: torch.Tensor | None = None

    def to(self, device: torch.device) -> TokenBatch:
        moved = (getattr(self, f.name) for f in fields(self))
        return TokenBatch(*(x if x is None else x.to(device) for x in moved))

    @property
    def length(self) -> int:
        """Of the longest sequence, with padding; of a row with branches a sequence is the prefix and one of them."""
        return self.input_ids.shape[1] if self.position_ids is None else int(self.position_ids.max()) + 1

    def mask(self) -> torch.Tensor | None:
        """Which tokens (last) each token sees, [B, 1, T, T] bool; None where attention is plainly causal."""
        return self.visible if self.segments is None else visible_branches(self.segments)

    def attention(self, model: PreTrainedModel) -> dict[str, Any]:
        """Arguments for a Hugging Face model; none where attention is plainly causal, within the windows that the model has."""
        visible = self.mask()
        return {} if visible is None else attention_arguments(model, self.position_ids, visible)

    def predictions(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of the N selected tokens, but for a row's first, which nothing predicts: rows, positions of the predicting tokens, ids."""
        rows, before = self.selected[:, 1:].nonzero(as_tuple=True)
        predicted_by = before if self.predicted_by is None else self.predicted_by[rows, before + 1]
        return rows, predicted_by, self.input_ids[rows, before + 1]


def collate_tokens(sequences: list[list[int]], starts: list[int], *, pad_id: int, ends: list[int] | None = None) -> TokenBatch:
    """Pad sequences to [B, T] and select the tokens from `starts[i]` to `ends[i]` (default: the end) of each."""
    lengths = torch.tensor([len(ids) for ids in sequences])
    columns = torch.arange(int(lengths.max()))
    input_ids = torch.full((len(sequences), len(columns)), pad_id)
    input_ids[columns < lengths[:, None]] = torch.tensor([token for ids in sequences for token in ids])
    last = lengths if ends is None else torch.tensor(ends)
    return TokenBatch(input_ids, (columns >= torch.tensor(starts)[:, None]) & (columns < last[:, None]))


class PolicyOutput(NamedTuple):
    """Of the N selected tokens, row by row. What wasn't asked for is None. A tuple, which DeepSpeed's hooks look into.

    logprobs: [N].
    entropy: [N], of the distribution that the token comes from.
    sampler_logprobs: [N], within the tokens that top-k and top-p leave.
    router_logits: [layers * M, E], of the M routed tokens in each layer with experts.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    sampler_logprobs: torch.Tensor | None
    router_logits: torch.Tensor | None


class PolicyModule(nn.Module):
    """Log-probabilities of selected tokens under a causal language model.

    Raises:
        ValueError: the model gives no logits.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self._rule = logit_rule(model, partial(_all_states, model))

    def forward(
        self,
        batch: TokenBatch,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        learn_entropy: bool = False,
        top_k: int | None = None,
        top_p: float = 1.0,
        routed: torch.Tensor | None = None,
    ) -> PolicyOutput:
        """Log-probability of each selected token given all before it.

        The first token of a sequence can't be selected: nothing predicts it.

        Args:
            with_entropy: also the entropy; with a gradient only if learn_entropy.
            top_k, top_p: with either, also the sampler's log-probabilities.
            routed: [B, T] bool, the tokens whose router logits are wanted; only of a model with experts.
        """
        rows, predicted_by, ids = batch.predictions()
        filtered, entropy = top_k is not None or top_p < 1.0, None
        if self._rule is None:
            logits, router_logits = _own_logits(self.model, batch, rows, predicted_by, routed)
        else:
            hidden, router_logits = _hidden_states(self.model, batch, rows, predicted_by, routed)
            head = self.model.get_output_embeddings()
            if can_project_in_pieces(head) and not filtered and not learn_entropy:
                how = {"temperature": temperature, "with_entropy": with_entropy, "rule": self._rule}
                logprobs, entropy = head_logprobs(head, hidden, ids, **how)
                return PolicyOutput(logprobs, entropy, None, router_logits)
            logits = self._rule(head(hidden))
        if with_entropy and not learn_entropy:
            logprobs, entropy = token_logprobs_and_entropy(logits, ids, temperature=temperature)
        else:
            logprobs = token_logprobs(logits, ids, temperature=temperature)
        return PolicyOutput(
            logprobs,
            token_entropy(logits, temperature=temperature) if learn_entropy else entropy,
            sampler_logprobs(logits, ids, temperature=temperature, top_k=top_k, top_p=top_p) if filtered else None,
            router_logits,
        )


class ScalarModule(nn.Module):
    """Scores or values at selected positions: a reward model or a critic.

    Args:
        label: of a model that gives several scores, the name or number of the one that counts.
    Raises:
        ValueError: the model gives no score, or several and none is chosen.
    """

    def __init__(self, model: PreTrainedModel, *, label: str | int | None = None):
        super().__init__()
        self.model = model
        self.reading = find_reading(model)
        self._label = label_index(model.config, self.reading.labels, label)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """The score [N] at each selected position, which has seen that token and all before it.

        Of a model whose tokens have no scores (`reading.of_tokens`): of each row, which ends with the one token that is selected.
        """
        if not self.reading.of_tokens:
            sequences = _whole_sequences(self.model, batch)
            return own_scores(self.model, sequences, together=self.reading.together)[:, self._label].float()
        hidden, _ = _hidden_states(self.model, batch, *batch.selected.nonzero(as_tuple=True))
        return scalar_head(self.model)(hidden)[:, self._label].float()

    def check_scores_tokens(self, subject: str, remedy: str) -> None:
        """
        Raises:
            ValueError: the model scores whole sequences only.
        """
        if not self.reading.of_tokens:
            raise ValueError(
                f"{subject}: expected a model whose score is a linear layer's output at a token, got {type(self.model).__name__}, "
                f"which scores whole sequences only; {remedy}"
            )


def _whole_sequences(model: PreTrainedModel, batch: TokenBatch) -> list[list[int]]:
    """The rows without their padding."""
    if batch.visible is not None or batch.segments is not None or not bool((batch.selected.sum(1) == 1).all()):
        raise ValueError(
            f"reward model: expected whole sequences for {type(model).__name__}, which has no scores of tokens, got parts; "
            "score each sequence in a row of its own"
        )
    ends = (batch.selected.int().argmax(1) + 1).tolist()
    return [ids[:end] for ids, end in zip(batch.input_ids.tolist(), ends, strict=True)]


def _all_states(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """The trunk's output [T, H] at each of the tokens [1, T]."""
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    return _hidden_states(model, TokenBatch(ids, everywhere), *everywhere.nonzero(as_tuple=True))[0]


def _hidden_states(
    model: PreTrainedModel, batch: TokenBatch, rows: torch.Tensor, positions: torch.Tensor, routed: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The trunk's output [N, H] at the given positions, and the routed tokens' router logits where some are asked for."""
    inner = trunk(model)
    if routed is None and can_pack(inner):
        how = {"position_ids": batch.position_ids, "visible": batch.visible, "segments": batch.segments}
        return packed_states(inner, batch.input_ids, rows, positions, **how), None
    outputs, router_logits = _asked(inner, batch, routed)
    return outputs.last_hidden_state[rows, positions], router_logits


def _own_logits(
    model: PreTrainedModel, batch: TokenBatch, rows: torch.Tensor, positions: torch.Tensor, routed: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Likewise, the logits [N, V] of the model's own forward."""
    outputs, router_logits = _asked(model, batch, routed)
    return outputs.logits[rows, positions], router_logits


def _asked(model: PreTrainedModel, batch: TokenBatch, routed: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """The output of a whole forward, of a model or its trunk, and the routed tokens' router logits where some are asked for."""
    if changes_with_length(model.config):
        check_length(model.config, batch.length)
    routing = {} if routed is None else {"output_router_logits": True}
    outputs = model(input_ids=batch.input_ids, use_cache=False, **batch.attention(model), **routing)
    return outputs, None if routed is None else torch.cat([layer[routed.flatten()] for layer in outputs.router_logits])
