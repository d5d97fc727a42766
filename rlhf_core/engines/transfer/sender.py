"""Sends the policy's weights from a trainer rank to rollout engines: connections, layers, answers, and lost engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist

from rlhf_core.engines.ray.actors import PeerLost
from rlhf_core.engines.transfer.changes import SentLayers
from rlhf_core.engines.transfer.gloo import GlooLink
from rlhf_core.engines.transfer.source import Tensors, WeightSource

LOOK_SECONDS = 0.2  # between two looks at whether an engine that takes no layer still works
CONNECT_SECONDS = 60.0
END_SECONDS = 5.0  # until the death of an engine whose connection broke is known
Answer = tuple[int, list[float]]  # an engine's policy version, and its log-probabilities of the probe


class Peer(Protocol):
    """An engine, as seen from another process.

    key: identifies the engine; one that replaces it has another key.
    """

    @property
    def key(self) -> str: ...

    def submit(self, method: str, *args: Any) -> Future:
        """Call a method of the engine without waiting."""
        ...

    def answer(self, call: Future, timeout: float) -> Any:
        """Return the answer of a call.

        Raises:
            PeerLost: the engine has died or is late.
        """
        ...


@dataclass(frozen=True)
class Target:
    """An engine that gets weights.

    engine: the engine's rank. backend: gloo, ipc or nccl. workers: number of its processes that hold weights.
    """

    engine: int
    peer: Peer
    backend: str
    workers: int


@dataclass(frozen=True)
class Sent:
    """The result of a transfer on a trainer rank; empty on ranks other than 0.

    probe: the trainer's log-probabilities of the probe. answers: answer of each engine that has the weights, by its rank.
    lost: why each other engine doesn't have them. traffic: what went to all engines together.
    """

    probe: list[float] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    lost: dict[int, str] = field(default_factory=dict)
    traffic: Traffic = field(default_factory=lambda: Traffic())


@dataclass
class Traffic:
    """What transfers sent.

    nbytes: to all engines together. numbers, changed: with send_changes, numbers of two bytes that were compared with those sent before,
    and those that had changed. resent: layers that an engine got whole, by a tensor's name, because the changes gave it other bytes.
    """

    nbytes: int = 0
    numbers: int = 0
    changed: int = 0
    resent: list[str] = field(default_factory=list)

    def add(self, other: Traffic) -> None:
        self.nbytes, self.numbers, self.changed = self.nbytes + other.nbytes, self.numbers + other.numbers, self.changed + other.changed
        self.resent += other.resent


class WeightSender:
    """Sends weights from rank 0 of the policy's ranks. Each engine has its own connection, so that a lost engine breaks no other.

    Args:
        open_store: function that opens the store at which connections are made; called for the first one that needs it.
        timeout: seconds after which an engine is given up if it takes no layer or doesn't answer.
        send_changes: over gloo, send what has changed of a layer where that is less than the layer.
    """

    def __init__(self, open_store: Callable[[], dist.TCPStore], *, timeout: float, send_changes: bool = False):
        self._open_store, self._timeout = open_store, timeout
        self._latest = SentLayers() if send_changes else None
        self._store: dist.TCPStore | None = None
        self._links: dict[int, tuple[str, Any]] = {}  # engine -> its peer's key and its link
        self._count = 0  # connections so far

    def begin(self, targets: Sequence[Target], source: WeightSource, *, version: int, ids: Sequence[int]) -> Transfer:
        """Connect the engines that aren't connected yet, let all of them receive, and return the transfer.

        Args:
            source: source of the layers, which the caller iterates over and sends.
            ids: token ids of the probe, whose log-probabilities each engine computes at the end.
        """
        transfer = Transfer(version, ids, timeout=self._timeout, latest=self._latest)
        self._connect([t for t in targets if self._links.get(t.engine, ("",))[0] != t.peer.key], source, transfer)
        for target in targets:
            if target.engine not in transfer.broken:
                transfer.begin(target, self._links[target.engine][1])
        return transfer

    def _connect(self, targets: Sequence[Target], source: WeightSource, transfer: Transfer) -> None:
        """Connect engines at the same time. An engine that can't be connected is broken in the transfer."""
        opening: dict[int, tuple[Future, Future]] = {}
        pool = ThreadPoolExecutor(max(1, len(targets)))
        for target in targets:
            self.forget([target.engine])
            link = self._new_link(target, source)
            self._links[target.engine] = (target.peer.key, link)
            opening[target.engine] = (target.peer.submit("connect_weights", link.info), pool.submit(link.open))
        pool.shutdown(wait=False)  # a thread that waits for a dead engine ends after its timeout
        deadline = time.monotonic() + min(CONNECT_SECONDS, self._timeout)
        for target in targets:
            call, opened = opening[target.engine]
            wait([call, opened], _left(deadline), FIRST_EXCEPTION)
            try:
                target.peer.answer(call, _left(deadline + END_SECONDS))
                opened.result(_left(deadline + END_SECONDS))
            except (RuntimeError, TimeoutError) as error:
                self.forget([target.engine])
                transfer.broken[target.engine] = _one_line(error) or "no connection in time"

    def _new_link(self, target: Target, source: WeightSource) -> Any:
        if target.backend == "ipc":
            from rlhf_core.engines.transfer.gpu import IpcLink

            return IpcLink(target.peer, timeout=self._timeout)
        if self._store is None:
            self._store = self._open_store()
        if target.backend == "nccl":
            from rlhf_core.engines.transfer.gpu import NcclLink

            return NcclLink(self._store.host, source.specs, workers=target.workers)
        self._count += 1
        name = f"engine {target.engine}, connection {self._count}"
        return GlooLink(self._store, name, source, workers=target.workers, timeout=self._timeout, latest=self._latest)

    def forget(self, engines: Sequence[int]) -> None:
        """Drop the connections of lost engines."""
        for engine in engines:
            if engine in self._links:
                self._links.pop(engine)[1].close()


