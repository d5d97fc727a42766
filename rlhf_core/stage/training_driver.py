"""The driver of a job on ranks, training or sampling and scoring: starts the ranks, passes a stop on to them, and reports how they ended.

python -m rlhf_core.stage.training_driver <job.pkl>
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.config import number_of
from rlhf_core.engines.ray.places import RoleLost, check_nodes, join_cluster, leave_cluster
from rlhf_core.engines.ray.train import RankFailed, RankGroup, run_on_ranks
from rlhf_core.environment import keep_visible, of_stage
from rlhf_core.process import STOPPED_BY_SIGNAL, configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.job import FULL, LOST, beat, check_cluster, forget_refusal, pulse_file, refuse
from rlhf_core.stage.training import TrainJob
from rlhf_core.storage.node import JobFiles, enter, job_storage
from rlhf_core.storage.work import DONE, STOP

log = logging.getLogger("rlhf")


def main() -> int:
    show_own_log()
    configure_process()
    description = Path(sys.argv[1])
    stored = enter()
    job = TrainJob.read(description)
    enter(job.root)
    job.work.mkdir(parents=True, exist_ok=True)
    forget_refusal(job.work)
    for left_over in (job.stop_file, job.result_file):
        left_over.unlink(missing_ok=True)
    if stored is not None:
        stored.remove_notes(STOP, DONE)
    _stop_ranks_on_sigterm(job)
    name_stage(job.stage)
    keep_visible(of_stage(job.params, job.stage, os.environ), named=job.params.flow.environment)
    with beat(pulse_file(job.work)):
        try:
            return _run(job, description)
        except ValueError as refused:
            return refuse(job.work, refused)
        except RankFailed as failed:
            return _code_of(failed, job)
        except RoleLost as lost:
            log.error("%s", lost)
            return LOST
        finally:
            leave_cluster()


def _stop_ranks_on_sigterm(job: TrainJob) -> None:
    def stop(*_: object) -> None:
        job.stop_file.touch()
        if (stored := job_storage()) is not None:  # in a thread, since this one may be within a call to the storage
            threading.Thread(target=stored.put_note, args=(STOP, b""), daemon=True).start()

    signal.signal(signal.SIGTERM, stop)


def _run(job: TrainJob, description: Path) -> int:
    """
    Raises:
        ValueError: the cluster has fewer GPUs than ranks, or too little memory.
        RankFailed: see `run_on_ranks`.
    """
    gpus = join_cluster(output=False)
    _stop_ranks_on_sigterm(job)  # again: connecting to Ray installs Ray's handler, which ends the process
    if 0 < gpus < job.ranks:
        raise ValueError(
            f"ranks (training.ranks, cluster.inference_ranks): expected at most the cluster's {number_of(gpus, 'GPU')}, one for each rank, "
            f"got {job.ranks}; lower it or add nodes"
        )
    cluster = job.params.cluster
    if cluster.address is not None:
        check_nodes(JobFiles.read(), cluster.network_interface, timeout=cluster.start_timeout)
    check_cluster(job.stage, job.params, gpus)
    group = RankGroup(
        job.ranks,
        gpus=gpus > 0,
        threads=job.threads_of_rank,
        folder=(job.work / "ranks").absolute(),
        start_timeout=cluster.start_timeout,
        rank_timeout=cluster.rank_timeout,
        stop_requested=job.stop_file.exists,
    )
    log.info("%s: starting %d ranks; waiting until all have joined, then each loads its model", job.stage, job.ranks)
    stored = job_storage()
    run_on_ranks("rlhf_core.stage.training:run_rank", str(description if stored else description.resolve()), group)
    finished = job.result_file.exists() if stored is None else stored.note(DONE) is not None
    return 0 if finished else STOPPED_BY_SIGNAL


def _code_of(failed: RankFailed, job: TrainJob) -> int:
    """The exit code after a rank's failure, which is logged."""
    if isinstance(failed.cause, ValueError | FileNotFoundError):
        return refuse(job.work, failed.cause)
    if isinstance(failed.cause, SaveFailed):
        log.error("%s", failed.cause)
        return FULL
    log.error("%s%s", failed, f"\n{failed.traceback}" if failed.traceback else "")
    return LOST


if __name__ == "__main__":
    sys.exit(main())
