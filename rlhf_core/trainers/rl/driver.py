"""The driver of an RL job: starts the actors, and imports the loop's modules while they start.

python -m rlhf_core.trainers.rl.driver <job.json>
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rlhf_core.config import load_params
from rlhf_core.engines.ray.actors import ActorGroup, held
from rlhf_core.engines.ray.gpus import ReservedGpus, node_gpus
from rlhf_core.engines.ray.places import RoleLost, check_cpus, check_nodes, join_cluster, leave_cluster, node_cpus
from rlhf_core.engines.ray.processes import Place, by_node
from rlhf_core.environment import keep_visible, named
from rlhf_core.paths import processes_file
from rlhf_core.planning.placement import GpuPlacement, place, transfer_ways, unused_shares
from rlhf_core.process import STOPPED_BY_SIGNAL, configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.stage.job import LOST, beat, check_cluster, forget_refusal, refuse
from rlhf_core.storage.node import JobFiles, enter
from rlhf_core.storage.work import OUTPUTS
from rlhf_core.trainers.rl.groups import TrainerGroups
from rlhf_core.trainers.rl.job import PLACEMENT, RlJob, StepAbandoned, Stop

log = logging.getLogger("rlhf")


def main() -> int:
    show_own_log()
    configure_process()
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.request)
    stored = enter()
    job = RlJob.read(Path(sys.argv[1]))
    Path(job.work).mkdir(parents=True, exist_ok=True)
    forget_refusal(Path(job.work))
    name_stage("train_policy")
    keys = {"WANDB_API_KEY": job.tracking.wandb_project is not None, "RAY_AUTH_TOKEN": job.checks_cluster}
    keep_visible(named() | {name for name, used in keys.items() if used})
    try:
        with beat(job.pulse), contextlib.ExitStack() as stack, _silent_if_abandoned():
            with stop.interrupts():
                gpus = join_cluster()
                signal.signal(signal.SIGTERM, stop.request)  # again: Ray has installed a handler that prints a stack trace and exits
                if stored is not None:
                    stored.outputs[:] = [Path(job.work), Path(job.timings).parent]
                    stored.pull(OUTPUTS)  # curves up to the last checkpoint, from whichever node wrote them
                actors = stack.enter_context(Actors(job, gpus))  # writes PLACEMENT, after an older one was pulled
                with held(signal.SIGTERM):  # an import may swallow what its handler raises
                    from rlhf_core.trainers.rl.loop import run  # while the actors start
            code = run(job, actors, stop)
            if stored is not None:
                stored.push_outputs()
            return code
    except ValueError as refused:  # more GPUs than the cluster has
        return refuse(Path(job.work), refused)
    except RoleLost as lost:
        log.error("%s", lost)
        return LOST
    except StepAbandoned:
        log.info("rl: SIGTERM: stopped before all actors were ready, no state changed")
        return STOPPED_BY_SIGNAL


@contextlib.contextmanager
def _silent_if_abandoned() -> Iterator[None]:
    """What actors print to stderr isn't shown from a StepAbandoned on: Ray's workers that end as they start print stack traces."""
    try:
        yield
    except StepAbandoned:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (to the end of the process)
        raise


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
        self.take_turns = self._placement.takes_turns(job.rl)
        if not gpus:
            check_cpus(job.rl, node_cpus())
            for warning in unused_shares(job.rl):
                log.warning("%s", warning)
        if job.checks_cluster:
            params = load_params()
            check_nodes(JobFiles.read(), params.cluster.network_interface, timeout=job.rl.deadlines.start)
            check_cluster("train_policy", params, gpus)
        self.ways = transfer_ways(job.rl, self._placement)  # by which weights reach each engine
        _record(self._placement, self.ways, job)
        engines, ranks = job.rl.rollout.engines, job.rl.ranks
        started = f"{engines} rollout engine{'s' * (engines > 1)} ({job.rl.rollout.backend}) and {ranks} trainer rank{'s' * (ranks > 1)}"
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
        leave_cluster()

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
            "rlhf_core.engines.in_process:RolloutActor",
            rl.rollout.engines,
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
            },
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
                "adapters_alone": rl.lora is not None and set(self.ways) == {"gloo"},
            },
        )

    def _threads(self, *, among: int) -> int:
        """Threads of each of a role's actors. Without GPUs, engines and trainers that run at the same time share the cores."""
        together = 2 if self._job.rl.rollout.one_step_off_policy and not self._placement.gpus else 1
        return max(1, self._job.threads // together // among)


def _record(placement: GpuPlacement, ways: list[str], job: RlJob) -> None:
    """Write the placement into the job's folder, and log it if the cluster has GPUs."""
    if placement.gpus:
        log.info("rl: %s", placement.describe(job.rl))
    how = {"take_turns": placement.takes_turns(job.rl), "dispatch": job.rl.dispatch(on_gpu=placement.gpus > 0)}
    (Path(job.work) / PLACEMENT).write_text(json.dumps(placement.as_json() | how | {"weight_transfer": ways}))


if __name__ == "__main__":
    sys.exit(main())
