"""Launches an RL job: starts its actors, and imports the loop's modules while they start."""

from __future__ import annotations

import contextlib
import json
import logging
import signal
from dataclasses import asdict
from pathlib import Path

from rlhf_core.engines.ray.actors import ActorGroup
from rlhf_core.engines.ray.gpus import ReservedGpus, node_gpus
from rlhf_core.engines.ray.places import check_cpus, node_cpus
from rlhf_core.engines.ray.processes import Place, by_node
from rlhf_core.paths import processes_file
from rlhf_core.planning.placement import GpuPlacement, place, transfer_ways, unused_shares
from rlhf_core.process import Stop, held
from rlhf_core.stage.job import Job, named_object
from rlhf_core.stage.scratch import is_recorded
from rlhf_core.storage.node import job_storage
from rlhf_core.storage.work import OUTPUTS
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.job import PLACEMENT, RlJob

log = logging.getLogger("rlhf")


def launch(job: Job, gpus: int, stop: Stop) -> int:
    """Start the actors, and train, in a job's driver. Returns the exit code.

    Raises:
        ValueError: the job asks for more than the cluster has.
        RoleLost: an actor can't be placed, or one that can't be replaced died or missed a deadline.
        StepAbandoned: SIGTERM before all actors were ready.
    """
    (rl_job,) = job.arguments
    stored = job_storage()
    with contextlib.ExitStack() as stack:
        with stop.interrupts():
            if stored is not None:
                stored.outputs[:] = [job.work, Path(rl_job.timings).parent]
                stored.pull(OUTPUTS)  # curves up to the last checkpoint, from whichever node wrote them
            actors = stack.enter_context(Actors(rl_job, gpus))  # writes PLACEMENT, after an older one was pulled
            with held(signal.SIGTERM):  # an import may swallow what its handler raises
                run = named_object(job.function)  # while the actors start
        code = run(rl_job, actors, stop)
        if stored is not None:
            stored.push_outputs()
        return code


class Actors:
    """Starts the processes of rollout engines and trainer ranks; `Workers` waits for them.

    Args:
        gpus: of the cluster, which this process has joined.
    Raises:
        ValueError: the job asks for more than the cluster has. Nothing is started.
        RoleLost: an actor can't be placed.
    """

    def __init__(self, job: RlJob, gpus: int):
        self._job, self._placement = job, place(job.rl, gpus, node_gpus())
        self._engines = 0 if is_recorded(Path(job.work)) else job.rl.rollout.engines
        self.take_turns = self._engines > 0 and self._placement.takes_turns(job.rl)
        if not gpus:
            check_cpus(job.rl, node_cpus())
            for warning in unused_shares(job.rl):
                log.warning("%s", warning)
        self.ways = transfer_ways(job.rl, self._placement)  # by which weights reach each engine
        _record(self._placement, self.ways, job)
        engines, ranks = self._engines, job.rl.ranks
        started = f"{engines} rollout engine{'s' * (engines != 1)} ({job.rl.rollout.backend}) and {ranks} trainer rank{'s' * (ranks > 1)}"
        log.info("rl: starting %s; waiting until all have loaded their models", started)
        self._reserved = ReservedGpus(self._placement, deadline=job.rl.deadlines.start)
        self.rollouts = self._rollout_engines()  # first: they start slowest
        names = [f"trainer.{group.name}" if len(job.rl.role_groups) > 1 else "trainer" for group in job.rl.role_groups]
        self.trainers = TrainerGroups(job.rl, [self._trainer_ranks(number, name) for number, name in enumerate(names)])

    def __enter__(self) -> Actors:
        return self

    def __exit__(self, *_: object) -> None:
        self.trainers.close()
        self.rollouts.close()
        self._reserved.release()

    def check_places(self, *, engines: bool) -> None:
        """Check, on a cluster with GPUs, that no two processes share one that the placement gives to one.

        Args:
            engines: look at the rollout engines too, which start more slowly than the ranks; log and record which process is where.
        """
        ranks, of_engines = [group.actors.places() for group in self.trainers.all], self.rollouts.places() if engines else None
        self._reserved.check(ranks, of_engines)
        if of_engines is not None:
            found = {name: at for names in (of_engines, *ranks) for name, at in names.items()}
            for line in by_node(found):
                log.info("rl: on %s", line)
            self._record_places(found)

    def _record_places(self, found: dict[str, Place]) -> None:
        path = processes_file(Path(self._job.timings))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({name: asdict(at) for name, at in found.items()}, indent=1))

    def _rollout_engines(self) -> ActorGroup:
        job, rl, placement = self._job, self._job.rl, self._placement
        threads = self._threads(among=rl.rollout.engines)
        return ActorGroup(
            "rollout",
            "rlhf_core.engines.rollout.open:RolloutActor",
            self._engines,
            cpus=1 if placement.gpus else rl.rollout.tensor_parallel_size,  # a GPU's bundle has them for each of its processes
            bundles=self._reserved.of_engines(),
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
                "gpu_memory_fraction": rl.rollout.gpu_memory_fraction * placement.engine_share(rl),
                "shares_gpu": placement.shares_engine_gpus or self.take_turns,
                "sleeps": self.take_turns,
                "reads_text": bool(rl.rollout.stop),
                "tensor_parallel_size": rl.rollout.tensor_parallel_size,
                "prefix_caching": rl.caches_prefixes(job.model.max_length, on_gpu=placement.gpus > 0),
                "enforce_eager": rl.rollout.enforce_eager,
                "weight_transfer": self.ways,
                "quantization": rl.rollout.quantization,
                "prepared": None if job.model.vision is None else job.prepared,
            },
            watched=rl.rollout.samples_freely,
            together=False,
        )

    def _trainer_ranks(self, number: int, name: str) -> ActorGroup:
        job, rl = self._job, self._job.rl
        group = rl.role_groups[number]
        return ActorGroup(
            name,
            "rlhf_core.trainers.rl.rank:TrainerRank",
            group.ranks,
            cpus=1,
            bundles=self._reserved.of_ranks(number),
            threads=self._threads(among=rl.ranks),
            start_deadline=rl.deadlines.start,
            kwargs={
                "world_size": group.ranks,
                "job": job,
                "roles": group.roles,
                "adapters_alone": (rl.lora is not None or job.model.vision == "frozen") and set(self.ways) == {"gloo"},
            },
        )

    def _threads(self, *, among: int) -> int:
        """Return the threads of each of a role's actors. Without GPUs, engines and trainers that run at the same time share the cores."""
        together = 2 if self._job.rl.rollout.max_lag and not self._placement.gpus else 1
        return max(1, self._job.threads // together // among)


def _record(placement: GpuPlacement, ways: list[str], job: RlJob) -> None:
    """Write the placement into the job's folder, and log it if the cluster has GPUs."""
    if placement.gpus:
        log.info("rl: %s", placement.describe(job.rl))
    resolved = {"take_turns": placement.takes_turns(job.rl), "dispatch": job.rl.dispatch(on_gpu=placement.gpus > 0)}
    (Path(job.work) / PLACEMENT).write_text(json.dumps(placement.as_json() | resolved | {"weight_transfer": ways}))
