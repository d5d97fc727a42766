"""Runs the parts of the GPU check in sequence, each in its own process with a time limit.

At its limit a part and all its descendants are killed; its figures stay, and the next part runs. Parts with RL jobs share one Ray head.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from rlhf_core.engines.ray.cluster import MARK, ClusterError, local_head
from rlhf_core.files import replace_text
from tools.bench.gpu.processes import HEAD, KILL_WITH_PARENT, ROOT
from tools.bench.gpu.record import Figure, read

RAN, FAILED, STOPPED, CUT, NOT_RUN = "ran", "failed", "stopped", "cut off", "not run"
RESULTS, LOGS = "results.json", "logs.txt"
REASON_LINES = 3
GRACE_SECONDS = 5.0  # from SIGTERM to SIGKILL
END_SECONDS = 15.0  # until killed processes are gone
ABOUT_SECONDS = 120.0
WRITE_SECONDS = 240.0  # for the models
HEAD_CPUS, HEAD_SECONDS = 8, 120.0
LOG_BYTES = 4 << 20  # of one of Ray's logs; longer ones are left out

TESTS = "tests/gpu/test_gpu.py::"
DEFAULT_JOB = f"{TESTS}test_the_default_job_runs_with_trainer_and_engines_on_one_gpu[vllm-bfloat16]"
IPC = f"{TESTS}test_an_engine_computes_with_weights_that_were_sent_to_it[ipc]"
LOGPROBS = f"{TESTS}test_engine_and_trainer_agree_before_and_after_a_weight_sync[vllm]"
FIRST_TESTS = (DEFAULT_JOB, IPC, LOGPROBS)


@dataclass(frozen=True)
class Part:
    """A part of the check.

    module: program that takes arguments, --out FILE.json, --models FOLDER and --rehearse. needs, limit: seconds; the part isn't started if
    less than `needs` is left, and is killed at `limit`. head: whether it submits RL jobs. models: (shape, kind) of the models that it
    loads.
    """

    name: str
    title: str
    needs: float
    limit: float
    module: str
    arguments: tuple[str, ...] = ()
    head: bool = False
    models: tuple[tuple[str, str], ...] = ()


_TEST, _STEPS, _JOBS = "tools.bench.gpu.gpu_tests", "tools.bench.gpu.training", "tools.bench.gpu.jobs"
_POLICY, _REWARD = ("1.5B", "language"), ("1.5B", "reward")
# The most useful parts first.
PARTS = (
    Part("default_job", "the default RL job on one GPU", 60, 240, _TEST, (DEFAULT_JOB,), head=True),
    Part("ipc", "weights by CUDA IPC arrive", 30, 120, _TEST, (IPC,)),
    Part("logprobs", "engine and trainer compute the same log-probabilities", 30, 120, _TEST, (LOGPROBS,)),
    Part("turns", "GRPO with engine and trainer by turns, beside TRL", 120, 480, _JOBS, ("turns",), head=True, models=(_POLICY,)),
    Part("sft", "steps of SFT, beside TRL", 60, 150, _STEPS, ("sft",), models=(_POLICY,)),
    Part("dpo", "steps of DPO, beside TRL", 60, 150, _STEPS, ("dpo",), models=(_POLICY,)),
    Part("reward", "steps of the reward model, beside TRL", 60, 150, _STEPS, ("reward",), models=(_POLICY,)),
    Part("tests", "the other tests that need a GPU", 90, 400, _TEST, tuple(f"--deselect={name}" for name in FIRST_TESTS)),
    Part("transfer", "weights for an engine on the same GPU", 60, 200, "tools.bench.gpu.transfer", models=(_POLICY,)),
    Part("ppo", "PPO with engine and trainer by turns", 90, 240, _JOBS, ("ppo",), head=True, models=(_POLICY, _REWARD)),
    Part("lora", "steps with adapters", 60, 200, _STEPS, ("lora",), models=(_POLICY,)),
    Part("memory", "where the memory goes", 60, 200, "tools.bench.gpu.memory", models=(("0.5B", "language"), ("0.5B", "reward"))),
    Part("fp8", "GRPO with rollouts in FP8, by turns", 60, 200, _JOBS, ("fp8",), head=True, models=(_POLICY,)),
    Part("tensor_parallel", "an engine on two GPUs", 60, 240, _JOBS, ("tensor_parallel",), head=True, models=(_POLICY,)),
)


@dataclass(frozen=True)
class Result:
    """The result of a part.

    outcome: ran, failed, stopped (at its limit), cut off (at the check's end) or not run, with a reason if there is one.
    about: see tools/bench/gpu/device.py.
    """

    part: str
    outcome: str
    reason: str = ""
    seconds: float = 0.0
    rehearsal: bool = False
    about: dict[str, str] = field(default_factory=dict)
    figures: list[Figure] = field(default_factory=list)

    @property
    def is_final(self) -> bool:
        """Whether another call leaves the part out."""
        return self.outcome in (RAN, FAILED, STOPPED)


@dataclass(frozen=True)
class Check:
    """One call of the check: the device on which it measures, where its results and models go, and when it ends.

    until: the end, by the monotonic clock.
    """

    out: Path
    models: Path
    rehearse: bool
    about: dict[str, str]
    until: float

    def earlier(self) -> dict[str, Result]:
        """Return the folder's results by part, without results of another device or other versions, and without a rehearsal's unless this
        is one.
        """
        found = read_results(self.out)
        mine = {**self.about, "date": ""}
        return {r.part: r for r in found if r.rehearsal == self.rehearse and {**r.about, "date": ""} == mine}


def write_results(out: Path, results: Sequence[Result]) -> None:
    replace_text(out / RESULTS, json.dumps([asdict(result) for result in results], indent=1) + "\n")


def read_results(out: Path) -> list[Result]:
    """Return the results that `write_results` wrote; empty if there are none."""
    if not (out / RESULTS).exists():
        return []
    rows = json.loads((out / RESULTS).read_text())
    return [Result(**{**row, "figures": [Figure(**{**f, "values": tuple(f["values"])}) for f in row["figures"]]}) for row in rows]


def run_parts(parts: Sequence[Part], check: Check, earlier: dict[str, Result]) -> Iterator[Result]:
    """Yield each part's result; an earlier result if that is final."""
    adopt_orphans()
    with contextlib.ExitStack() as stack:
        wanted = [part for part in parts if not (part.name in earlier and earlier[part.name].is_final)]
        writer = stack.enter_context(write_models(wanted, check))
        head = SharedHead()
        stack.callback(head.close)
        for part in parts:
            if part not in wanted:
                yield earlier[part.name]
            elif (left := check.until - time.monotonic()) < part.needs:
                reason = f"{max(0.0, left):.0f} s were left, and it needs {part.needs:.0f}"
                yield Result(part.name, NOT_RUN, reason, rehearsal=check.rehearse, about=check.about)
            else:
                yield run_part(part, check, head, writer)


@contextlib.contextmanager
def write_models(parts: Sequence[Part], check: Check) -> Iterator[subprocess.Popen | None]:
    """Write the models of the parts, in their order, while the first parts run."""
    from tools.bench.gpu.shapes import TINY

    models = dict.fromkeys((TINY if check.rehearse else shape, kind) for part in parts for shape, kind in part.models)
    if not models:
        yield None
        return
    command = [sys.executable, "-m", "tools.bench.gpu.shapes", str(check.models), *(f"{shape}:{kind}" for shape, kind in models)]
    with (check.out / LOGS).open("ab") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=KILL_WITH_PARENT
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


class SharedHead:
    """A Ray head for all parts with jobs, started for the first one."""

    def __init__(self) -> None:
        self._open: contextlib.ExitStack | None = None
        self._address = ""

    def address(self) -> str:
        """The head's address; the first call starts it.

        Raises:
            ClusterError: the head didn't start.
        """
        if self._open is None:
            self._open = contextlib.ExitStack()
            self._address = self._open.enter_context(local_head(cpus=HEAD_CPUS, start_timeout=HEAD_SECONDS, stop_grace=GRACE_SECONDS))
        return self._address

    @property
    def folder(self) -> Path | None:
        """The folder with the head's logs."""
        return Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent if self._open is not None else None

    def close(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None


def run_part(part: Part, check: Check, head: SharedHead, writer: subprocess.Popen | None) -> Result:
    """Run one part, pass its output on, and return its result.

    A part that loads models waits for all of them, so that nothing else runs during its measurements.
    """
    began, path = time.monotonic(), check.out / f"{part.name}.json"
    for old in (path, ray_logs(part, check)):
        old.unlink(missing_ok=True)
    common = {"rehearsal": check.rehearse, "about": check.about}
    try:
        if part.models and writer is not None and writer.wait(timeout=WRITE_SECONDS):
            return Result(part.name, FAILED, f"its models were not written; see {LOGS}", **common)
        address = head.address() if part.head else None
    except subprocess.TimeoutExpired:
        return Result(part.name, FAILED, f"its models were not written within {WRITE_SECONDS:.0f} s", **common)
    except ClusterError as error:
        head.close()
        return Result(part.name, FAILED, str(error), **common)
    outcome, reason = _watch(part, path, check, address, head, writer)
    figures = read(path) if path.exists() else []
    for left in (path, path.with_suffix(".part")):
        left.unlink(missing_ok=True)
    if outcome == RAN and not figures:
        outcome, reason = FAILED, "it left no figures"
    return Result(part.name, outcome, reason, round(time.monotonic() - began, 1), figures=figures, **common)


def _watch(part: Part, path: Path, check: Check, address: str | None, head: SharedHead, writer: subprocess.Popen | None) -> tuple[str, str]:
    if importlib.util.find_spec(part.module) is None:
        return FAILED, f"there is no module {part.module}"
    own = ["--out", str(path), "--models", str(check.models), *(["--rehearse"] if check.rehearse else [])]
    left = check.until - time.monotonic()
    seconds = min(part.limit, left)
    process = subprocess.Popen(
        [sys.executable, "-m", part.module, *own, "--", *part.arguments],
        cwd=ROOT, env=environment() | ({HEAD: address} if address else {}),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True,
        preexec_fn=KILL_WITH_PARENT,
    )  # fmt: skip
    lines: deque[str] = deque(maxlen=200)
    reader = threading.Thread(target=_pass_on, args=(process, lines, part.name, check.out / LOGS), daemon=True)
    reader.start()
    try:
        code = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        if process.poll() != 0 and head.folder is not None:  # its job may still be there
            keep_logs(head.folder, ray_logs(part, check))
            head.close()
        end_descendants(process, spared=[writer] if writer is not None else [], head=head.folder)
        reader.join(timeout=5)
    if code == 0:
        return RAN, ""
    last = " / ".join([line.strip() for line in lines if line.strip()][-REASON_LINES:])[-400:]
    if code is None:
        return CUT if seconds == left else STOPPED, f"after {seconds:.0f} s; last: {last}"
    return FAILED, f"exit code {code}; last: {last}"


def _pass_on(process: subprocess.Popen, lines: deque[str], name: str, log: Path) -> None:
    assert process.stdout is not None
    with contextlib.suppress(ValueError), log.open("a", errors="replace") as kept:  # closed at the end
        kept.write(f"\n##### {name}\n")
        for line in process.stdout:
            lines.append(line)
            kept.write(line)
            kept.flush()
            print(line, end="", flush=True)


def ray_logs(part: Part, check: Check) -> Path:
    """The archive in which the logs of a failed part's Ray head are kept."""
    return check.out / f"ray-{part.name}.tar.gz"


def keep_logs(head: Path, archive: Path) -> None:
    """Keep the logs of a head's actors, which go with its folder."""
    with tarfile.open(archive, "w:gz", compresslevel=3) as tar:
        for path in (head / "r").glob("session_2*/logs/**/*"):
            with contextlib.suppress(OSError):
                if path.is_file() and path.stat().st_size < LOG_BYTES:
                    tar.add(path, path.relative_to(head / "r"))


def environment() -> dict[str, str]:
    """Return the environment of a part.

    vLLM's default sampler needs an optional package; without this setting vLLM would fail.
    """
    found = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "PYTHONUNBUFFERED": "1"}
    if importlib.util.find_spec("flashinfer") is None:
        found.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return found


def adopt_orphans() -> None:
    """Make this process the reaper of orphans, so that no descendant of a part escapes, even in another session."""
    if sys.platform == "linux":
        pr_set_child_subreaper = 36
        ctypes.CDLL(None).prctl(pr_set_child_subreaper, 1)


def end_descendants(process: subprocess.Popen, *, spared: Sequence[subprocess.Popen], head: Path | None) -> None:
    """Kill a part and all its descendants, so that none is on the device when the next part starts.

    Args:
        spared: other children of this process, which stay with theirs.
        head: folder of the Ray head that stays.
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
    while (children := _children(spared, head)) and time.monotonic() < until:
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=0.2)


def _children(spared: Sequence[subprocess.Popen], head: Path | None) -> list[psutil.Process]:
    """The descendants of this process, without those of `spared` and of the head's keeper."""
    kept, own = {process.pid for process in spared}, psutil.Process()
    for child in own.children():
        with contextlib.suppress(psutil.Error):
            if child.pid in kept or (head is not None and child.environ().get(MARK) == str(head)):
                kept |= {child.pid, *(process.pid for process in child.children(recursive=True))}
    return [child for child in own.children(recursive=True) if child.pid not in kept]


def models_in_memory(needed: int) -> Path | None:
    """Return a folder in memory if there is room for `needed` bytes and as many for everything else; None to use the disk."""
    memory = Path("/dev/shm")
    if memory.is_dir() and min(shutil.disk_usage(memory).free, psutil.virtual_memory().available // 2) > needed:
        return memory
    return None


def find_about(*, rehearse: bool) -> dict[str, str]:
    """Return device and packages, found by another process.

    Raises:
        RuntimeError: there is no GPU (except in a rehearsal), or the inspection failed.
    """
    command = [sys.executable, "-m", "tools.bench.gpu.device", *(["--rehearse"] if rehearse else [])]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=ABOUT_SECONDS)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["device: expected what is there, got no output"])[-1])
    return json.loads(done.stdout.splitlines()[-1])
