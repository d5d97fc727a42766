"""Holds a weight transfer between its first and its last layer, so that a fault strikes in the middle.

A small model's transfer takes milliseconds. The trainer's ranks are stopped as soon as one of them works on `send_weights`, and then run in
slices of a fraction of a millisecond. Between two slices the stacks of the engines, which py-spy reads from outside, show for which layer
each of them waits.
"""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import psutil
from small_workspace import command_line

log = logging.getLogger("faults")
SLICE_SECONDS = 2e-4
LOOK_SECONDS = 1.0  # between two searches for the processes
SETTLE_SECONDS = 2.0  # until engines have taken what the ranks sent in a slice
HOLD_SECONDS = 8.0  # of a transfer; well below the deadlines of its processes
SPY = Path(sys.prefix) / "bin/py-spy"

Find = Callable[[str], Sequence[psutil.Process]]  # the processes of a role, such as "rollout"


@dataclass(frozen=True)
class Held:
    """A transfer that is held in the middle.

    ranks: trainer ranks that are stopped at work on it. engines: engines, each of which waits for a layer that isn't the first.
    """

    ranks: Sequence[psutil.Process]
    engines: Sequence[psutil.Process]


@contextmanager
def held_transfer(find: Find, *, ended: Callable[[], bool], deadline: float) -> Iterator[Held]:
    """Hold the next possible transfer within the block; the ranks run again at its end.

    Args:
        ended: function that returns whether the job has ended.
        deadline: seconds to wait for a transfer that can be held.
    Raises:
        RuntimeError: no transfer could be held.
    """
    until, looked, count = time.monotonic() + deadline, -math.inf, 0
    while not ended() and time.monotonic() < until:
        if time.monotonic() - looked > LOOK_SECONDS:
            ranks, looked = find("trainer"), time.monotonic()
        if not at_work(ranks, "send_weights"):
            time.sleep(SLICE_SECONDS)
            continue
        count += 1
        with stopped(ranks):
            engines = find("rollout")
            if (layers := _advance(ranks, engines)) is not None:
                log.info("transfer %d: held where engines wait for layers %s, the first being 0", count, sorted(layers))
                yield Held(at_work(ranks, "send_weights"), engines)
                return
        while at_work(ranks, "send_weights"):
            time.sleep(SLICE_SECONDS)
    raise RuntimeError(f"expected an engine in the middle of a transfer, got none in {count} transfers")


def unavailable() -> str | None:
    """Return why py-spy can't read another process's stack here, or None if it can."""
    if not SPY.exists():
        return "needs py-spy, which comes with ray[default]"
    idle = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(idle, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        other.stdout.readline()
        done = _dump(other.pid)
        other.kill()
    return f"py-spy: {done.stderr.strip().splitlines()[-1]}" if done.returncode else None


def at_work(actors: Sequence[psutil.Process], call: str) -> list[psutil.Process]:
    """The Ray actors that work on a call, which their titles name."""
    return [actor for actor in actors if call in " ".join(command_line(actor))]


@contextmanager
def stopped(processes: Sequence[psutil.Process]) -> Iterator[None]:
    _signal(processes, SIGSTOP)
    try:
        yield
    finally:
        _signal(processes, SIGCONT)


def _signal(processes: Sequence[psutil.Process], number: int) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _advance(ranks: Sequence[psutil.Process], engines: Sequence[psutil.Process]) -> list[int] | None:
    """Run stopped ranks until every engine waits for a layer after the first. Returns these layers; None if the transfer went too far."""
    until = time.monotonic() + HOLD_SECONDS
    while at_work(ranks, "send_weights") and time.monotonic() < until:
        layers = [settled_layer(engine) for engine in at_work(engines, "receive_weights")]
        if len(layers) == len(engines) > 0 and all(layers):
            return layers
        _signal(ranks, SIGCONT)
        time.sleep(SLICE_SECONDS)
        _signal(ranks, SIGSTOP)
    return None


def settled_layer(engine: psutil.Process) -> int | None:
    """The layer for which an engine waits, once none of its threads has anything to do; None if it waits for none."""
    until = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < until:
        if is_asleep(engine):
            layer = awaited_layer(engine)
            if is_asleep(engine):
                return layer
    return None


def awaited_layer(engine: psutil.Process) -> int | None:
    """The argument of `GlooReceiver.receive` on an engine's stack; None if the engine isn't in it."""
    done = _dump(engine.pid)
    if done.returncode:  # a stack that changed while it was read
        return None
    for frame in (frame for thread in json.loads(done.stdout) for frame in thread["frames"]):
        if frame["filename"].endswith("transfer/gloo.py") and frame["name"].endswith("receive"):
            return int(next(local["repr"] for local in frame["locals"] or () if local["name"] == "number"))
    return None


def _dump(pid: int) -> subprocess.CompletedProcess[str]:
    """py-spy's report of a process's stacks."""
    command = [SPY, "dump", "--pid", str(pid), "--locals", "--json", "--nonblocking"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def is_asleep(process: psutil.Process) -> bool:
    """Whether no thread of a process runs or could run."""
    states = []
    for path in Path(f"/proc/{process.pid}/task").glob("*/stat"):
        with suppress(OSError):  # a thread that has ended
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return "R" not in states
