"""Sends weights from GPU to GPU by vLLM's transfer engines nccl and ipc. The sender imports parts of vLLM that 0.26 and 0.32 have."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.engines.ports import free_ports
from rlhf_core.engines.transfer.source import Tensors, TensorSpec, specs_of

POLL_SECONDS = 1e-4


def described(specs: list[TensorSpec]) -> dict[str, Any]:
    """Return a layer as vLLM's update infos describe it."""
    return {"names": [s.name for s in specs], "dtype_names": [s.dtype for s in specs], "shapes": [list(s.shape) for s in specs]}


class NcclLink:
    """The sender's connection to an engine on other GPUs: a communicator of the sender and the engine's workers.

    Args:
        host: the sender's address.
        workers: number of the engine's workers.
    """

    receives = True

    def __init__(self, host: str, specs: list[list[TensorSpec]], *, workers: int):
        self.info = {"master_address": host, "master_port": free_ports(1)[0], "rank_offset": 1, "world_size": 1 + workers}
        self.updates = [described(layer) for layer in specs]
        self._device = torch.cuda.current_device()
        self._stream = torch.cuda.Stream()  # a lost engine blocks this stream only, until `close`
        self._communicator: Any = None

    def open(self) -> None:
        """Join the communicator, which the engine's workers join too.

        Raises:
            RuntimeError: a worker didn't join.
        """
        from vllm.distributed.weight_transfer.nccl_common import trainer_init

        torch.cuda.set_device(self._device)  # of this thread
        self._communicator = trainer_init({name: self.info[name] for name in ("master_address", "master_port", "world_size")})

    @staticmethod
    def pack(number: int, layer: Tensors) -> list[torch.Tensor]:
        """Copy a layer's tensors on the GPU, since the layer itself may be gone before they are sent."""
        return [tensor.detach().to("cuda", copy=True).contiguous() for tensor in layer.values()]

    def send(self, tensors: list[torch.Tensor]) -> NcclSending:
        self._stream.wait_stream(torch.cuda.current_stream())
        for tensor in tensors:
            self._communicator.broadcast(tensor, src=0, stream=self._stream)
        return NcclSending(tensors, self._stream.record_event())

    def close(self) -> None:
        """Abort the communicator, with anything that it is sending."""
        if self._communicator is not None:
            self._communicator.destroy()


@dataclass(frozen=True)
class NcclSending:
    """A layer that is being sent; `tensors` are kept alive until they are sent."""

    tensors: list[torch.Tensor]
    event: torch.cuda.Event
    is_resent = False

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    def wait(self, seconds: float) -> bool:
        """Return whether the layer was sent within this number of seconds."""
        deadline = time.monotonic() + seconds
        while not self.event.query():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL_SECONDS)
        return True


class IpcBuffer:
    """A buffer on each rank's GPU that the engines on that GPU read. Every rank calls the same methods.

    Args:
        specs: specs of the layers, of which the buffer can hold the largest.
    """

    def __init__(self, specs: list[list[TensorSpec]]):
        self._bytes = torch.empty(max(sum(s.nbytes for s in layer) for layer in specs), dtype=torch.uint8, device="cuda")
        self._handles: dict[str, tuple] = {}

    def export(self) -> None:
        """Let the engines read the buffer, for one transfer."""
        from torch.multiprocessing.reductions import reduce_tensor

        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, {gpu: reduce_tensor(self._bytes)[1]})
        self._handles = {gpu: handle for of_rank in found for gpu, handle in of_rank.items()}

    def fill(self, layer: Tensors, *, before: Callable[[], None] | None) -> dict[str, Any]:
        """Write a layer into every rank's buffer once the engines have read the previous one. Return vLLM's update info.

        Args:
            before: function that waits for the engines, on the sending rank; None on other ranks.
        """
        if before is not None:
            before()
        dist.barrier()
        specs, start = specs_of(layer), 0
        for tensor in layer.values():
            flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            self._bytes[start : start + flat.numel()].copy_(flat)
            start += flat.numel()
        torch.cuda.synchronize()
        dist.barrier()
        return {**described(specs), "ipc_handles": self._handles, "tensor_sizes": [s.nbytes for s in specs]}


class IpcLink:
    """The sender's connection to an engine on the trainer ranks' GPUs: calls, since the engine reads the ranks' buffers itself."""

    receives = False

    def __init__(self, peer: Any, *, timeout: float):
        from vllm.distributed.weight_transfer import ipc_engine

        self._peer, self._timeout = peer, timeout
        # vLLM 0.32 is told once that layers are packed, 0.26 with each layer.
        self.info = _packed(ipc_engine.IPCWeightTransferInitInfo)
        self._packed = _packed(ipc_engine.IPCWeightTransferUpdateInfo)

    def open(self) -> None:
        """Do nothing: no connection is needed."""

    def send(self, update: dict[str, Any]) -> IpcSending:
        return IpcSending(self._peer, self._peer.submit("update_weights", update | self._packed), sum(update["tensor_sizes"]))

    def close(self) -> None:
        """Do nothing: the link holds no connection."""


def _packed(info: type) -> dict[str, bool]:
    return {"packed": True} if "packed" in {field.name for field in fields(info)} else {}


@dataclass(frozen=True)
class IpcSending:
    """A call by which the engine reads the buffers."""

    peer: Any
    call: Future
    nbytes: int
    is_resent = False

    def wait(self, seconds: float) -> bool:
        """Return whether the engine has read the buffers within this number of seconds.

        Raises:
            RuntimeError: the engine has died.
        """
        wait_for([self.call], seconds)
        if not self.call.done():
            return False
        self.peer.answer(self.call, seconds)
        return True
