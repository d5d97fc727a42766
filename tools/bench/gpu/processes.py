"""Manages the processes of a part: none outlives it, a measurement may have its own, and the peak memory of each is recorded."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from rlhf_core.process import beside, configure_process, end_with_parent
from tools.bench.gpu.record import Record

Case = dict[str, Any]  # JSON values
ROOT = Path(__file__).parents[3]
HEAD = "RLHF_GPU_CHECK_HEAD"  # environment variable: address of the Ray head that all parts share
KILL_WITH_PARENT = partial(end_with_parent, number=signal.SIGKILL)  # a child that outlives its parent would keep the device
APART = "--apart"  # before the files of a case and of its result
REASON_LINES = 3
LOOK_SECONDS = 0.5
# Part of an actor's process title (which varies with its call): role in the figures.
ROLES = {"trainer": ("TrainerRank", "trainer."), "engine": ("RolloutActor", "rollout.")}


def begin(description: str | None) -> argparse.Namespace:
    """Set up a part's process, and return its arguments with absolute paths, because jobs have other working directories."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the figures")
    parser.add_argument("--rehearse", action="store_true", help="a tiny shape, on whatever is there")
    parser.add_argument("--models", type=Path, help="folder for models with random weights, which stay; a temporary one if not given")
    parser.add_argument("arguments", nargs="*", help="of the part")
    arguments = parser.parse_args()
    configure_process()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # an exception, so that children and folders are removed
    arguments.out = arguments.out.resolve()
    if arguments.models is not None:
        arguments.models = arguments.models.resolve()
        arguments.models.mkdir(parents=True, exist_ok=True)
    return arguments


def cores(most: int) -> int:
    """Return the number of this machine's cores, at most `most`."""
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
    """Record an error in the block as a figure without a value and as a failure, and let the part continue."""
    try:
        yield
    except (RuntimeError, ValueError, OSError) as error:
        failures.append(f"{what}: {error}")
        record.add(what, "", [], f"failed: {' / '.join(str(error).splitlines()[-REASON_LINES:])[-400:]}")


def measure_apart(module: str, case: Case, *, seconds: float) -> Case:
    """Return the result of `measure_here` in another process of the module, which frees its memory and whose crash ends this case only.

    Raises:
        RuntimeError: the process failed or exceeded its time; its output has the traceback.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        given, found = Path(folder) / "case.json", Path(folder) / "found.json"
        given.write_text(json.dumps(case))
        command = [sys.executable, "-m", module, APART, str(given), str(found)]
        try:
            done = subprocess.run(command, cwd=ROOT, timeout=max(1.0, seconds), preexec_fn=KILL_WITH_PARENT)
        except subprocess.TimeoutExpired as late:
            raise RuntimeError(f"{module}: expected its figures within {seconds:.0f} s, got none") from late
        if done.returncode:
            raise RuntimeError(f"{module}: expected exit code 0, got {done.returncode}; its traceback is in the output")
        return json.loads(found.read_text())


def measure_here(measure: Callable[[Case], Case]) -> bool:
    """Measure the case if `measure_apart` started this process, and return whether it did."""
    if sys.argv[1:2] != [APART]:
        return False
    configure_process()
    given, found = map(Path, sys.argv[2:4])
    found.write_text(json.dumps(measure(json.loads(given.read_text()))))
    return True


@dataclass
class Peaks:
    """Peak memory in bytes.

    host: peak resident set by role. device: peak GPU memory by role. whole: peak of all GPU memory in use.
    """

    host: dict[str, int] = field(default_factory=dict)
    device: dict[str, int] = field(default_factory=dict)
    whole: int = 0


@contextlib.contextmanager
def watch_memory() -> Iterator[Peaks]:
    """Sample the Ray head's actors, in any session, every LOOK_SECONDS."""
    peaks = Peaks()

    def run(done: threading.Event) -> None:
        device = _Device.find()
        while not done.wait(LOOK_SECONDS):
            _look(peaks, device)

    with beside(run):
        yield peaks


def actor_processes() -> dict[int, str]:
    """Return the process id and role of each actor of the Ray head: this process's head, or its parent's if parts share one."""
    found, own = {}, psutil.Process()
    for process in ((own.parent() or own) if HEAD in os.environ else own).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if role := role_of(" ".join(process.cmdline())):
                found[process.pid] = role
    return found


def role_of(command: str) -> str | None:
    """Return the role of a process with this command line, or None if it isn't an actor of an RL job."""
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
    """The first GPU as NVIDIA's management library shows it."""

    library: object
    handle: object

    @classmethod
    def find(cls) -> _Device | None:
        """Return the first GPU, or None without a GPU or without the library."""
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
        """Return the bytes in use by process, as far as the driver reports them, and in total."""
        try:
            running = self.library.nvmlDeviceGetComputeRunningProcesses(self.handle)
            whole = int(self.library.nvmlDeviceGetMemoryInfo(self.handle).used)
        except self.library.NVMLError:
            return {}, 0
        return {p.pid: int(p.usedGpuMemory) for p in running if p.usedGpuMemory}, whole
