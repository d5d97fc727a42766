"""The actors of an RL job, started by a process that has imported nothing yet but Ray."""

from __future__ import annotations

from rlhf_core.engines.ray_actors import ActorGroup, join_cluster, leave_cluster
from rlhf_core.trainers.rl_job import RlJob


class Actors:
    """Rollout engines and trainer ranks; their processes start here, and `Workers` waits for them.

    Raises:
        RoleLost: an actor can't be placed.
    """

    def __init__(self, job: RlJob):
        has_gpu = join_cluster()
        self.rollouts = _rollout_engines(job, has_gpu=has_gpu)  # first, since they take the longest
        self.trainers = _trainer_ranks(job, has_gpu=has_gpu)

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainers.close()
        self.rollouts.close()
        leave_cluster()


def _rollout_engines(job: RlJob, *, has_gpu: bool) -> ActorGroup:
    rl = job.rl
    threads = _threads(job, among=rl.rollout.engines, has_gpu=has_gpu)
    return ActorGroup(
        "rollout",
        "rlhf_core.engines.in_process:RolloutActor",
        rl.rollout.engines,
        cpus=1,
        gpus=rl.rollout.gpus_per_engine if has_gpu else 0,
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
            "gpu_memory_fraction": rl.rollout.gpu_memory_fraction,
            "reads_text": bool(rl.rollout.stop),
        },
        together=False,
    )


def _trainer_ranks(job: RlJob, *, has_gpu: bool) -> ActorGroup:
    rl = job.rl
    return ActorGroup(
        "trainer",
        "rlhf_core.trainers.rl_rank:TrainerRank",
        rl.trainer.ranks,
        cpus=1,
        gpus=rl.trainer.gpus_per_rank if has_gpu else 0,
        threads=_threads(job, among=rl.trainer.ranks, has_gpu=has_gpu),
        start_deadline=rl.deadlines.start,
        kwargs={"world_size": rl.trainer.ranks, "job": job},
    )


def _threads(job: RlJob, *, among: int, has_gpu: bool) -> int:
    """Of each of a role's actors. Without a GPU, engines and trainers that work at the same time share the cores."""
    together = 2 if job.rl.rollout.one_step_off_policy and not has_gpu else 1
    return max(1, job.threads // together // among)
