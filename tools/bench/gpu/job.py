"""Runs an RL job's driver with a clock and records all differences between engine and trainer: python -m tools.bench.gpu.job JOB.pkl

The job saves no last checkpoint and no policy, which would take longer than the steps.

Writes seen.json into the job's folder: the times at which its steps ended, {"ends": [...]}, and of each step the sizes of the differences
between the engine's and the trainer's log-probabilities of the sampled tokens, {"mismatch": [{"mean": ..., "p99": ..., ...}, ...]}.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.stage.job import Job
from rlhf_core.trainers.rl.job import RlJob
from tools.bench.driver import start_actors

if TYPE_CHECKING:
    import torch

    from rlhf_core.trainers.rl.driver import Actors

SEEN = "seen.json"
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


def main() -> int:
    path = Path(sys.argv[1])
    from rlhf_core.stage.driver import main as drive  # with Ray, which must not be in a process that is yet to start a head
    from rlhf_core.trainers.rl import driver

    ends: list[float] = []
    mismatch: dict[int, dict[str, float]] = {}
    driver.Actors = partial(start, driver.Actors, ends, mismatch)
    code = drive()
    seen = {"ends": ends, "mismatch": [mismatch[step] for step in sorted(mismatch)]}
    (Job.read(path).work / SEEN).write_text(json.dumps(seen))
    return code


def start(actors_class: type[Actors], ends: list[float], mismatch: dict[int, dict[str, float]], job: RlJob, gpus: int) -> Actors:
    """Start the job's actors so that the loop records the ends of its steps and what it compares, and saves nothing."""
    actors = start_actors(actors_class, lambda: ends.append(time.perf_counter()), job, gpus)
    from rlhf_core.trainers.rl import loop

    check = loop.check_logprobs

    def note_and_check(batch, sampler_logprobs, config, *, step: int, **options: Any) -> float:
        mask = batch.response_mask.clone()
        mask[:, : config.rollout.min_new_tokens] = False
        mismatch[step] = sizes((batch.rollout_logprobs - sampler_logprobs)[mask])  # a step's last comparison counts
        return check(batch, sampler_logprobs, config, step=step, **options)

    loop.check_logprobs = note_and_check
    loop.is_due = lambda *_: False  # no checkpoint; these jobs have no evaluation
    loop.export = lambda *_: None
    return actors


def sizes(differences: torch.Tensor) -> dict[str, float]:
    """Return mean, quantiles and maximum of the absolute differences [N], with N at least 1."""
    ordered = differences.abs().double().sort().values
    at = {name: float(ordered[min(len(ordered) - 1, int(q * len(ordered)))]) for name, q in QUANTILES.items()}
    return {"mean": float(ordered.mean()), **at, "max": float(ordered[-1])}


if __name__ == "__main__":
    sys.exit(main())
