"""The processes of a part: none outlives it, and what memory each of them takes at most."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from rlhf_core.process import configure_process
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import argument_parser

REASON_LINES = 3
LOOK_SECONDS = 0.5
# A part of the name of an actor's process, which follows what it is doing, and what figures call it.
ROLES = {"trainer": ("TrainerRank", "trainer."), "engine": ("RolloutActor", "rollout.")}


def begin(description: str | None) -> argparse.Namespace:
    """What a part does first. Returns its arguments; paths are absolute, since jobs have working directories of their own."""
    arguments = argument_parser(description).parse_args()
    configure_process()
    end_tidily()
    arguments.out = arguments.out.resolve()
    if arguments.models is not None:
        arguments.models = arguments.models.resolve()
        arguments.models.mkdir(parents=True, exist_ok=True)
    return arguments


def end_tidily() -> None:
    """SIGTERM ends this process as an exception does: what it started is ended and its temporary folders go."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def cores(most: int) -> int:
    """So many of this machine's, if it has them."""
    return min(most, os.cpu_count() or 1)


@dataclass(frozen=True)
class Budget:
    """Seconds that a part may take."""

    seconds: float
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._began)


@contextlib.contextmanager
def noted(record: Record, what: str, failures: list[str]) -> Iterator[None]:
    """Where something goes wrong within it, the rest of a part goes on: the reason is a figure without a value, and among the failures."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        failures.append(f"{what}: {error}")
        record.add(what, "", [], f"failed: {' / '.join(str(error).splitlines()[-REASON_LINES:])[-400:]}")


@dataclass
class Peaks:
    """The most that was seen, in bytes. host: resident sets by role. device: GPU memory by role. whole: of the GPU, whoever took it."""

    host: dict[str, int] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)
    whole: int = 0


@contextlib.contextmanager
def watch_memory() -> Iterator[Peaks]:
    """Look every LOOK_SECONDS at the actors that came of this process, whatever session they are in."""
    peaks, done = Peaks(), threading.Event()

    def run() -> None:
        device = _Device.find()
        while not done.wait(LOOK_SECONDS):
            _look(peaks, device)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def actor_processes() -> dict[int, str]:
    """Of each actor that came of this process its number and role."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if role := role_of(" ".join(process.cmdline())):
                found[process.pid] = role
    return found


def role_of(command: str) -> str | None:
    """What a process with this command line is; None: no actor of an RL job."""
    if not command.startswith("ray::"):
        return None
    return next((role for role, names in ROLES.items() if any(name in command for name in names)), None)


def _look(peaks: Peaks, device: _Device | None) -> None:
    by_process, whole = device.used() if device is not None else ({}, 0)
    peaks.whole = max(peaks.whole, whole)
    for pid, role in actor_processes().items():
        with contextlib.suppress(psutil.Error):
            peaks.host[role] = max(peaks.host.get(role, 0), psutil.Process(pid).memory_info().rss)
        if pid in by_process:
            peaks.device[role] = max(peaks.device.get(role, 0), by_process[pid])


@dataclass(frozen=True)
class _Device:
    """The first GPU, as NVIDIA's management library sees it."""

    library: object
    handle: object

    @classmethod
    def find(cls) -> _Device | None:
        """None: there is no GPU, or no such library."""
        try:
            import pynvml

            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
        except Exception:  # the module is absent, or raises its own errors where there is no driver
            return None

    def used(self) -> tuple[dict[int, int], int]:
        """Bytes by process, as far as the driver tells them, and of all together."""
        try:
            running = self.library.nvmlDeviceGetComputeRunningProcesses(self.handle)
            whole = int(self.library.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.library.NVMLError:
            return {}, 0
        return {p.pid: int(p.usedGpuMemory) for p in running if p.usedGpuMemory}, whole
