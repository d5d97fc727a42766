"""The driver of an RL job: starts its actors, and only then imports what the loop needs, which takes seconds too.

python -m rlhf_core.trainers.rl.driver <job.json>
"""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path

from rlhf_core.engines.ray_actors import RoleLost
from rlhf_core.environment import keep_visible, named
from rlhf_core.process import configure_process, show_own_log
from rlhf_core.progress import name_stage
from rlhf_core.trainers.rl.actors import Actors
from rlhf_core.trainers.rl.job import LOST, RlJob, beat, forget_refusal, refuse
from rlhf_core.trainers.rl.stop import Stop

log = logging.getLogger("rlhf")


def main() -> int:
    show_own_log()
    configure_process()
    stop = Stop()
    signal.signal(signal.SIGTERM, stop.ask)
    job = RlJob.read(Path(sys.argv[1]))
    forget_refusal(job)
    name_stage("train_policy")
    keep_visible(named() | ({"WANDB_API_KEY"} if job.tracking.wandb_project is not None else set()))
    try:
        with beat(job.pulse), Actors(job) as actors:
            signal.signal(signal.SIGTERM, stop.ask)  # once more: a process that connects to Ray gets Ray's handler, which ends it
            from rlhf_core.trainers.rl.loop import run

            return run(job, actors, stop)
    except ValueError as refused:  # more GPUs than the cluster has
        return refuse(job, refused)
    except RoleLost as lost:
        log.error("%s", lost)
        return LOST


if __name__ == "__main__":
    sys.exit(main())
