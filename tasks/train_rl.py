"""Stage train_rl: the policy, trained by a Ray job on a cluster that is configured or on a head of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path

from tasks.stage import (
    METRICS,
    PLOTS,
    POLICY_MODEL,
    PREPARED,
    REWARD_MODEL,
    SFT_MODEL,
    STOPPED_BY_SIGNAL,
    TIMINGS,
    Stage,
    StageFailed,
    StageStopped,
    publish,
    read_json,
    write_json,
)

TAIL = 20  # steps over which the final figures are averaged


class JobCrashed(RuntimeError):
    """The job, or an actor of it, died. Its last checkpoint counts."""


def main() -> None:
    with Stage("train_rl") as stage:
        gate = read_json(METRICS / "gate.json")
        if not gate["passed"]:
            raise StageFailed(f"reward model: expected one that passed the gate, got a rejected one; {gate['message']}")
        output = stage.scratch / "policy"
        run(stage, output)
        publish(output, POLICY_MODEL)
        PLOTS.mkdir(exist_ok=True)
        shutil.copy(stage.scratch / "curves.csv", PLOTS / "train_rl.csv")
        write_json(METRICS / "train_rl.json", final_figures(stage.scratch / "curves.csv", stage.params.rl.algorithm))


def run(stage: Stage, output: Path) -> None:
    """Submit the job, or follow it where it already runs, and pass its output on."""
    from rlhf_core.engines.ray_cluster import local_head, run_job
    from rlhf_core.trainers.rl_job import REFUSED

    params = stage.params
    description = stage.scratch / "job.json"
    describe(stage, output).write(description)
    actors = params.rl.trainer.ranks + params.rl.rollout.engines
    with contextlib.ExitStack() as stack:
        address = params.cluster.address
        if address is None:
            cpus, start_timeout = max(actors, params.cluster.threads), params.cluster.start_timeout
            head = local_head(cpus=cpus, start_timeout=start_timeout, keep_open=(stage.lock_descriptor,))
            address = stack.enter_context(head)
        driver = [sys.executable, "-m", "rlhf_core.trainers.rl", str(description.resolve())]
        code = run_job(
            address,
            f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(driver)}",
            fingerprint=stage.fingerprint,
            environment={"PYTHONPATH": os.getcwd(), "PYTHONUNBUFFERED": "1"},
            start_timeout=params.cluster.start_timeout,
            on_output=lambda text: print(text, end="", flush=True),
            stop_requested=lambda: stage.stop_requested,
        )
    if stage.stop_requested or code == STOPPED_BY_SIGNAL:
        raise StageStopped
    if code == REFUSED:
        raise StageFailed("RL job: expected to be able to train, got the refusal above; change what it names")
    if code != 0:
        raise JobCrashed(f"RL job: expected exit code 0, got {code}; its output above ends with the reason; run it again to go on")


def describe(stage: Stage, output: Path):
    from rlhf_core.trainers.rl_job import RlJob

    params = stage.params
    return RlJob(
        seed=params.seed,
        model=params.model,
        rl=params.rl,
        tracking=params.tracking,
        threads=params.cluster.threads,
        run_name=f"train_rl-{stage.fingerprint[:8]}",
        prepared=str(PREPARED.resolve()),
        sft_model=str(SFT_MODEL.resolve()),
        reward_model=str(REWARD_MODEL.resolve()),
        work=str(stage.scratch.resolve()),
        output=str(output.resolve()),
        timings=str((TIMINGS / "train_rl.csv").resolve()),
    )


def final_figures(curves: Path, algorithm: str) -> dict[str, float | int | str]:
    """Means over the last steps, and the largest log-probability difference of the whole run."""
    import pandas as pd

    rows = pd.read_csv(curves)
    last = rows.tail(TAIL)
    means = {name: float(last[name].mean()) for name in ("score_mean", "kl_mean", "response_length", "entropy", "cut_off_fraction")}
    return {
        **means,
        "algorithm": algorithm,
        "steps": len(rows),
        "score_first_step": float(rows["score_mean"].iloc[0]),
        "logprob_difference_max": float(rows["logprob_difference"].max()),
    }


if __name__ == "__main__":
    main()
