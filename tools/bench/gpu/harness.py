"""Runs the parts of the GPU check in sequence, each in its own process with a time limit.

At its limit a part and all its descendants are killed; its figures stay, and the next part runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tools.bench.gpu.cases import KILL_WITH_PARENT, ROOT
from tools.bench.gpu.record import Figure, read

RAN, FAILED, STOPPED, NOT_RUN = "ran", "failed", "stopped", "not run"
REASON_LINES = 3
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
END_SECONDS = 15.0  # until killed processes are gone
ABOUT_SECONDS = 120.0


@dataclass(frozen=True)
class Part:
    """module: takes --out FILE.json, --models FOLDER and --rehearse. needs, limit: seconds; not started with less than `needs` left."""

    name: str
    title: str
    needs: float
    limit: float
    module: str = ""

    @property
    def program(self) -> str:
        return self.module or f"tools.bench.gpu.{self.name}"


# The most useful parts first.
PARTS = (
    Part("tests", "the tests that need a GPU", 120, 540),
    Part("training", "steps of SFT, reward model and DPO", 120, 480),
    Part("vllm", "rollouts, beside bare vLLM", 120, 480, "tools.bench.gpu.rollouts"),
    Part("rl", "the steps of RL jobs", 180, 540),
    Part("trl", "GRPO by us and by TRL", 120, 540, "tools.bench.gpu.peer"),
    Part("turns", "engines and trainer by turns on a GPU", 150, 540),
    Part("transfer", "weights for an engine on the same GPU", 120, 440),
    Part("lora", "steps with adapters", 90, 420),
    Part("tensor_parallel", "an engine on two GPUs", 60, 480),
    Part("memory", "where the memory goes", 90, 300),
)


@dataclass(frozen=True)
class Result:
    """The result of a part.

    outcome: ran, failed, stopped or not run, with a reason where there is one. about: see tools/bench/gpu/device.py.
    """

    part: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    rehearsal: bool = False
    about: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_result(path: Path) -> Result:
    """Read what `Result.write` wrote; for an interrupted part its figures so far."""
    found = json.loads(path.read_text())
    if isinstance(found, list):
        return Result(path.stem, STOPPED, "the whole check was ended while it ran", figures=read(path))
    figures = [Figure(**{**row, "values": tuple(row["values"])}) for row in found.pop("figures")]
    return Result(**found, figures=figures)


def run_parts(parts: Sequence[Part], out: Path, *, until: float, rehearse: bool, models: Path, about: dict[str, str]) -> Iterator[Result]:
    """Yield each part's result, written to out/<part>.json unless the part wasn't started.

    Args:
        until: end of all parts, monotonic clock.
    """
    for part in parts:
        left = until - time.monotonic()
        if left < part.needs:
            reason = f"{max(0.0, left):.0f} s were left, and it needs {part.needs:.0f}"
            yield Result(part.name, NOT_RUN, reason, rehearsal=rehearse, about=about)
            continue
        result = run_part(part, out / f"{part.name}.json", seconds=min(part.limit, left), rehearse=rehearse, models=models, about=about)
        result.write(out / f"{part.name}.json")
        yield result


def run_part(part: Part, path: Path, *, seconds: float, rehearse: bool, models: Path, about: dict[str, str]) -> Result:
    """Run one part and pass its output on. `path`: file of its figures."""
    path.unlink(missing_ok=True)
    began = time.monotonic()
    outcome, reason = _watch(part, path, seconds=seconds, rehearse=rehearse, models=models)
    figures = read(path) if path.exists() else []
    path.with_suffix(".part").unlink(missing_ok=True)
    if outcome == RAN and not figures:
        outcome, reason = FAILED, "it left no figures"
    return Result(part.name, outcome, reason, round(time.monotonic() - began, 1), rehearse, about, figures)


def _watch(part: Part, path: Path, *, seconds: float, rehearse: bool, models: Path) -> tuple[str, str]:
    if importlib.util.find_spec(part.program) is None:
        return FAILED, f"there is no module {part.program}"
    command = [sys.executable, "-m", part.program, "--out", str(path), "--models", str(models), *(["--rehearse"] if rehearse else [])]
    adopt_orphans()
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace", start_new_session=True, preexec_fn=KILL_WITH_PARENT,
    )  # fmt: skip
    lines: deque[str] = deque(maxlen=200)
    reader = threading.Thread(target=_pass_on, args=(process, lines), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_descendants(process)
        reader.join(timeout=5)
    if code == 0:
        return RAN, ""
    last = " / ".join([line.strip() for line in lines if line.strip()][-REASON_LINES:])[-400:]
    return (STOPPED, f"after {seconds:.0f} s; last: {last}") if code is None else (FAILED, f"exit code {code}; last: {last}")


def _pass_on(process: subprocess.Popen, lines: deque[str]) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError):  # closed at the end
        for line in process.stdout:
            lines.append(line)
            print(line, end="", flush=True)


def environment() -> dict[str, str]:
    """Environment of a part. vLLM's default sampler needs an optional package; without it vLLM would fail."""
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "PYTHONUNBUFFERED": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        found.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return found


def adopt_orphans() -> None:
    """Make this process the reaper of orphans, so that no descendant of a part escapes, even in another session."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_descendants(process: subprocess.Popen) -> None:
    """Kill a part and all its descendants, so that none is on the device when the next part starts.

    This process must have no other children.
    """
    if process.poll() is None:  # lets it end its children and remove its folders
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=GRACE_SECONDS)
    until = time.monotonic() + END_SECONDS
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the driver; run the next part anyway
        process.wait(timeout=END_SECONDS)
    while (children := psutil.Process().children(recursive=True)) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=0.2)


def find_about(*, rehearse: bool) -> dict[str, str]:
    """Device and packages, inspected by another process.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal), or the inspection failed.
    """
    command = [sys.executable, "-m", "tools.bench.gpu.device", *(["--rehearse"] if rehearse else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=ABOUT_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["device: expected what is there, got no output"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
