"""Sends weights over gloo, a layer at a time, from the host's memory. It has the trainer's side and the side of any engine, and needs no
vLLM.

For LoRA only the adapters are sent if possible, and engines merge them (`adapter_source`). With `rl.rollout.send_changes` only what has
changed is sent where that is less (`changes`): a header goes first, and the engine's workers vote on whether they have the sender's bits.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist

from rlhf_core.engines.ray.rendezvous import join_store
from rlhf_core.engines.transfer.changes import PackedLayer, SentLayers, apply_changes, digest, padded
from rlhf_core.engines.transfer.source import MadeWeight, Tensors, TensorSpec, WeightSource, adapter_names
from rlhf_core.models.lora import corrected
from rlhf_core.models.weights import FolderWeights

OTHERS = 10  # a worker waits so many times longer for the sender than the sender for a worker
HEADER_BYTES = 16  # the size of the changes that follow, and the digest of the layer with them
WHOLE = -1  # in a header, in place of a size


@dataclass(frozen=True)
class Meeting:
    """Where the sender and an engine's workers meet.

    host, port: address of the sender's store. name: name of the group in the store. size: number of processes, sender included.
    timeout: seconds that a worker waits for the sender, which may be waiting for other engines.
    """

    host: str
    port: int
    name: str
    size: int
    timeout: float

    def join(self, store: dist.Store, rank: int, *, timeout: float) -> dist.ProcessGroup:
        """Return the group once all of its processes have joined. Rank 0 is the sender.

        Args:
            timeout: deadline of joining and of each layer, in seconds.
        Raises:
            RuntimeError: a process didn't join in time.
        """
        interface = os.environ.get("GLOO_SOCKET_IFNAME")
        # By the host's name gloo might choose an address that other nodes can't reach, such as 127.0.1.1.
        where = {"interface": interface} if interface else {"hostname": _own_address(self.host, self.port)}
        options = dist.ProcessGroupGloo._Options()
        options._devices = [dist.ProcessGroupGloo.create_device(**where)]
        options._timeout = timedelta(seconds=timeout)
        return dist.ProcessGroupGloo(dist.PrefixStore(self.name, store), rank, self.size, options)


def _own_address(host: str, port: int) -> str:
    """Return the address from which this process reaches another one. Nothing is sent."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as unused:
        unused.connect(address)
        return unused.getsockname()[0]


def pack_layer(layer: Tensors) -> torch.Tensor:
    """Return the bytes [N] of a layer's tensors, one after another, in the host's memory. A zero makes an odd number of bytes even."""
    sizes = [tensor.numel() * tensor.element_size() for tensor in layer.values()]
    flat = torch.empty(padded(sizes), dtype=torch.uint8)
    flat[sum(sizes) :] = 0
    for part, tensor in zip(flat[: sum(sizes)].split(sizes), layer.values(), strict=True):
        part.view(tensor.dtype).copy_(tensor.detach().reshape(-1))
    return flat


def unpack_layer(flat: torch.Tensor, specs: list[TensorSpec]) -> Tensors:
    """Return a layer's tensors, which share the buffer's memory."""
    sizes = [spec.nbytes for spec in specs]
    parts = flat[: sum(sizes)].split(sizes)
    return {s.name: part.view(getattr(torch, s.dtype)).reshape(s.shape) for s, part in zip(specs, parts, strict=True)}


