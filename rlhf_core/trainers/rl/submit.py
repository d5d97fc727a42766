"""The stage's side of an RL job: checks, the job's description, its submission to Ray, and the stage's metrics."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from rlhf_core.config import RlConfig, ScorerConfig, reordering_shown
from rlhf_core.data.schema import read_rows
from rlhf_core.environment import passed_on
from rlhf_core.paths import PREPARED, REWARD_MODEL, SFT_MODEL, TIMINGS
from rlhf_core.process import Interrupted
from rlhf_core.progress import STATUS
from rlhf_core.scorers.needs import check_scorers, model_folders, uses_own_reward_model
from rlhf_core.stage.files import has_labels, read_json, source_judges
from rlhf_core.stage.run import STOPPED_BY_SIGNAL, Stage, StageFailed, check_gate, steps_at_the_end
from rlhf_core.trainers.rl.job import PLACEMENT, REFUSED, RlJob, refusal_of

HEAD_GRACE = 5.0  # seconds of the stage's stop_grace in which the Ray head ends, after the job


class JobCrashed(RuntimeError):
    """The job or one of its actors died. A rerun resumes from the last checkpoint."""


def check_rewards(rl: RlConfig, gate: dict) -> str | None:
    """Check what the job needs for its rewards, before anything expensive starts.

    Returns:
        As check_gate.
    Raises:
        StageFailed: the chain's own reward model is used and did not pass its gate.
        ValueError: a reward model's folder, a label, a function or a demonstration is missing.
    """
    override = check_gate(gate) if uses_chain_reward_model(rl) else None
    check_scorers(rl.reward.scorers, reward_model=REWARD_MODEL, source_judges=source_judges(), has_labels=has_labels)
    if rl.ptx.coef > 0 and not ((PREPARED / "sft.parquet").exists() and read_rows(PREPARED, "sft", "train")):
        raise ValueError(f"rl.ptx.coef: expected 0 without demonstrations, got {rl.ptx.coef}; add a source with the use sft")
    return override


def uses_chain_reward_model(rl: RlConfig) -> bool:
    """Whether the chain's own reward model scores responses, or the critic starts from it."""
    return critic_starts_from_reward_model(rl) or uses_own_reward_model(rl.reward.scorers)


def critic_starts_from_reward_model(rl: RlConfig) -> bool:
    return rl.algorithm == "ppo" and rl.ppo.starts_from_reward_model


def submit_job(stage: Stage, output: Path) -> None:
    """Submit the job, or follow it if it already runs, and print its output.

    Raises:
        Interrupted: SIGTERM; the job has written its checkpoint.
        StageFailed: the job refused its input.
        JobCrashed: the job failed otherwise.
    """
    from rlhf_core.engines.ray_cluster import local_head, python_path, run_job
    from rlhf_core.models.folder import weight_files

    params = stage.params
    description = stage.scratch / "job.json"
    job = describe_job(stage, output)
    job.write(description)
    actors = params.rl.trainer.ranks + params.rl.rollout.engines
    with contextlib.ExitStack() as stack:
        address = params.cluster.address
        if address is None:
            head = local_head(
                cpus=max(actors, params.cluster.threads),
                start_timeout=params.cluster.start_timeout,
                weights=sum(path.stat().st_size for path in weight_files(Path(job.sft_model))),
                stop_grace=params.flow.stop_grace - HEAD_GRACE,
                keep_open=(stage.lock_descriptor,),
            )
            address = stack.enter_context(head)
        if stage.stop_requested:
            raise Interrupted
        driver = [sys.executable, "-m", "rlhf_core.trainers.rl.driver", str(description.resolve())]
        code = run_job(
            address,
            f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(driver)}",
            fingerprint=stage.fingerprint,
            environment={"PYTHONPATH": python_path(Path.cwd()), "PYTHONUNBUFFERED": "1", **passed_on()},
            start_timeout=params.cluster.start_timeout,
            silence_timeout=params.cluster.silence_timeout,
            pulse=job.pulse,
            on_output=print_output,
            stop_requested=lambda: stage.stop_requested,
        )
    print_output("", ended=True)
    if stage.stop_requested or code == STOPPED_BY_SIGNAL:
        raise Interrupted
    if code == REFUSED:
        raise StageFailed(f"RL job: {refusal_of(job)}")
    if code != 0:
        raise JobCrashed(f"RL job: expected exit code 0, got {code}; its output above ends with the reason; run the stage again to resume")


