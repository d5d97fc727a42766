"""The driver of an RL job: starts the actors, and imports the loop's modules while they start.

python -m rlhf_core.trainers.rl.driver <job.json>
"""

from __future__ import annotations

import json
import logging
import signal
import sys
from pathlib import Path

from rlhf_core.config import load_params
from rlhf_core.engines.ray_actors import ActorGroup, RoleLost, join_cluster, leave_cluster
from rlhf_core.environment import keep_visible, named
from rlhf_core.planning.placement import Placement, place
from rlhf_core.process import configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.job import LOST, beat, check_cluster, forget_refusal, refuse
from rlhf_core.trainers.rl.job import PLACEMENT, RlJob, Stop

log = logging.getLogger("rlhf")


def main() -> int:
    show_own_log()
    configure_process()
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.request)
    job = RlJob.read(Path(sys.argv[1]))
    forget_refusal(Path(job.work))
    name_stage("train_policy")
    keep_visible(named() | ({"WANDB_API_KEY"} if job.tracking.wandb_project is not None else set()))
    try:
        with beat(job.pulse), Actors(job) as actors:
            signal.signal(signal.SIGTERM, stop.request)  # again: connecting to Ray installs Ray's handler, which ends the process
            from rlhf_core.trainers.rl.loop import run

            return run(job, actors, stop)
    except ValueError as refused:  # more GPUs than the cluster has
        return refuse(Path(job.work), refused)
    except RoleLost as lost:
        log.error("%s", lost)
        return LOST


class Actors:
    """Starts the processes of rollout engines and trainer ranks; `Workers` waits for them.

    Raises:
        ValueError: the job asks for more GPUs than the cluster has. Nothing is started.
        RoleLost: an actor can't be placed.
    """

    def __init__(self, job: RlJob):
        gpus = join_cluster()
        placement = place(job.rl, gpus)
        if job.checks_cluster:
            check_cluster("train_policy", load_params(), gpus)
        _record(placement, job)
        if placement.gpus:  # ranks first: their larger shares would find no room between smaller ones
            self.trainers = _trainer_ranks(job, placement)
            self.rollouts = _rollout_engines(job, placement)
        else:
            self.rollouts = _rollout_engines(job, placement)  # first: they start slowest
            self.trainers = _trainer_ranks(job, placement)

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainers.close()
        self.rollouts.close()
        leave_cluster()


def _record(placement: Placement, job: RlJob) -> None:
    """Log the placement and write it into the job's folder, if the cluster has GPUs."""
    path = Path(job.work) / PLACEMENT
    if placement.gpus:
        log.info("rl: %s", placement.describe(job.rl))
        path.write_text(json.dumps(placement.as_json(job.rl)))
    else:
        path.unlink(missing_ok=True)


def _rollout_engines(job: RlJob, placement: Placement) -> ActorGroup:
    rl = job.rl
    threads = _threads(job, among=rl.rollout.engines, placement=placement)
    return ActorGroup(
        "rollout",
        "rlhf_core.engines.in_process:RolloutActor",
        rl.rollout.engines,
        cpus=1,
        gpus=placement.per_engine,
        threads=threads,
        start_deadline=rl.deadlines.start,
        kwargs={
            "backend": rl.rollout.backend,
            "model_path": job.sft_model,
            "seed": job.seed,
            "max_length": job.model.max_length,
            "dtype": job.model.dtype,
            "kv_cache_gib": rl.rollout.kv_cache_gib,
            "max_concurrent_sequences": rl.rollout.max_concurrent_sequences,
            "threads": threads,
            "trust_remote_code": job.model.trust_remote_code,
            "gpu_memory_fraction": rl.rollout.gpu_memory_fraction * (placement.per_engine or 1.0),
            "shares_gpu": placement.shares_engine_gpus,
            "reads_text": bool(rl.rollout.stop),
        },
        together=False,
    )


def _trainer_ranks(job: RlJob, placement: Placement) -> ActorGroup:
    rl = job.rl
    return ActorGroup(
        "trainer",
        "rlhf_core.trainers.rl.rank:TrainerRank",
        rl.trainer.ranks,
        cpus=1,
        gpus=placement.per_rank,
        threads=_threads(job, among=rl.trainer.ranks, placement=placement),
        start_deadline=rl.deadlines.start,
        kwargs={"world_size": rl.trainer.ranks, "job": job},
    )


def _threads(job: RlJob, *, among: int, placement: Placement) -> int:
    """Threads of each of a role's actors. Without GPUs, engines and trainers that run at the same time share the cores."""
    together = 2 if job.rl.rollout.one_step_off_policy and not placement.gpus else 1
    return max(1, job.threads // together // among)


if __name__ == "__main__":
    sys.exit(main())