class GlooReceiver:
    """Receives weights in an engine's worker, at the other end of a `GlooLink`.

    Args:
        info: the content of `GlooLink.info`.
        worker: this worker's number among the engine's workers.
        folder: folder of the engine's initial model.
    Raises:
        RuntimeError: the sender didn't answer in time.

    specs: specs of the weights that the engine gets, by layer.
    """

    def __init__(self, info: dict[str, Any], *, worker: int, folder: str | Path):
        meeting = Meeting(**info["meeting"])
        self._sent = [[TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in layer] for layer in info["layers"]]
        self._made = [
            [MadeWeight(TensorSpec(*spec[:2], tuple(spec[2])), *correction) for spec, *correction in layer] for layer in info["made"]
        ]
        self._folder = FolderWeights(folder) if any(self._made) else None
        self.specs = [_of_engine(sent, made) for sent, made in zip(self._sent, self._made, strict=True)]
        self._store = join_store(meeting.host, meeting.port, None, timeout=meeting.timeout)
        self._group = meeting.join(self._store, 1 + worker, timeout=meeting.timeout)
        self._kept: dict[int, torch.Tensor] | None = {} if info["changes"] else None  # layers as they were last received

    def receive(self, number: int) -> Tensors:
        """Return the weights of a layer: those that are sent, and those made from the folder's. Layers arrive in their order.

        With changes the tensors are valid until the layer is received again.

        Raises:
            RuntimeError: the sender has died, or is late.
        """
        layer: Tensors = {}
        if specs := self._sent[number]:
            size = padded([spec.nbytes for spec in specs])
            flat = self._get(size) if self._kept is None else self._renewed(self._kept, number, size)
            layer = unpack_layer(flat, specs)
        return completed(layer, self._made[number], self._folder) if self._made[number] else layer

    def _get(self, size: int) -> torch.Tensor:
        flat = torch.empty(size, dtype=torch.uint8)
        self._group.broadcast(flat, 0).wait()
        return flat

    def _renewed(self, kept: dict[int, torch.Tensor], number: int, size: int) -> torch.Tensor:
        """Return a layer's bytes: those that are kept with the changes that are sent, or, where these don't lead to the sender's bytes in
        each of the engine's workers, all anew.
        """
        sent, expected = self._get(HEADER_BYTES).view(torch.int64).tolist()
        if sent != WHOLE:
            changes = self._get(sent) if sent else torch.empty(0, dtype=torch.uint8)
            is_equal = apply_changes(kept[number], changes) and digest(kept[number]) == expected
            vote, work = _voted(self._group, agrees=is_equal)
            work.wait()
            if int(vote):
                return kept[number]
        kept[number] = self._get(size)
        return kept[number]


def _of_engine(sent: list[TensorSpec], made: list[MadeWeight]) -> list[TensorSpec]:
    corrections = {name for weight in made if weight.scale is not None for name in adapter_names(weight.spec.name)}
    return [*(spec for spec in sent if spec.name not in corrections), *(weight.spec for weight in made)]


def completed(sent: Tensors, made: list[MadeWeight], folder: FolderWeights) -> Tensors:
    """Return the weights that are sent, and those made from the folder's weights and the sent corrections."""
    layer, base = dict(sent), folder.read(weight.spec.name for weight in made)
    for weight in made:
        name = weight.spec.name
        layer[name] = base[name].to(getattr(torch, weight.spec.dtype))
        if weight.scale is not None:
            a, b = (layer.pop(part) for part in adapter_names(name))
            layer[name] = corrected(layer[name], a, b, scale=weight.scale, transposed=weight.transposed)
    return layer


