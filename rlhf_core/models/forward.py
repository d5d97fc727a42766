"""The modules that engines train: they return log-probabilities or scores of a batch's selected tokens.

The vocabulary projection runs on the selected positions only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear
from transformers import PreTrainedModel

from rlhf_core.algorithms.logprobs import sampler_logprobs, token_entropy, token_logprobs, token_logprobs_and_entropy
from rlhf_core.models.backend import Backend, run_model
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import scalar_head, trunk
from rlhf_core.models.cpu.backend import CpuBackend
from rlhf_core.models.divergence import Divergence, Projection, token_outputs
from rlhf_core.models.head import PLAIN, LogprobHead, logit_rule, use_logprob_head
from rlhf_core.models.recompute import recomputes_layers
from rlhf_core.models.score_head import label_index, probe_score_head, sequence_scores
from rlhf_core.models.split import SequenceSplit, own_columns
from rlhf_core.models.vision import with_gradients_of_vision

GENERAL, CPU = Backend(), CpuBackend()


def backend_of(model: PreTrainedModel) -> Backend:
    """Return the fastest backend for a model in its current state: an engine may move it, cast it or partition its weights.

    Gradient checkpointing is a matter of the model's own layers.
    """
    return CPU if CPU.supports(model) and not recomputes_layers(model) else GENERAL


def common_backend(*modules: PolicyModule | ScalarModule) -> Backend:
    """Return the fastest backend for all of these modules, for work that involves several."""
    return CPU if all(module.backend is CPU for module in modules) else GENERAL


class PolicyOutput(NamedTuple):
    """Results for the N selected tokens, row by row; None where not requested. A tuple, which DeepSpeed's hooks look into.

    logprobs: [N].
    entropy: [N], of the distribution that the token comes from.
    sampler_logprobs: [N], within the tokens that top-k and top-p leave.
    router_logits: [layers * M, E], of the M routed tokens in each layer with experts.
    divergence: [N], from teachers.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor | None
    sampler_logprobs: torch.Tensor | None
    router_logits: torch.Tensor | None
    divergence: torch.Tensor | None = None


class PolicyModule(nn.Module):
    """Computes log-probabilities of selected tokens under a causal language model, whose head becomes a `LogprobHead` if it can.

    split: set where ranks share each sequence; every rank then returns what all of them compute.

    Raises:
        ValueError: the model gives no logits.
    """

    split: SequenceSplit | None = None

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model

        def hidden_states(ids: torch.Tensor) -> torch.Tensor:
            """Return the trunk's output [N, H] at the given rows and positions, and the router logits of the routed tokens, if any."""
            everywhere = torch.ones_like(ids, dtype=torch.bool)
            # In bfloat16 the model's own rounding, of several percent in a deep model, would look like another rule.
            backend = backend_of(model) if model.dtype == torch.float32 else GENERAL
            return backend.hidden_states(model, TokenBatch(ids, everywhere), *everywhere.nonzero(as_tuple=True))[0]

        self._rule = logit_rule(model, hidden_states)
        if self._rule is not None:
            use_logprob_head(model)

    @property
    def backend(self) -> Backend:
        """The backend that computes the hidden states; its `map` may run several forward passes of this module at the same time."""
        return GENERAL if self._rule is None or self.split is not None else backend_of(self.model)

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
        divergence: Divergence | None = None,
        states_only: bool = False,
        forbidden: tuple[int, ...] = (),
    ) -> PolicyOutput | torch.Tensor:
        """Return the log-probability of each selected token given all tokens before it.

        The first token of a sequence can't be selected: nothing predicts it.

        Args:
            with_entropy: also the entropy; with a gradient only if learn_entropy.
            top_k, top_p: with either, also the sampler's log-probabilities.
            routed: [B, T] bool, the tokens whose router logits are returned; only for a model with experts.
            divergence: from teachers at the selected tokens; not where ranks share each sequence.
            forbidden: tokens that sampling never draws; the others share their probability. Not where ranks share each sequence.
            states_only: return the states that predict the tokens, of which `projection` makes logits, and compute nothing more.
        """
        rows, predicted_by, ids = batch.predictions()
        output_options = {
            "temperature": temperature,
            "with_entropy": with_entropy,
            "learn_entropy": learn_entropy,
            "top_k": top_k,
            "top_p": top_p,
            "divergence": divergence,
        }
        if self.split is not None:
            return self._of_parts(batch, rows, predicted_by, ids, self.split, routed=routed, **output_options)
        if self._rule is None:
            outputs, router_logits = run_model(self.model, batch, routed)
            states = outputs.logits[rows, predicted_by]
        else:
            states, router_logits = self.backend.hidden_states(self.model, batch, rows, predicted_by, routed=routed)
        if batch.pictures is not None and torch.is_grad_enabled():
            states = with_gradients_of_vision(self.model, states)
        return states if states_only else self._output(states, ids, router_logits, **output_options, forbidden=forbidden)

    def projection(self, whole: Callable[[torch.Tensor], torch.Tensor]) -> Projection:
        """What makes logits [n, V] of `states_only`'s states, without a call of the module.

        Args:
            whole: from a weight of the head, of which this rank may have a share, to the whole of it.
        """
        if self._rule is None:
            return lambda states: states
        head, rule = self.model.get_output_embeddings(), self._rule
        weight, bias = (None if part is None else whole(part) for part in (head.weight, head.bias))
        return lambda states: rule(linear(states, weight, bias))

    def _of_parts(
        self,
        batch: TokenBatch,
        rows: torch.Tensor,
        predicted_by: torch.Tensor,
        ids: torch.Tensor,
        split: SequenceSplit,
        *,
        routed: torch.Tensor | None,
        **output_options: Any,
    ) -> PolicyOutput:
        """Return the output for all selected tokens; this rank computes those that its own columns predict."""
        if routed is not None:
            raise ValueError("sequence_parallel: expected no router logits to be needed, got some; set sequence_parallel to 1")
        part = own_columns(self.model, batch, rows, predicted_by, split)
        states = part.run(self.model).logits if self._rule is None else part.run(trunk(self.model)).last_hidden_state
        output = self._output(states[part.rows, part.positions], ids[part.own], None, **output_options)
        return PolicyOutput(*(None if values is None else split.joined(values, part.own) for values in output))

    def _output(
        self,
        states: torch.Tensor,
        ids: torch.Tensor,
        router_logits: torch.Tensor | None,
        *,
        temperature: float,
        with_entropy: bool,
        learn_entropy: bool,
        top_k: int | None,
        top_p: float,
        divergence: Divergence | None = None,
        forbidden: tuple[int, ...] = (),
    ) -> PolicyOutput:
        """Return the output for the selected tokens, from their hidden states.

        Args:
            states: [N, H] hidden states that predict the tokens; without a rule for the head their logits [N, V].
        """
        filtered, entropy = top_k is not None or top_p < 1.0, None
        rule = replace(self._rule or PLAIN, forbidden=forbidden)
        if self._rule is None:
            logits = rule(states)
        else:
            head = self.model.get_output_embeddings()
            if isinstance(head, LogprobHead) and not filtered and not learn_entropy:
                logprobs, entropy, *further = head(
                    states,
                    ids,
                    temperature=temperature,
                    with_entropy=with_entropy,
                    rule=rule,
                    **({} if divergence is None else {"divergence": divergence}),
                )
                return PolicyOutput(logprobs, entropy, None, router_logits, *further)
            logits = rule(head(states))
        of_teachers = None
        if divergence is not None:
            logprobs, entropy, of_teachers = token_outputs(logits, ids, divergence, slice(None), temperature=temperature)
        elif with_entropy and not learn_entropy:
            logprobs, entropy = token_logprobs_and_entropy(logits, ids, temperature=temperature)
        else:
            logprobs = token_logprobs(logits, ids, temperature=temperature)
        return PolicyOutput(
            logprobs,
            token_entropy(logits, temperature=temperature) if learn_entropy else entropy,
            sampler_logprobs(logits, ids, temperature=temperature, top_k=top_k, top_p=top_p) if filtered else None,
            router_logits,
            of_teachers,
        )


