"""Models that aren't trained, on each rank: references and reward models."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from rlhf_core.engines.deepspeed.engine import device, gathered_weights, on_host, precision, shard
from rlhf_core.engines.deepspeed.freeing import free
from rlhf_core.engines.deepspeed.sequence_parallel import split_sequences
from rlhf_core.engines.memory.offload import OnDevice, Stays, weights_of
from rlhf_core.models.weights import frozen


class FrozenModel:
    """A model without gradients: whole on the device, sharded over the ranks with ZeRO 3, or on the host between uses.

    With ZeRO 3 a forward pass is a collective: every rank makes as many.

    Args:
        dtype: float32 or bfloat16.
        zero_stage: ZeRO stage of the trained models. Stages 1 and 2 shard nothing that is frozen.
        offload: whether weights are on the host while the model isn't used; with ZeRO 3 a rank's share always is.
    """

    def __init__(self, module: nn.Module, *, dtype: str, zero_stage: int, offload: bool):
        self.sharded = zero_stage == 3
        self._on_host: list[torch.Tensor] = []
        if self.sharded:
            _shard_for_inference(module, dtype, offload=offload)
        else:
            frozen(module, device=torch.device("cpu") if offload else device(), dtype=getattr(torch, dtype))
            self._on_host = [*module.parameters(), *module.buffers()] if offload else []
        if torch.cuda.is_available():
            for tensor in self._on_host:
                tensor.data = tensor.data.pin_memory()
        self.module = module
        self._on_device = OnDevice(device(), lambda: weights_of(module), tuple)
        with self.in_use():
            split_sequences(module)

    def keep(self, stays: Stays) -> None:
        """Keep the weights on the device, or with `nothing` on the host until the next `keep`, which frees the GPU for another process."""
        self._on_device.keep(stays)

    @contextmanager
    def in_use(self) -> Iterator[nn.Module]:
        """Yield the module with its weights on the device that computes."""
        self._on_device.need("weights", "forward")
        host = [tensor.data for tensor in self._on_host]
        for tensor in self._on_host:
            tensor.data = tensor.data.to(device(), non_blocking=True)
        try:
            yield self.module
        finally:
            for tensor, data in zip(self._on_host, host, strict=True):
                tensor.data = data

    @torch.no_grad()
    def whole(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight of the module; of a sharded one a copy of all ranks' shares, for which every rank calls this."""
        if not self.sharded:
            return weight
        import deepspeed

        with deepspeed.zero.GatheredParameters([weight]):
            return weight.detach().clone()

    def close(self) -> None:
        """Free the memory of a sharded model that isn't used any more; the memory of a whole one is freed with the object."""
        if self.sharded:
            free(vars(self.module)["sharded_by"])

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy weights, named as in the wrapped Hugging Face model. Every rank calls it with the same weights."""
        import deepspeed

        model = self.module.model
        own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        for name, value in weights:
            with deepspeed.zero.GatheredParameters([own[name]], modifier_rank=0):
                own[name].data.copy_(value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the full weights on the CPU of rank 0; empty on other ranks. Every rank calls it."""
        keep = dist.get_rank() == 0
        return {name: value.to("cpu", copy=True) for name, value in gathered_weights(self.module) if keep}


def _shard_for_inference(module: nn.Module, dtype: str, *, offload: bool) -> None:
    """Shard a module, with hooks that gather each layer's weights while it computes."""
    import deepspeed

    module.eval().requires_grad_(False)
    zero = {"stage": 3} | ({"offload_param": on_host()} if offload else {})
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "steps_per_print": None, **precision(dtype)}
    shard(module, config, getattr(torch, dtype))
    engine = deepspeed.initialize(model=module, config=config)[0]
    vars(module)["sharded_by"] = engine  # as long as the module lives: the engine's destructor removes the hooks