class GlooLink:
    """The sender's connection to an engine. `open` returns when the engine's workers have joined.

    Args:
        name: name of the connection, which no other connection has had.
        source: source of the weights that will be sent.
        workers: number of the engine's workers.
        timeout: deadline of the connection and of each layer, in seconds.
        latest: layers as they were last sent to any engine, of which only the changes are sent; None: layers are always sent whole.
    """

    receives = True  # by one call, while layers are sent

    def __init__(
        self,
        store: dist.TCPStore,
        name: str,
        source: WeightSource,
        *,
        workers: int,
        timeout: float,
        latest: SentLayers | None = None,
    ):
        self._meeting = Meeting(store.host, store.port, name, 1 + workers, OTHERS * timeout)
        self._timeout, self._latest = timeout, latest
        self._versions: dict[int, int] = {}  # of each layer, as the engine has it
        layers = [[_plain(spec) for spec in layer] for layer in source.specs]
        made = [[(_plain(weight.spec), weight.scale, weight.transposed) for weight in layer] for layer in source.made]
        changes = latest is not None
        self.info: dict[str, Any] = {"meeting": vars(self._meeting), "layers": layers, "made": made, "changes": changes}
        self.updates: list[dict[str, Any]] = [{"layer": number} for number in range(len(layers))]
        self._group: dist.ProcessGroup | None = None

    def open(self) -> None:
        """Wait until the engine's workers have joined.

        Raises:
            RuntimeError: a worker didn't join in time.
        """
        # Its own connection to the store: one that waits for a dead worker would block the others on it.
        store = join_store(self._meeting.host, self._meeting.port, None, timeout=self._timeout)
        self._group = self._meeting.join(store, 0, timeout=self._timeout)

    def pack(self, number: int, layer: Tensors) -> PackedLayer:
        whole = pack_layer(layer)
        return PackedLayer(number, whole) if self._latest is None else self._latest.renew(number, whole)

    def send(self, layer: PackedLayer) -> GlooSending:
        """Start to send a layer: what has changed if that is known and the engine has the bytes before."""
        if self._latest is None:
            return GlooSending(self._group, [layer.whole])
        knows = layer.changes is not None and self._versions.get(layer.number) == layer.before
        self._versions[layer.number] = layer.version  # an engine that doesn't get it loses this connection
        header = torch.tensor([len(layer.changes) if knows else WHOLE, digest(layer.whole) if knows else 0])
        if not knows:
            return GlooSending(self._group, [header.view(torch.uint8), layer.whole])
        parts = [header.view(torch.uint8), layer.changes] if len(layer.changes) else [header.view(torch.uint8)]
        return GlooSending(self._group, parts, otherwise=layer.whole)

    def close(self) -> None:
        """Drop the group, which makes the engine's end fail."""
        group, self._group = [self._group], None
        # Its destructor waits for what it is sending, which to an engine that has vanished takes the timeout.
        Thread(target=group.clear, daemon=True).start()


def _plain(spec: TensorSpec) -> tuple[str, str, tuple[int, ...]]:
    return spec.name, spec.dtype, spec.shape


def _voted(group: dist.ProcessGroup, *, agrees: bool) -> tuple[torch.Tensor, dist.Work]:
    """Return a number that is 1 once the work is done and all of the group's processes have agreed, otherwise 0."""
    vote, options = torch.tensor([int(agrees)]), dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MIN
    return vote, group.allreduce([vote], options)


class GlooSending:
    """A layer that is being sent.

    Args:
        parts: messages [N] uint8, one after another.
        otherwise: what is sent if the engine's workers don't have the sender's bytes after these; None: they aren't asked.

    nbytes: bytes that are sent. is_resent: whether `otherwise` was sent.
    """

    def __init__(self, group: dist.ProcessGroup, parts: Sequence[torch.Tensor], *, otherwise: torch.Tensor | None = None):
        self.nbytes, self.is_resent = 0, False
        self._group, self._otherwise = group, otherwise
        self._sent: list[torch.Tensor] = []  # kept alive until they are sent
        self._works: list[dist.Work] = []
        for part in parts:
            self._send(part)
        self._vote: torch.Tensor | None = None
        if otherwise is not None:
            self._vote, work = _voted(group, agrees=True)
            self._works.append(work)

    def _send(self, part: torch.Tensor) -> None:
        self._sent.append(part)
        self._works.append(self._group.broadcast(part, 0))
        self.nbytes += len(part)

    def wait(self, seconds: float) -> bool:
        """Return whether the layer was sent within this number of seconds.

        Raises:
            RuntimeError: a worker has died, or is late.
        """
        while self._works:
            if not _is_done(self._works[0], seconds):
                return False
            del self._works[0]
            if not self._works and self._vote is not None and not int(self._vote):
                self._vote, self.is_resent = None, True
                self._send(self._otherwise)
        return True


def _is_done(work: dist.Work, seconds: float) -> bool:
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        if work.is_completed():
            raise
        return False
    return True