class ScalarModule(nn.Module):
    """Computes scores or values at selected positions: a reward model or a critic.

    Args:
        label: for a model that gives several scores, the name or number of the one that counts.
    Raises:
        ValueError: the model gives no score, or several and none is chosen.

    split: as for `PolicyModule`.
    """

    split: SequenceSplit | None = None

    def __init__(self, model: PreTrainedModel, *, label: str | int | None = None):
        super().__init__()
        self.model = model
        self.score_head = probe_score_head(model)
        self._label = label_index(model.config, self.score_head.num_labels, label)

    @property
    def backend(self) -> Backend:
        """The backend that computes the hidden states (see `PolicyModule.backend`)."""
        return backend_of(self.model) if self.score_head.per_token and self.split is None else GENERAL

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        """Return the score [N] at each selected position, which has seen that token and all before it.

        A model without scores of tokens (`score_head.per_token`) takes rows of one whole sequence each, whose last token is selected.
        """
        if not self.score_head.per_token:
            if batch.pictures:
                raise ValueError(
                    "reward model: expected a linear score layer with pictures, got another one; take a model with a linear one"
                )
            sequences = self._whole_sequences(batch)
            return sequence_scores(self.model, sequences, batchable=self.score_head.batchable)[:, self._label].float()
        places = batch.selected.nonzero(as_tuple=True)
        if self.split is not None:
            part = own_columns(self.model, batch, *places, self.split)
            states = part.run(trunk(self.model)).last_hidden_state[part.rows, part.positions]
            return self.split.joined(scalar_head(self.model)(states)[:, self._label].float(), part.own)
        hidden, _ = self.backend.hidden_states(self.model, batch, *places)
        if batch.pictures is not None and torch.is_grad_enabled():
            hidden = with_gradients_of_vision(self.model, hidden)
        return scalar_head(self.model)(hidden)[:, self._label].float()

    def check_scores_tokens(self, subject: str, remedy: str) -> None:
        """Check that every token has a score.

        Raises:
            ValueError: the model scores whole sequences only.
        """
        if not self.score_head.per_token:
            raise ValueError(
                f"{subject}: expected a model whose score is a linear layer's output at a token, got {type(self.model).__name__}, "
                f"which scores whole sequences only; {remedy}"
            )

    def _whole_sequences(self, batch: TokenBatch) -> list[list[int]]:
        """Return the sequences of the rows, without padding."""
        if batch.visible is not None or batch.segments is not None or not bool((batch.selected.sum(1) == 1).all()):
            raise ValueError(
                f"reward model: expected whole sequences for {type(self.model).__name__}, which has no scores of tokens, got parts; "
                "score each sequence in a row of its own"
            )
        ends = (batch.selected.int().argmax(1) + 1).tolist()
        return [ids[:end] for ids, end in zip(batch.input_ids.tolist(), ends, strict=True)]
