"""Messages between a stage and the driver of its Ray job: exit codes, heartbeat, and the reason of a refusal."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.process import beside
from rlhf_core.storage.node import job_storage
from rlhf_core.storage.work import BEAT_SECONDS, PULSE, REFUSAL

if TYPE_CHECKING:
    from rlhf_core.config import Params
    from rlhf_core.storage.work import JobStorage

log = logging.getLogger("rlhf")

# Exit codes of the driver, after sysexits.h, beside STOPPED_BY_SIGNAL. Any other code is a crash; a rerun may succeed.
REFUSED = 65  # EX_DATAERR: the job can't be done as described; a rerun would fail again
LOST = 75  # EX_TEMPFAIL: an actor that can't be replaced died or missed a deadline; a rerun resumes from the last checkpoint
FULL = 74  # EX_IOERR: a checkpoint can't be written, such as for lack of space


def pulse_file(work: Path) -> Path:
    """File of the driver's heartbeat in the job's folder."""
    return work / PULSE


def refuse(work: Path, error: BaseException) -> int:
    """Log why the job can't be done, and leave the reason for the stage. Returns the exit code."""
    log.error("%s", error)
    reason = " ".join(str(error).split())
    with contextlib.suppress(OSError):  # the log has the reason
        (work / REFUSAL).write_text(reason, encoding="utf-8")
        if (stored := job_storage()) is not None:
            stored.put_note(REFUSAL, reason.encode())
    return REFUSED


def forget_refusal(work: Path) -> None:
    """Remove the reason of an earlier driver."""
    with contextlib.suppress(OSError):
        (work / REFUSAL).unlink(missing_ok=True)
        if (stored := job_storage()) is not None:
            stored.remove_notes(REFUSAL)


def refusal_of(work: Path, stored: JobStorage | None = None) -> str:
    """The reason of a driver that exited with REFUSED, on one line.

    Args:
        stored: the job's part of the storage; None: it shares the folder with this machine.
    """
    with contextlib.suppress(OSError):
        reason = (work / REFUSAL).read_bytes() if stored is None else stored.note(REFUSAL)
        if reason:
            return reason.decode(errors="replace")
    return "expected to be able to train, got a refusal in its output; change what that names"


@contextlib.contextmanager
def beat(path: Path) -> Iterator[None]:
    """Write a heartbeat file every BEAT_SECONDS from a thread; it stops with the process, not while the main thread waits."""
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
    """In a driver: check that the stage's models fit a cluster that the stage itself can't look at. Nodes that don't answer in time are
    named in the log, and nothing is checked.

    Args:
        gpus: of the cluster.
    Raises:
        ValueError: naming the role that lacks memory.
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
