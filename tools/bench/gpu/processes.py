"""The processes of a part: none outlives it, and each one's peak memory is recorded."""

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

from rlhf_core.process import beside, configure_process
from tools.bench.gpu.record import Record
from tools.bench.gpu.shapes import argument_parser

REASON_LINES = 3
LOOK_SECONDS = 0.5
# Part of an actor's process title (which varies with its call): role in the figures.
ROLES = {"trainer": ("TrainerRank", "trainer."), "engine": ("RolloutActor", "rollout.")}


def begin(description: str | None) -> argparse.Namespace:
    """Set up a part's process. Returns its arguments with absolute paths, because jobs have other working directories."""
    arguments = argument_parser(description).parse_args()
    configure_process()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, so that children and folders are removed
    arguments.out = arguments.out.resolve()
    if arguments.models is not None:
        arguments.models = arguments.models.resolve()
        arguments.models.mkdir(parents=True, exist_ok=True)
    return arguments


def cores(most: int) -> int:
    """This machine's number of cores, at most `most`."""
    return min(most, os.cpu_count() or 1)


@dataclass(frozen=True)
class Budget:
    """The time limit of a part, in seconds."""

    seconds: float
    _began: float = field(default_factory=time.monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (time.monotonic() - self._began)


@contextlib.contextmanager
def noted(record: Record, what: str, failures: list[str]) -> Iterator[None]:
    """Record an error as a figure without a value and as a failure, and continue the part."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        failures.append(f"{what}: {error}")
        record.add(what, "", [], f"failed: {' / '.join(str(error).splitlines()[-REASON_LINES:])[-400:]}")


@dataclass
class Peaks:
    """Peak bytes. host: resident set by role. device: GPU memory by role. whole: all GPU memory in use."""

    host: dict[str, int] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)
    whole: int = 0


@contextlib.contextmanager
def watch_memory() -> Iterator[Peaks]:
    """Sample this process's descendant actors, in any session, every LOOK_SECONDS."""
    peaks = Peaks()

    def run(done: threading.Event) -> None:
        device = _Device.find()
        while not done.wait(LOOK_SECONDS):
            _look(peaks, device)

    with beside(run):
        yield peaks


def actor_processes() -> dict[int, str]:
    """Process id and role of each descendant actor."""
    found = {}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if role := role_of(" ".join(process.cmdline())):
                found[process.pid] = role
    return found


def role_of(command: str) -> str | None:
    """Role of a process with this command line; None: no actor of an RL job."""
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
    """The first GPU in NVIDIA's management library."""

    library: object
    handle: object

    @classmethod
    def find(cls) -> _Device | None:
        """None: no GPU, or no such library."""
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
        except pynvml.NVMLError:
            return None

    def used(self) -> tuple[dict[int, int], int]:
        """Bytes by process, as far as the driver reports them, and in total."""
        try:
            running = self.library.nvmlDeviceGetComputeRunningProcesses(self.handle)
            whole = int(self.library.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.library.NVMLError:
            return {}, 0
        return {p.pid: int(p.usedGpuMemory) for p in running if p.usedGpuMemory}, whole
