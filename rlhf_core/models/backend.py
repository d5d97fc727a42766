"""Computes hidden states and runs independent parts of work, on the general path for any architecture and device.

`rlhf_core.models.forward.backend_of` chooses a backend for a model. `rlhf_core.models.cpu` has a faster one for small Llamas on CPU cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from transformers import PreTrainedModel

from rlhf_core.data.batching import even_microbatches
from rlhf_core.models.attention import attention_arguments, check_length, longest_alike
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import trunk
from rlhf_core.models.decoding import Decoder, HuggingFaceDecoder
from rlhf_core.models.packing import pack, packs
from rlhf_core.models.vision import picture_arguments

Part, Result = TypeVar("Part"), TypeVar("Result")


class Backend:
    """The model's own forward; parts of work run one after the other.

    workers: parts that `map` runs at the same time.
    keeps_graphs: whether the graph of a forward pass is small enough, and free of state, for a later update to backpropagate through it.
    """

    workers: int = 1
    keeps_graphs: bool = False

    def hidden_states(
        self, model: PreTrainedModel, batch: TokenBatch, rows: torch.Tensor, positions: torch.Tensor, *, routed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the trunk's output [N, H] at the given rows and positions [N], and the router logits of the routed tokens, if any.

        Args:
            routed: [B, T] bool, tokens whose router logits are returned; only for a model with experts.
        """
        if len(rows) and self.packs(model, batch):
            packed = pack(batch, rows, positions, routed=routed)
            rows, positions = torch.zeros_like(rows), packed.index[rows, positions]
            batch, routed = packed.batch, None if routed is None else packed.of(routed)
        outputs, router_logits = run_model(trunk(model), batch, routed)
        return outputs.last_hidden_state[rows, positions], router_logits

    def packs(self, model: PreTrainedModel, batch: TokenBatch) -> bool:
        """Return whether padding is left out of the computation."""
        return packs(model, batch)

    def microbatches(self, sequences: Sequence[list[int]], *, max_tokens: int) -> list[list[int]]:
        """Return positions in `sequences`, grouped for forward passes without gradients of at most `max_tokens` tokens."""
        return even_microbatches([len(ids) for ids in sequences], max_tokens=max_tokens, multiple=self.workers)

    def map(self, function: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
        """Return the results of `function` for each part, in order. The parts must be independent: a backend may run several at the same
        time.
        """
        return [function(part) for part in parts]

    def decoder(self, model: PreTrainedModel, *, probed: bool = False) -> Decoder:
        """Return a decoder of the model, which computes one token at a time, for sampling.

        Args:
            probed: a decoder has been made before, for the same model with other weights.
        """
        return HuggingFaceDecoder(model, probed=probed)


def run_model(module: PreTrainedModel, batch: TokenBatch, routed: torch.Tensor | None) -> tuple[Any, torch.Tensor | None]:
    """Return the output of a whole forward pass of a model or its trunk, and the router logits [layers * M, E] of the M routed tokens.

    Raises:
        ValueError: sequences are longer than the model's rotary frequencies allow.
    """
    if longest_alike(module.config) is not None:
        check_length(module.config, batch.length)
    routing = {} if routed is None else {"output_router_logits": True}
    arguments = attention_arguments(module, batch) | picture_arguments(module, batch)
    outputs = module(input_ids=batch.input_ids, use_cache=False, **arguments, **routing)
    return outputs, None if routed is None else torch.cat([layer[routed.flatten()] for layer in outputs.router_logits])
