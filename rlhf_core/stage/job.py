"""A job on a Ray cluster: its description, and what its driver tells the stage: heartbeat, exit code, and the reason of a refusal."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import logging
import os
import pickle
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params
from rlhf_core.environment import of_stage
from rlhf_core.files import replacing
from rlhf_core.process import beside
from rlhf_core.storage.node import job_storage
from rlhf_core.storage.work import BEAT_SECONDS, PULSE, REFUSAL, REFUSED, JobStorage

log = logging.getLogger("rlhf")

# Exit codes of the driver, after sysexits.h, beside STOPPED_BY_SIGNAL and REFUSED. Any other code is a crash; a rerun may succeed.
LOST = 75  # EX_TEMPFAIL: an actor that can't be replaced died or missed a deadline; a rerun resumes from the last checkpoint
FULL = 74  # EX_IOERR: a checkpoint can't be written, such as for lack of space


@dataclass(frozen=True)
class Job:
    """What the driver and the ranks of a job need to know of the stage.

    Paths are relative to `root`: with a storage each node's copy of the project's folder (rlhf_core/storage/node.py), otherwise a folder
    that every node sees.

    launch: "module:name" of the function that the driver calls with the job, the cluster's number of GPUs and a `Stop`. It runs the job's
        processes and returns the driver's exit code.
    function: "module:name" of the work; arguments: of it, pickled. With `launch_ranks` each rank calls it with a TrainRun and the
        arguments; for RL the driver calls it once, with its actors.
    work: the stage's scratch folder, for checkpoints, curves and the trained model.
    threads: CPU cores of all ranks together.
    sequence_parallel: ranks that share each sequence.
    actor_output: the driver prints what all of its actors print.
    """

    stage: str
    launch: str
    function: str
    arguments: tuple[Any, ...]
    params: Params
    ranks: int
    root: Path
    work: Path
    checkpoints: StoreSettings
    threads: int
    sequence_parallel: int = 1
    actor_output: bool = False

    @property
    def visible(self) -> set[str]:
        """Names of environment variables that the job's processes may see besides those that every process may see."""
        return of_stage(self.params, self.stage, os.environ)

    @property
    def threads_of_rank(self) -> int:
        return max(1, self.threads // self.ranks)

    @property
    def result_file(self) -> Path:
        """File with the function's result on rank 0."""
        return self.work / "result.json"

    def write(self, path: Path) -> None:
        """Write the job atomically: processes of a live job, which the stage then follows, may be reading the file."""
        with replacing(path) as aside:
            aside.write_bytes(pickle.dumps(self))

    @staticmethod
    def read(path: Path) -> Job:
        return pickle.loads(path.read_bytes())


def named_object(name: str) -> Any:
    """Return the object that "module:name" names."""
    module, _, name = name.partition(":")
    return getattr(importlib.import_module(module), name)


def pulse_file(work: Path) -> Path:
    """Return the file of the driver's heartbeat in the job's folder."""
    return work / PULSE


def refuse(work: Path, error: BaseException) -> int:
    """Log why the job can't be done, leave the reason for the stage, and return the driver's exit code."""
    log.error("%s", error)
    reason = " ".join(str(error).split())
    with contextlib.suppress(OSError):  # the log has the reason
        (work / REFUSAL).write_text(reason, encoding="utf-8")
        if (stored := job_storage()) is not None:
            stored.put_note(REFUSAL, reason.encode())
    return REFUSED


def forget_refusal(work: Path) -> None:
    """Remove the reason that an earlier driver left."""
    with contextlib.suppress(OSError):
        (work / REFUSAL).unlink(missing_ok=True)
        if (stored := job_storage()) is not None:
            stored.remove_notes(REFUSAL)


def refusal_of(work: Path, stored: JobStorage | None = None) -> str:
    """Return on one line why a driver exited with REFUSED.

    Args:
        stored: the job's part of the storage; None: the job shares the folder `work` with this machine.
    """
    with contextlib.suppress(OSError):
        reason = (work / REFUSAL).read_bytes() if stored is None else stored.note(REFUSAL)
        if reason:
            return reason.decode(errors="replace")
    return "expected to be able to train, got a refusal in its output; change what that names"


@contextlib.contextmanager
def beat(path: Path) -> Iterator[None]:
    """Write the heartbeat file every BEAT_SECONDS from a thread, so that it stops with the process and not while the main thread waits."""
    stored = job_storage()

    def run(done: threading.Event) -> None:
        for count in itertools.count():
            with contextlib.suppress(OSError):  # a full disk is reported where it matters
                path.write_text(str(count))
                if stored is not None:
                    stored.put_note(PULSE, f"{count}".encode())
            if done.wait(BEAT_SECONDS):
                return

    with beside(run):
        yield


def check_cluster(stage: str, params: Params, gpus: int) -> None:
    """Check in a driver that the stage's models fit a cluster whose memory the stage itself can't see.

    Nothing is checked if a node doesn't answer in time, which is logged, or if the cluster's GPUs aren't all known.

    Args:
        gpus: the cluster's number of GPUs.
    Raises:
        ValueError: a process lacks memory; the message names it.
    """
    from rlhf_core.engines.ray.places import RoleLost, cluster_memory
    from rlhf_core.planning.preflight import preflight, runs_elsewhere, smallest

    if params.flow.preflight == "off" or not runs_elsewhere(stage, params):
        return
    try:
        machine = smallest(cluster_memory(params.cluster.start_timeout))
    except RoleLost as error:
        log.warning("preflight: can't check the memory of %s: %s", stage, error)
        return
    if len(machine.gpus) == gpus and (refusal := preflight(stage, params, machine)) is not None:
        raise ValueError(refusal)