def print_output(text: str, *, ended: bool = False) -> None:
    """Print a piece of the job's output, which may end within a line. Without a reader (the flow was killed) the output is dropped, since
    the job still has to write its checkpoint.
    """
    try:
        STATUS.pass_on(reordering_shown(text))
        if ended:
            STATUS.end()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe_job(stage: Stage, output: Path) -> RlJob:
    params = stage.params
    rl = with_absolute_paths(params.rl)
    return RlJob(
        seed=params.seed,
        model=params.model,
        train_on=params.sft.train_on,
        train_on_thoughts=params.sft.train_on_thoughts,
        rl=rl,
        tracking=params.tracking,
        threads=params.cluster.threads,
        run_name=f"train_policy-{stage.fingerprint[:8]}",
        prepared=str(PREPARED.resolve()),
        sft_model=str(SFT_MODEL.resolve()),
        scorer_models={name: str(folder.resolve()) for name, folder in model_folders(rl.reward.scorers, REWARD_MODEL).items()},
        source_judges={name: absolute_function(judge) for name, judge in source_judges().items()},
        reward_model=str(REWARD_MODEL.resolve()) if critic_starts_from_reward_model(rl) else None,
        work=str(stage.scratch.resolve()),
        checkpoints=stage.store_settings(world_size=rl.trainer.ranks, zero_stage=rl.trainer.zero_stage),
        output=str(output.resolve()),
        timings=str((TIMINGS / "train_policy.csv").resolve()),
    )


def with_absolute_paths(rl: RlConfig) -> RlConfig:
    """Absolute paths of reward functions: an actor of the job may have another working directory."""

    def absolute(scorer: ScorerConfig) -> ScorerConfig:
        return scorer.model_copy(update={"path": absolute_function(scorer.path)}) if scorer.path else scorer

    scorers = [absolute(scorer) if scorer.kind == "function" else scorer for scorer in rl.reward.scorers]
    return rl.model_copy(update={"reward": rl.reward.model_copy(update={"scorers": scorers})})


def absolute_function(path: str) -> str:
    """`file.py:name` with the file's absolute path; other names of functions and judges as they are."""
    file, _, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else path


def final_figures(work: Path, rl: RlConfig) -> dict[str, Any]:
    """The stage's metrics: means over the last steps, the largest log-probability difference, the monitor's findings, the exported step
    and the actors' GPUs, if any.
    """
    import pandas as pd

    rows = pd.read_csv(work / "curves.csv")
    last = rows.tail(steps_at_the_end(len(rows)))
    means = ("score_mean", "kl_mean", "response_length", "entropy", "truncated_fraction", *(f"score_{s.name}" for s in rl.reward.scorers))
    means += tuple(f"disagreement_{s.name}" for s in rl.reward.scorers if s.members > 1)
    return {
        **{name: float(last[name].mean()) for name in means},
        "method": "rl",
        "algorithm": rl.algorithm,
        "steps": len(rows),
        "averaged_steps": len(last),
        "score_first_step": float(rows["score_mean"].iloc[0]),
        "logprob_difference_max": float(rows["logprob_difference"].max()),
        "monitor": read_json(work / "monitor.json"),
        **({f"best_{name}": value for name, value in read_json(work / "best.json").items()} if rl.evaluation.keep_best else {}),
        **({"gpus": read_json(work / PLACEMENT)} if (work / PLACEMENT).exists() else {}),
    }
