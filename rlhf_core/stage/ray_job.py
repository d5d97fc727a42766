"""Runs a stage's work as a Ray job: a local head or the configured cluster, submission, output, stop and exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rlhf_core.config import reordering_shown
from rlhf_core.environment import passed_on
from rlhf_core.process import PROCESS_ENVIRONMENT, STOPPED_BY_SIGNAL, Interrupted
from rlhf_core.progress import STATUS
from rlhf_core.stage.job import Job, pulse_file, refusal_of
from rlhf_core.stage.job_inputs import JobInputs
from rlhf_core.stage.reach import check_reach
from rlhf_core.stage.run import JobCrashed, Stage, StageRefused
from rlhf_core.stage.stored_job import StoredJob, uses_storage
from rlhf_core.storage.address import StorageFailed, StorageRefused
from rlhf_core.storage.work import OUTPUTS, REFUSED

log = logging.getLogger("rlhf")

DRIVER = "rlhf_core.stage.driver"  # module
REACHED = "reached"  # file of the scratch folder: the cluster was there when this work's first job was submitted
HEAD_GRACE = 5.0  # seconds of the stage's stop_grace in which the Ray head ends, after the job


def submit_job(
    stage: Stage,
    job: Job,
    *,
    subject: str,
    description: Path,
    cpus: int,
    model: Path | None = None,
    inputs: JobInputs | None = None,
    engines: Sequence[str] = (),
    results: Sequence[str] = (OUTPUTS,),
) -> None:
    """Submit a job, or follow it if it already runs, print its output, and wait for its end.

    Args:
        subject: what messages call the job, such as "RL job".
        description: file for the job's driver. A stage that runs again follows a live job of that path.
        cpus: CPUs that Ray counts for the job's actors.
        model: folder of a model whose weights go through Ray's object store; None: none do.
        inputs: inputs that nodes without the project's folder need besides the stage's dependencies.
        engines: modules that such nodes must have besides.
        results: sets of files that the job leaves in the storage (rlhf_core/storage/work.py).
    Raises:
        Interrupted: SIGTERM; the job has written its checkpoint.
        StageRefused: the job refused its input, or there is no such cluster.
        StorageRefused: there is no such storage.
        JobCrashed: the job failed otherwise, or the cluster or the storage failed.
    """
    from rlhf_core.engines.ray.cluster import forget_other_clusters, local_head, python_path, run_job
    from rlhf_core.models.folder import weight_files

    params = stage.params
    job.write(description)
    for name in forget_other_clusters():
        log.warning("%s: ignored; jobs run on the cluster of cluster.address, and on a Ray head of their own where that is null", name)
    with _cluster_errors(), contextlib.ExitStack() as stack:
        if params.cluster.address is not None:
            _check_first_time(stage)
        stored = StoredJob(stage) if uses_storage(params) else None
        address = params.cluster.address
        where = "on a Ray head of its own, which starts now" if address is None else f"on the Ray cluster at {address}"
        log.info("%s: %s %s", stage.name, subject, where)
        if address is None:
            head = local_head(
                cpus=max(cpus, params.cluster.threads),
                start_timeout=params.cluster.start_timeout,
                weights=0 if model is None else sum(path.stat().st_size for path in weight_files(model)),
                stop_grace=params.flow.stop_grace - HEAD_GRACE,
                keep_open=(stage.lock_descriptor,),
            )
            address = stack.enter_context(head)
        if stage.stop_requested:
            raise Interrupted
        environment = {
            "PYTHONUNBUFFERED": "1",
            **{name: os.environ[name] for name in PROCESS_ENVIRONMENT if name in os.environ},  # a node of a cluster inherits nothing
            **network(params.cluster.network_interface),
            **passed_on(),
        }
        code_folder: Path | None = None
        if stored is None:
            environment["PYTHONPATH"] = python_path(Path.cwd())
            command = [sys.executable, "-m", DRIVER, str(description.resolve())]
            entrypoint = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
        else:
            inputs = inputs or JobInputs()
            code_folder, files = stack.enter_context(stored.sent(inputs, description, job.params, engines))
            environment |= files
            entrypoint = f"exec python -m rlhf_core.stage.start_driver {shlex.join([stored.work.prefix, DRIVER, description.as_posix()])}"
        code = run_job(
            address,
            entrypoint,
            name=stage.fingerprint[:12],
            environment=environment,
            code=code_folder,
            start_timeout=params.cluster.start_timeout,
            silence_timeout=params.cluster.silence_timeout,
            pulse=pulse_file(stage.scratch) if stored is None else stored.pulse,
            on_output=print_output,
            stop_requested=lambda: stage.stop_requested,
        )
        print_output("", ended=True)
        if stored is not None:
            stored.take_back(results, complete=code == 0 and not stage.stop_requested)
            stage.at_success(stored.remove)
    if stage.stop_requested or code == STOPPED_BY_SIGNAL:
        raise Interrupted
    if code == REFUSED:
        raise StageRefused(f"{subject}: {refusal_of(stage.scratch, stored and stored.work)}")
    if code != 0:
        told = "its output above ends with the reason"
        raise JobCrashed(f"{subject}: expected exit code 0, got {code}; {told}; run the stage again to resume")


def _check_first_time(stage: Stage) -> None:
    """Check token and storage once for this work, and warn if the head doesn't answer, since the job then waits for it.

    Raises:
        StageRefused: the token or the storage is refused.
        StorageFailed: the storage fails otherwise, or is late.
    """
    from rlhf_core.engines.ray.cluster import ClusterError, HeadRefused

    reached, cluster = stage.scratch / REACHED, stage.params.cluster
    if reached.exists():
        return
    try:
        check_reach(cluster.address, cluster.storage)
    except (HeadRefused, StorageRefused) as error:
        raise StageRefused(str(error)) from error
    except ClusterError as error:
        log.warning("%s; waiting for it up to %.0f s", error, cluster.silence_timeout)
        return
    reached.touch()


@contextlib.contextmanager
def _cluster_errors() -> Iterator[None]:
    """Turn a failure of the cluster or the storage into JobCrashed; a StorageRefused stays as it is."""
    from rlhf_core.engines.ray.cluster import ClusterError

    try:
        yield
    except StorageRefused:
        raise
    except (ClusterError, StorageFailed) as error:
        raise JobCrashed(str(error)) from error


def network(interface: str | None) -> dict[str, str]:
    """Return the environment of a job whose processes connect over a network interface; None: NCCL and gloo choose one."""
    return {} if interface is None else {"NCCL_SOCKET_IFNAME": interface, "GLOO_SOCKET_IFNAME": interface}


def print_output(text: str, *, ended: bool = False) -> None:
    """Print a piece of the job's output, which may end within a line.

    If nobody reads the output, since the flow was killed, it is dropped: the job still has to write its checkpoint.
    """
    try:
        STATUS.pass_on(reordering_shown(text))
        if ended:
            STATUS.end()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
