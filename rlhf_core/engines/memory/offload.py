"""Moves tensors between a device and the host in place, for processes that take turns on a GPU.

Storages are moved, so every view of one stays valid, such as ZeRO's flat buffers and the parameters in them. DeepSpeed's own
`offload_states` moves nothing without ZeRO, and with ZeRO 3 only the states of its own Adam.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn

Storages = dict[int, torch.UntypedStorage]
Away = tuple[torch.UntypedStorage, int, list[torch.Tensor] | None]  # a storage, its bytes on the device, and their copy
Stays = Literal["all", "weights", "nothing"]  # on the device
CONTAINERS = (list, tuple, set, frozenset, deque)
PIECE = 1 << 24  # bytes of a copy on the host: torch pins whole powers of two, for a large storage up to twice its bytes


class Offloaded:
    """Storages whose bytes are on the host or discarded. On a GPU their pinned host memory is kept for the next time."""

    def __init__(self) -> None:
        self._away: list[Away] = []
        self._pinned: dict[int, list[torch.Tensor]] = {}

    def offload(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Copy storages to the host and free their memory on the device. Nothing may use them until `reload`."""
        copied = [(storage, storage.nbytes(), self._copy(storage)) for storage in storages]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away += copied
        _empty(copied)

    def discard(self, storages: Iterable[torch.UntypedStorage]) -> None:
        """Free storages' memory without a copy. `reload` allocates it again, with undefined content."""
        freed = [(storage, storage.nbytes(), None) for storage in storages]
        self._away += freed
        _empty(freed)

    def reload(self) -> None:
        """Bring the storages back to the device."""
        for storage, size, host in self._away:
            storage.resize_(size)
            if host is not None:
                for part, piece in zip(_bytes_of(storage).split(PIECE), host, strict=True):
                    part.copy_(piece, non_blocking=True)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._away = []

    def _copy(self, storage: torch.UntypedStorage) -> list[torch.Tensor]:
        parts, pin = _bytes_of(storage).split(PIECE), torch.cuda.is_available()
        host = self._pinned.get(key_of(storage), [])
        if [piece.numel() for piece in host] != [part.numel() for part in parts]:
            host = [torch.empty(part.numel(), dtype=torch.uint8, pin_memory=pin) for part in parts]
        if pin:
            self._pinned[key_of(storage)] = host
        return [piece.copy_(part, non_blocking=True) for piece, part in zip(host, parts, strict=True)]


def _empty(items: Iterable[Away]) -> None:
    for storage, _, _ in items:
        storage.resize_(0)
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()  # for the other processes


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def key_of(storage: torch.UntypedStorage) -> int:
    """Return a key that is the same for every tensor that shares the storage."""
    return storage._cdata


def storages_of(tensors: Iterable[torch.Tensor], *, device: torch.device) -> Storages:
    """Return the tensors' storages that have memory of their own on a device, by `key_of`; weights mapped from a file have none."""
    found = {}
    for tensor in tensors:
        if tensor.device.type == device.type and tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            if storage.nbytes() and storage.resizable():
                found[key_of(storage)] = storage
    return found


def weights_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield parameters and buffers, and this rank's parts of parameters that ZeRO 3 has sharded."""
    for tensor in (*module.parameters(), *module.buffers()):
        yield tensor.data
        if (part := getattr(tensor, "ds_tensor", None)) is not None:
            yield part


def tensors_in(root: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors that an optimizer holds: in attributes, in containers in them, and in objects of DeepSpeed and of optimizers."""
    seen, left = set(), [root]
    while left:
        item = left.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            yield item.data
            left += [item.grad if item.is_leaf else None, getattr(item, "grad_accum", None)]
        elif isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, CONTAINERS):
            left += item
        elif isinstance(item, torch.optim.Optimizer) or type(item).__module__.partition(".")[0] == "deepspeed":
            left += vars(item).values() if hasattr(item, "__dict__") else ()


class OnDevice:
    """Tracks which of a model's weights and optimizer states are on the device; all are at first.

    Args:
        weights, states: functions that return the tensors; a tensor in both counts as a weight.
    """

    def __init__(self, device: torch.device, weights: Callable[[], Iterable[torch.Tensor]], states: Callable[[], Iterable[torch.Tensor]]):
        self._device, self._find_weights, self._find_states = device, weights, states
        self._weights, self._states = Offloaded(), Offloaded()
        self.stays: Stays = "all"

    def keep(self, stays: Stays) -> None:
        """Move to the host what doesn't stay on the device, and back to the device what does."""
        if stays == "all" and self.stays != "all":
            self._states.reload()
        if stays != "nothing" and self.stays == "nothing":
            self._weights.reload()
        weights = storages_of(self._find_weights(), device=self._device)
        if stays != "all" and self.stays == "all":
            states = storages_of(self._find_states(), device=self._device)
            self._states.offload(storage for key, storage in states.items() if key not in weights)
        if stays == "nothing" and self.stays != "nothing":
            self._weights.offload(weights.values())
        self.stays = stays

    def need(self, stays: Stays, what: str) -> None:
        """Check that what the call `what` needs is on the device.

        Raises:
            RuntimeError: it isn't there.
        """
        if self.stays == "nothing" or (self.stays == "weights" and stays == "all"):
            raise RuntimeError(f"{what}: expected {stays} on the device, got {self.stays}; reload it first, since memory was freed")
