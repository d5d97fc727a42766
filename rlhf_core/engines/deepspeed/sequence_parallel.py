"""Sequence parallelism: the ranks of a group hold parts of each sequence's positions.

DeepSpeed's Ulysses exchanges attention's inputs over the group, from all heads of a rank's own positions to a part of the heads at all
positions, and its output back:

    query, key, value    [B, heads, T / s, D] -> [B, heads / s, T, D]
    output               [B, T, heads / s, D] -> [B, T / s, heads, D]

A rank computes everything else for its own positions. The group takes the same micro-batches on each rank (ranks.py), and every rank gets
the log-probabilities or scores of all of them, but backpropagates into its own positions only. Gradients of a group's ranks therefore add
up to those of one rank, as the data-parallel ranks' do.

Source: Jacobs et al. 2023, https://arxiv.org/abs/2309.14509, and Bekman et al. 2025, https://arxiv.org/abs/2506.13996
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import Function
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from rlhf_core.config.base import number_of, shown
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import scalar_head
from rlhf_core.models.forward import PolicyModule, ScalarModule
from rlhf_core.models.probe import HALF_TOLERANCE, PROBE_ERRORS, TOLERANCE, agree, probing

EXCHANGE = "sequence_exchange"  # attribute of a layer's modules
PROBE_ROWS, PROBE_COLUMNS = 2, 3  # columns on each rank but the last, which has one of padding

_shared_by = 1  # ranks of a group


def share_sequences(size: int) -> None:
    """Let groups of `size` consecutive ranks share each sequence, in every engine made after this call. Every rank calls it.

    Raises:
        ValueError: the number of ranks isn't a multiple of `size`.
    """
    global _shared_by
    ranks = dist.get_world_size()
    if ranks % size:
        raise ValueError(f"sequence_parallel: expected a divisor of the {number_of(ranks, 'rank')}, got {size}; change one of them")
    _shared_by = size
    if size > 1:
        _group(size)


def shared_by() -> int:
    """Return the number of ranks that share each sequence."""
    return _shared_by


@functools.cache
def _group(size: int) -> dist.ProcessGroup:
    """Return this rank's group. Every rank makes all groups, in the same order."""
    starts = range(0, dist.get_world_size(), size)
    groups = [dist.new_group(list(range(start, start + size))) for start in starts]
    return groups[dist.get_rank() // size]


class SequenceGroup:
    """This rank's group, which is a `rlhf_core.models.split.SequenceSplit`."""

    def __init__(self, size: int):
        self.size, self.index = size, dist.get_rank() % size
        self.group = _group(size)

    def joined(self, values: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Return the values of all ranks, as `SequenceSplit.joined` says."""
        return _Joined.apply(values, own, self.group)


class _Joined(Function):
    """Joins the values of all ranks. Each rank computes the same loss from them, so its own values' gradient is that of the loss, without a
    sum over ranks.
    """

    @staticmethod
    def forward(ctx, values, own, group):
        ctx.save_for_backward(own)
        everything = values.new_zeros(len(own))
        everything[own] = values
        dist.all_reduce(everything, group=group)  # adds zeros, so it is exact
        return everything

    @staticmethod
    def backward(ctx, gradient):
        (own,) = ctx.saved_tensors
        return gradient[own], None, None


class Exchange:
    """Computes a model's attention over whole sequences, of which each rank has a part."""

    def __init__(self, layers: int, split: SequenceGroup):
        self._layers, self._split = layers, split
        self._of_shapes: dict[tuple[int, int, int, int], Any] = {}

    def __call__(
        self,
        core: Callable[..., Any],
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Return the output of `core` for this rank's positions, [B, T / s, heads, D], and its attention weights if it returns them.

        Args:
            query, key, value: [B, heads, T / s, D]; heads of values may be narrower.
            attention_mask: [B, 1, T, T]; a mask of another width is the model's own, for this rank's positions, and is ignored.
        """
        rows, heads, columns, width = query.shape
        if attention_mask is not None and attention_mask.shape[-1] != columns * self._split.size:
            attention_mask = None
        if "position_ids" not in kwargs:  # DeepSpeed wants them of every model
            first = self._split.index * columns
            kwargs["position_ids"] = torch.arange(first, first + columns, device=query.device).repeat(rows, 1)
        narrower = width - value.shape[3]  # as in multi-head latent attention
        value = functional.pad(value, (0, narrower))
        output, weights = self._ulysses(core, query, key)(module, query, key, value, attention_mask, *args, **kwargs)
        return output.view(rows, columns, heads, width)[..., : width - narrower], weights

    def _ulysses(self, core: Callable[..., Any], query: torch.Tensor, key: torch.Tensor) -> Any:
        """Return DeepSpeed's module for these numbers of rows and heads; it takes any number of positions."""
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        shape = (len(query), query.shape[1], key.shape[1], query.shape[3])
        if shape not in self._of_shapes:
            rows, heads, key_heads, width = shape
            self._of_shapes[shape] = UlyssesSPAttentionHF(
                attn=core,
                batch_size=rows,
                attn_head_count=heads,
                attn_head_size=width,
                kv_head_count=key_heads,
                num_hidden_layers=self._layers,
                process_group=self._split.group,
                seq_length_is_variable=True,
            )
        self._of_shapes[shape].attn = core
        return self._of_shapes[shape]


def split_sequences(module: PolicyModule | ScalarModule) -> None:
    """Make a module compute this rank's part of each sequence if ranks share sequences. Every rank calls it, with the weights on its
    device.

    A few tokens are computed whole and in parts first, because architectures differ in what passes between positions.

    Raises:
        ValueError: the model's heads can't be divided among the ranks, or it doesn't compute the same in parts.
    """
    if _shared_by == 1:
        return
    model = module.model
    check_heads(model.config.get_text_config(), _shared_by)
    if isinstance(module, ScalarModule):
        module.check_scores_tokens("sequence_parallel", "set sequence_parallel to 1")
    batch = _probe_batch(model, _shared_by)
    with torch.no_grad(), probing(model), _states_as_scores(module):
        whole = _output(module, batch)
        _attach(module, SequenceGroup(_shared_by))
        try:
            parts, why = _output(module, batch), "other numbers"
        except PROBE_ERRORS as error:
            parts, why = None, f"{type(error).__name__}: {shown(str(error))}"
    tolerance = TOLERANCE if model.dtype == torch.float32 else HALF_TOLERANCE  # outputs are float32
    if parts is None or not agree(parts, whole, tolerance=tolerance):
        raise ValueError(
            f"sequence_parallel: expected a model that computes parts of a sequence as it does the whole, got {why} from "
            f"{type(model).__name__} with attention {model.config._attn_implementation}; set sequence_parallel to 1"
        )


def check_heads(config: PretrainedConfig, size: int) -> None:
    """Check that ranks can divide a model's attention heads.

    Raises:
        ValueError: the heads can't be divided among `size` ranks.
    """
    heads = config.num_attention_heads
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size:
        raise ValueError(f"sequence_parallel: expected a divisor of the model's {number_of(heads, 'attention head')}, got {size}; lower it")
    if key_heads % size and size % key_heads:
        raise ValueError(
            f"sequence_parallel: expected a divisor or a multiple of the model's {number_of(key_heads, 'head')} of keys and values, got "
            f"{size}; change it"
        )


def _probe_batch(model: PreTrainedModel, size: int) -> TokenBatch:
    width = PROBE_COLUMNS * size - 1
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.get_text_config().vocab_size, (PROBE_ROWS, width), generator=generator).to(model.device)
    return TokenBatch(ids, torch.ones_like(ids, dtype=torch.bool))


def _output(module: PolicyModule | ScalarModule, batch: TokenBatch) -> torch.Tensor:
    output = module(batch)
    return output if isinstance(output, torch.Tensor) else output.logprobs


@contextmanager
def _states_as_scores(module: PolicyModule | ScalarModule) -> Iterator[None]:
    """Make a score a sum over the hidden state within the block: a new head is 0, and would give everything the same score."""
    if isinstance(module, PolicyModule):
        yield
        return

    def summed(_: torch.nn.Module, inputs: tuple[torch.Tensor], scores: torch.Tensor) -> torch.Tensor:
        states = inputs[0].float()
        return (states @ torch.linspace(-1, 1, states.shape[-1], device=states.device))[..., None].expand_as(scores)

    hook = scalar_head(module.model).register_forward_hook(summed)
    try:
        yield
    finally:
        hook.remove()


def _attach(module: PolicyModule | ScalarModule, split: SequenceGroup) -> None:
    """Send the model's attention through an exchange, also in the backward pass, where layers may be computed again."""
    model = module.model
    for name in list(ALL_ATTENTION_FUNCTIONS.valid_keys()):
        _route(name)
    exchange = Exchange(model.config.get_text_config().num_hidden_layers, split)
    for part in model.modules():
        setattr(part, EXCHANGE, exchange)
    module.split = split


def _route(name: str) -> None:
    """Make an implementation of attention use the exchange of its module, if the module has one."""
    core = ALL_ATTENTION_FUNCTIONS[name]
    if hasattr(core, EXCHANGE):
        return

    @functools.wraps(core)
    def attention(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        exchange = vars(module).get(EXCHANGE)
        return core(module, *args, **kwargs) if exchange is None else exchange(core, module, *args, **kwargs)

    setattr(attention, EXCHANGE, True)
    ALL_ATTENTION_FUNCTIONS[name] = attention
