"""Transfers of weights without a trainer: a model's own weights, sent to engines."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rank_processes import CLEAN
from torch import nn

from rlhf_core.engines.ray.actors import PeerLost
from rlhf_core.engines.ray.rendezvous import open_store
from rlhf_core.engines.transfer.adapter_source import AdapterSource
from rlhf_core.engines.transfer.changes import ROW
from rlhf_core.engines.transfer.gloo import HEADER_BYTES, GlooReceiver, completed, pack_layer, unpack_layer
from rlhf_core.engines.transfer.sender import Answer, Target, Traffic, WeightSender
from rlhf_core.engines.transfer.source import PolicySource, WeightSource
from rlhf_core.models.weights import FolderWeights


def source_of(model: nn.Module, names: Callable[[dict], dict] = lambda weights: weights) -> PolicySource:
    return PolicySource(nn.ModuleDict({"model": model}), names)


def new_sender(timeout: float = 20.0, *, send_changes: bool = False) -> WeightSender:
    return WeightSender(partial(open_store, None, timeout=30), timeout=timeout, send_changes=send_changes)


def send(
    sender: WeightSender, targets: Sequence[Target], source: WeightSource, *, version: int, ids: Sequence[int], shared: Any = None
) -> tuple[dict[int, Answer], dict[int, str]]:
    """As `TrainerRank.send_weights`. Returns the answers, and the engines that are lost.

    Args:
        shared: an IpcBuffer for engines by ipc.
    """
    return counted(sender, targets, source, version=version, ids=ids, shared=shared)[:2]


@torch.no_grad()
def counted(
    sender: WeightSender, targets: Sequence[Target], source: WeightSource, *, version: int, ids: Sequence[int], shared: Any = None
) -> tuple[dict[int, Answer], dict[int, str], Traffic]:
    """As `send`, with what was sent."""
    transfer = sender.begin(targets, source, version=version, ids=ids)
    if shared is not None:
        shared.export()
    for layer in source.layers():
        transfer.send(layer, None if shared is None else shared.fill(layer, before=transfer.flush))
    transfer.flush()
    answers, lost = transfer.answers()
    sender.forget(lost)
    return answers, lost, transfer.traffic


def adapters_of(model: nn.Module, folder: str | Path, names: Callable[[dict], dict] = lambda weights: weights) -> AdapterSource:
    return AdapterSource(nn.ModuleDict({"model": model}), names, folder)


def at_an_engine(source: WeightSource, folder: str | Path) -> dict[str, torch.Tensor]:
    """All weights that an engine has after a transfer. Every rank calls it."""
    found, weights = {}, FolderWeights(folder)
    for layer, specs, made in zip(source.layers(), source.specs, source.made, strict=True):
        found |= completed(unpack_layer(pack_layer(layer), specs), made, weights)
    return {name: tensor.clone() for name, tensor in found.items()}


def whole_weights(source: PolicySource) -> dict[str, torch.Tensor]:
    """All weights as they are sent, adapters merged. Every rank calls it."""
    return {name: tensor.clone() for layer in source.layers() for name, tensor in layer.items()}


def sent_bytes(source: WeightSource) -> int:
    return sum(spec.nbytes for layer in source.specs for spec in layer)


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


def sum_of(layer: dict[str, torch.Tensor]) -> float:
    return float(sum(layer[name].double().sum() for name in sorted(layer)))


class ReceiverPeer:
    """A process that receives weights, and sends a signal to itself before it takes the layer `number`.

    Its answer is the version and the sum of each layer.

    Args:
        worker: its number among the engine's processes.
        after: the signal is sent in the transfer of this version.
        folder: of the model that it starts from; "": it gets whole weights.
        damage: a layer, and what is damaged of it in the transfer of version 2: a value or a place of its changes, or its base.
    """

    def __init__(
        self,
        number: int | None = None,
        signal_number: int = signal.SIGKILL,
        *,
        worker: int = 0,
        after: int = 1,
        folder: str | Path = "",
        damage: tuple[int, str] | None = None,
    ):
        self._pipe, theirs = CLEAN.Pipe()
        how = {"worker": worker, "number": number, "signal_number": signal_number, "after": after, "folder": folder, "damage": damage}
        self.process = CLEAN.Process(target=_receive, args=(theirs,), kwargs=how, daemon=True)
        self.process.start()
        theirs.close()
        self._pipe.recv()  # it has started
        self.key = str(self.process.pid)
        self._thread = ThreadPoolExecutor(1)

    def submit(self, method: str, *args: Any) -> Future:
        return self._thread.submit(self._call, method, args)

    def _call(self, method: str, args: tuple) -> Any:
        self._pipe.send((method, args))
        return self._pipe.recv()

    def answer(self, call: Future, timeout: float) -> Any:
        try:
            return call.result(timeout)
        except (EOFError, OSError) as error:
            if isinstance(error, TimeoutError):
                raise PeerLost(late=True) from error
            raise PeerLost(late=False) from error

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _receive(
    pipe: Any,
    *,
    worker: int,
    number: int | None,
    signal_number: int,
    after: int,
    folder: str | Path,
    damage: tuple[int, str] | None,
) -> None:
    receiver = None
    pipe.send(None)
    while True:
        method, args = pipe.recv()
        if method == "connect_weights":
            receiver = GlooReceiver(args[0], worker=worker, folder=folder)
            pipe.send(None)
            continue
        updates, version, _ = args
        sums = []
        for update in updates:
            if update["layer"] == number and version == after:
                os.kill(os.getpid(), signal_number)
            if damage is not None and damage[0] == update["layer"] and version == 2:
                _damage(receiver, *damage)
            sums.append(sum_of(receiver.receive(update["layer"])))
        pipe.send((version, sums))


def _damage(receiver: GlooReceiver, layer: int, what: str) -> None:
    """Flip a bit of the layer's kept bytes, or of the changes that come next: of the last value, or of the last place."""
    if what == "base":
        receiver._kept[layer][7] ^= 1
        return
    get = receiver._get

    def damaged(size: int) -> torch.Tensor:
        flat = get(size)
        if size > HEADER_BYTES:
            receiver._get = get
            rows = -(-len(receiver._kept[layer]) // 2 // ROW)
            changed = (size - 2 * rows) // 3
            flat[-1 if what == "place" else 2 * rows + 2 * changed - 1] ^= 1
        return flat

    receiver._get = damaged