class Transfer:
    """One transfer of a policy's weights.

    broken: why an engine gets no more layers, by its rank. traffic: what was sent so far.
    """

    def __init__(self, version: int, ids: Sequence[int], *, timeout: float, latest: SentLayers | None = None):
        self.broken: dict[int, str] = {}
        self.traffic = Traffic()
        self._latest, self._compared = latest, (latest.numbers, latest.changed) if latest else (0, 0)
        self._version, self._ids, self._timeout = version, list(ids), timeout
        self._open: dict[int, tuple[Target, Any, Future]] = {}
        self._number, self._name = -1, ""  # of the last layer, and its first tensor
        self._sending: dict[int, Any] = {}
        self._ended: set[int] = set()  # engines whose call ended early

    def begin(self, target: Target, link: Any) -> None:
        """Let an engine receive."""
        if link.receives:
            call = target.peer.submit("receive_weights", link.updates, self._version, self._ids)
        else:
            call = target.peer.submit("start_weight_update")
        self._open[target.engine] = (target, link, call)

    def send(self, layer: Tensors, shared: dict[str, Any] | None = None) -> None:
        """Send a layer to every engine, after waiting for the previous one. It returns before the layer has arrived.

        A layer without tensors, which engines make themselves, isn't sent.

        Args:
            shared: vLLM's update info of the layer in the ranks' buffers, for engines that use ipc.
        """
        self._number += 1
        if not layer:
            return
        packed: dict[str, Any] = {"ipc": shared}
        for engine, (target, link, _) in self._open.items():
            if engine not in self.broken and target.backend not in packed:
                packed[target.backend] = link.pack(self._number, layer)
        self.flush()
        self._name = next(iter(layer))
        for engine, (target, link, _) in self._open.items():
            if engine not in self.broken:
                self._sending[engine] = link.send(packed[target.backend])

    def flush(self) -> None:
        """Wait until the last layer has arrived, or its engine is given up."""
        deadline = time.monotonic() + self._timeout
        for engine, sending in self._sending.items():
            _, link, call = self._open[engine]
            try:
                while not sending.wait(LOOK_SECONDS):
                    if link.receives and call.done():
                        self._ended.add(engine)
                        raise RuntimeError("it ended before it had all weights")
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"no progress within {self._timeout:.0f} s")
            except RuntimeError as error:
                self.broken[engine] = _one_line(error)
            self.traffic.nbytes += sending.nbytes
            if sending.is_resent:
                self.traffic.resent.append(f"engine {engine}: layer of {self._name}")
        self._sending = {}
        if self._latest is not None:
            numbers, changed = self._compared
            self.traffic.numbers, self.traffic.changed = self._latest.numbers - numbers, self._latest.changed - changed

    def answers(self) -> tuple[dict[int, Answer], dict[int, str]]:
        """Return the answer of each engine that has the weights, and why the other engines don't have them.

        Raises:
            Exception: an engine that still works refused the weights.
        """
        found, lost, refused = {}, dict(self.broken), []
        for engine, (target, link, _) in self._open.items():
            if not link.receives and engine not in self.broken:
                self._open[engine] = (target, link, target.peer.submit("finish_weights", self._version, self._ids))
        now = time.monotonic()
        for engine, (target, _, call) in self._open.items():
            patience = END_SECONDS if engine in self.broken else max(END_SECONDS, self._timeout)
            try:
                found[engine] = target.peer.answer(call, _left(now + patience))
                lost.pop(engine, None)
            except PeerLost as error:
                lost[engine] = f"no answer within {self._timeout:.0f} s" if error.late else str(error)
            except Exception as error:
                if engine in self.broken and engine not in self._ended:  # one of its workers died
                    lost[engine] = f"{self.broken[engine]}; {_one_line(error)}"
                else:
                    refused.append(error)
        if refused:
            raise refused[0]
        return found, lost


def _left(deadline: float) -> float:
    """Return the seconds until a time of the monotonic clock, at least 0. With a common deadline lost engines are waited for together."""
    return max(0.0, deadline - time.monotonic())


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
