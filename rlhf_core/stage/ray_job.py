"""Runs a stage's work as a Ray job: a local head or the configured cluster, submission, output, stop and exit code."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.config import Params, reordering_shown
from rlhf_core.config.run import ClusterConfig
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
    from rlhf_core.engines.ray.cluster import forget_other_clusters, run_job

    cluster = stage.params.cluster
    job.write(description)
    for name in forget_other_clusters():
        log.warning("%s: ignored; jobs run on the cluster of cluster.address, and on a Ray head of their own where that is null", name)
    with _cluster_errors(), contextlib.ExitStack() as stack:
        if cluster.address is not None:
            _check_first_time(stage)
        stored = StoredJob(stage) if uses_storage(stage.params) else None
        log.info("%s: %s %s", stage.name, subject, _where(cluster.address))
        address = cluster.address or stack.enter_context(_own_head(stage, cpus, model))
        if stage.stop_requested:
            raise Interrupted
        if stored is None:
            start = _start_here(description)
        else:
            start = stack.enter_context(_start_elsewhere(stored, inputs or JobInputs(), description, job.params, engines))
        code = run_job(
            address,
            start.entrypoint,
            name=stage.fingerprint[:12],
            environment=_environment(cluster) | start.environment,
            code=start.code,
            start_timeout=cluster.start_timeout,
            silence_timeout=cluster.silence_timeout,
            pulse=pulse_file(stage.scratch) if stored is None else stored.pulse,
            on_output=print_output,
            stop_requested=lambda: stage.stop_requested,
        )
        print_output("", ended=True)
        if stored is not None:
            stored.take_back(results, complete=code == 0 and not stage.stop_requested)
            stage.at_success(stored.remove)
    _check_end(stage, code, subject, stored)


def _where(address: str | None) -> str:
    return "on a Ray head of its own, which starts now" if address is None else f"on the Ray cluster at {address}"


def _own_head(stage: Stage, cpus: int, model: Path | None) -> contextlib.AbstractContextManager[str]:
    """Return the context of a Ray head on this machine, which yields its address. Arguments as for `submit_job`."""
    from rlhf_core.engines.ray.cluster import local_head
    from rlhf_core.models.folder import weight_files

    cluster = stage.params.cluster
    return local_head(
        cpus=max(cpus, cluster.threads),
        start_timeout=cluster.start_timeout,
        weights=0 if model is None else sum(path.stat().st_size for path in weight_files(model)),
        stop_grace=stage.params.flow.stop_grace - HEAD_GRACE,
        keep_open=(stage.lock_descriptor,),
    )


@dataclass(frozen=True)
class _Start:
    """How Ray starts the job's driver.

    entrypoint: a shell command. environment: of all of the job's processes. code: folder of the code that Ray brings to the nodes; None:
        nodes see the project's folder.
    """

    entrypoint: str
    environment: dict[str, str]
    code: Path | None = None


def _start_here(description: Path) -> _Start:
    """Return how to start a driver in the project's folder."""
    from rlhf_core.engines.ray.cluster import python_path

    command = [sys.executable, "-m", DRIVER, str(description.resolve())]
    return _Start(f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}", {"PYTHONPATH": python_path(Path.cwd())})


@contextlib.contextmanager
def _start_elsewhere(stored: StoredJob, inputs: JobInputs, description: Path, params: Params, engines: Sequence[str]) -> Iterator[_Start]:
    """Write the job's inputs into the storage, and yield how to start a driver on a node that doesn't see the project's folder."""
    with stored.sent(inputs, description, params, engines) as (code, environment):
        arguments = [stored.work.prefix, DRIVER, description.as_posix()]
        yield _Start(f"exec python -m rlhf_core.stage.start_driver {shlex.join(arguments)}", environment, code)


def _environment(cluster: ClusterConfig) -> dict[str, str]:
    """Return the environment of a job's processes: a node of a cluster inherits nothing from this process."""
    inherited = {name: os.environ[name] for name in PROCESS_ENVIRONMENT if name in os.environ}
    return {"PYTHONUNBUFFERED": "1", **inherited, **network(cluster.network_interface), **passed_on()}


def _check_end(stage: Stage, code: int, subject: str, stored: StoredJob | None) -> None:
    """Raise as `submit_job` does unless the job's driver exited with 0 and the stage wasn't told to stop."""
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
