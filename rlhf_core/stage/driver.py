"""The driver of a job: joins the cluster, checks its nodes, launches the job, and tells the stage how it ended.

python -m rlhf_core.stage.driver <description>
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.engines.ray.places import RoleLost, check_nodes, join_cluster, leave_cluster
from rlhf_core.engines.ray.ranks import RankFailed
from rlhf_core.environment import keep_visible
from rlhf_core.process import STOPPED_BY_SIGNAL, StepAbandoned, Stop, configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.job import FULL, LOST, Job, beat, check_cluster, forget_refusal, named_object, pulse_file, refuse
from rlhf_core.storage.node import JobFiles, enter

log = logging.getLogger("rlhf")


def main() -> int:
    show_own_log()
    configure_process()
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.request)
    enter()
    job = Job.read(Path(sys.argv[1]))
    enter(job.root)
    job.work.mkdir(parents=True, exist_ok=True)
    forget_refusal(job.work)
    name_stage(job.stage)
    keep_visible(job.visible, named=job.params.environment)
    try:
        with beat(pulse_file(job.work)), _silent_if_abandoned(), _joined(job, stop) as gpus:
            return named_object(job.launch)(job, gpus, stop)
    except (ValueError, FileNotFoundError) as refused:
        return refuse(job.work, refused)
    except RankFailed as failed:
        return _code_of(failed, job)
    except SaveFailed as error:
        log.error("%s", error)
        return FULL
    except RoleLost as lost:
        log.error("%s", lost)
        return LOST
    except StepAbandoned:
        log.info("%s: stopped before all processes of the job were ready, no state changed", job.stage)
        return STOPPED_BY_SIGNAL


@contextlib.contextmanager
def _joined(job: Job, stop: Stop) -> Iterator[int]:
    """Connect to the cluster, and on a configured one check the nodes. Yields the cluster's number of GPUs.

    Raises:
        ValueError: a node lacks a package, the network's interface or memory.
        RoleLost: a node doesn't answer.
        StepAbandoned: a stop was requested.
    """
    cluster = job.params.cluster
    try:
        with stop.interrupts():
            gpus = join_cluster(output=job.actor_output)
            signal.signal(signal.SIGTERM, stop.request)  # again: Ray has installed a handler that prints a stack trace and exits
            if cluster.address is not None:
                check_nodes(JobFiles.read(), cluster.network_interface, timeout=cluster.start_timeout)
                check_cluster(job.stage, job.params, gpus)
        yield gpus
    finally:
        leave_cluster()


@contextlib.contextmanager
def _silent_if_abandoned() -> Iterator[None]:
    """Drop what is printed to stderr after a StepAbandoned: Ray's workers that end while they start print stack traces."""
    try:
        yield
    except StepAbandoned:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)
        raise


def _code_of(failed: RankFailed, job: Job) -> int:
    """Log a rank's error and return the driver's exit code."""
    if isinstance(failed.cause, ValueError | FileNotFoundError):
        return refuse(job.work, failed.cause)
    if isinstance(failed.cause, SaveFailed):
        log.error("%s", failed.cause)
        return FULL
    log.error("%s", failed)
    return LOST


if __name__ == "__main__":
    sys.exit(main())
