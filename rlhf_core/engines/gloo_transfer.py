"""Weights over gloo: one layer is one message, in the host's memory. Of the trainer's side and of any engine's; without vLLM."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.engines.rendezvous import join_store
from rlhf_core.engines.weight_source import Tensors, TensorSpec

OTHERS = 10  # a worker waits so many times longer for the sender than the sender for a worker


@dataclass(frozen=True)
class Meeting:
    """Where the sender and an engine's workers meet.

    host, port: of the sender's store.    name: of the group in it.    size: sender and workers.
    timeout: seconds that a worker waits for the sender, which may wait for other engines.
    """

    host: str
    port: int
    name: str
    size: int
    timeout: float

    def join(self, store: dist.Store, rank: int, *, timeout: float) -> dist.ProcessGroup:
        """The group, once all of its processes have joined. Rank 0 is the sender.

        Args:
            timeout: seconds for joining, and for each layer.
        Raises:
            RuntimeError: one of them didn't join in time.
        """
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        # By the host's name gloo might choose an address that other nodes can't reach, such as 127.0.1.1.
        where = {"interface": interface} if interface else {"hostname": _own_address(self.host, self.port)}
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(dist.PrefixStore(self.name, store), rank, self.size, options)


def _own_address(host: str, port: int) -> str:
    """The address from which this process reaches another one. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unused:
        unused.connect(address)
        return unused.getsockname()[0]


def pack_layer(layer: Tensors) -> torch.Tensor:
    """The bytes [N] of a layer's tensors, one after another, in the host's memory."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in layer.values()]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    for part, tensor in zip(flat.split(sizes), layer.values(), strict=True):
        part.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat


def unpack_layer(flat: torch.Tensor, specs: list[TensorSpec]) -> Tensors:
    """The tensors, which share the buffer's memory."""
    parts = flat.split([spec.nbytes for spec in specs])
    return {s.name: part.view(getattr(torch, s.dtype)).reshape(s.shape) for s, part in zip(specs, parts, strict=True)}


class GlooReceiver:
    """An engine's worker, at the other end of a `GlooLink`.

    Args:
        info: of `GlooLink.info`.
        worker: number among the engine's workers.
    Raises:
        RuntimeError: the sender didn't answer in time.
    """

    def __init__(self, info: dict[str, Any], *, worker: int):
        meeting = Meeting(**info["meeting"])
        self.specs = [[TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in layer] for layer in info["layers"]]
        self._store = join_store(meeting.host, meeting.port, None, timeout=meeting.timeout)
        self._group = meeting.join(self._store, 1 + worker, timeout=meeting.timeout)

    def receive(self, number: int) -> Tensors:
        """The weights of a layer. Layers arrive in their order.

        Raises:
            RuntimeError: the sender has died, or is late.
        """
        specs = self.specs[number]
        flat = torch.empty(sum(spec.nbytes for spec in specs), dtype=torch.uint8)
        self._group.broadcast(flat, 0).wait()
        return unpack_layer(flat, specs)


class GlooLink:
    """The sender's connection to an engine. It opens as the engine's workers join.

    Args:
        name: of the connection; no other one may have had it.
        workers: of the engine.
        timeout: seconds for the connection, and for each layer.
    """

    receives = True  # by one call, while layers are sent
    pack = staticmethod(pack_layer)

    def __init__(self, store: dist.TCPStore, name: str, specs: list[list[TensorSpec]], *, workers: int, timeout: float):
        self._meeting = Meeting(store.host, store.port, name, 1 + workers, OTHERS * timeout)
        self._timeout = timeout
        layers = [[(spec.name, spec.dtype, spec.shape) for spec in layer] for layer in specs]
        self.info: dict[str, Any] = {"meeting": vars(self._meeting), "layers": layers}
        self.updates: list[dict[str, Any]] = [{"layer": number} for number in range(len(specs))]
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """
        Raises:
            RuntimeError: a worker didn't join in time.
        """
        # Its own connection to the store: one that waits for a dead worker would block the others on it.
        store = join_store(self._meeting.host, self._meeting.port, None, timeout=self._timeout)
        self._group = self._meeting.join(store, 0, timeout=self._timeout)

    def send(self, flat: torch.Tensor) -> GlooSending:
        """Start to send a layer's bytes."""
        return GlooSending(flat, self._group.broadcast(flat, 0))

    def close(self) -> None:
        """Drop the group; the engine's end of it fails."""
        group, self._group = [self._group], None
        # Its destructor waits for what it is sending, which to an engine that has vanished takes the timeout.
        Thread(target=group.clear, daemon=True).start()


@dataclass(frozen=True)
class GlooSending:
    """flat: kept until it is sent."""

    flat: torch.Tensor
    work: dist.Work

    def wait(self, seconds: float) -> bool:
        """Whether it was sent within some seconds.

        Raises:
            RuntimeError: a worker has died, or is late.
        """
        try:
            self.work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if self.work.is_completed():
                raise
            return False
        return True
