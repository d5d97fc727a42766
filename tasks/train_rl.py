"""Stage train_policy: the policy, trained by a Ray job on a cluster that is configured or on a head of its own."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rlhf_core.config import RlConfig, ScorerConfig, reordering_shown
from rlhf_core.data.schema import read_rows
from rlhf_core.environment import passed_on
from rlhf_core.paths import METRICS, PLOTS, POLICY_MODEL, PREPARED, REWARD_MODEL, SFT_MODEL, TIMINGS
from rlhf_core.process import Interrupted
from rlhf_core.progress import STATUS
from rlhf_core.stage.files import has_labels, publish_model, read_json, source_judges, write_json
from rlhf_core.stage.run import STOPPED_BY_SIGNAL, Stage, StageFailed, check_gate, no_arguments, steps_at_the_end

LESS_FOR_THE_JOB = 5.0  # seconds of the grace of a stage that its job does not get: the head has to end too


class JobCrashed(RuntimeError):
    """The job, or an actor of it, died. Its last checkpoint counts."""


def main() -> None:
    with Stage("train_policy") as stage:
        rl, gate = stage.params.rl, read_json(METRICS / "gate.json")
        override = check_rewards(rl, gate)
        output = stage.scratch / "policy"
        run(stage, output)
        facts = stage.card("policy", f"rl ({rl.algorithm})", {}, gate=gate if asks_reward_model(rl) else None)
        publish_model(output, POLICY_MODEL, facts)
        PLOTS.mkdir(exist_ok=True)
        shutil.copy(stage.scratch / "curves.csv", PLOTS / "train_policy.csv")
        write_json(METRICS / "train_policy.json", final_figures(stage.scratch, rl) | {"override": override})


def check_rewards(rl: RlConfig, gate: dict) -> str | None:
    """What the job needs to give rewards is there and fits together; nothing expensive has started.

    Returns:
        As check_gate.
    Raises:
        StageFailed: the chain's own reward model is used and did not pass its gate.
        ValueError: a reward model's folder, a label, a function or a demonstration is missing.
    """
    from rlhf_core.scorers.needs import check_scorers

    override = check_gate(gate) if asks_reward_model(rl) else None
    check_scorers(rl.reward.scorers, reward_model=REWARD_MODEL, source_judges=source_judges(), has_labels=has_labels)
    if rl.ptx.coef > 0 and not ((PREPARED / "sft.parquet").exists() and read_rows(PREPARED, "sft", "train")):
        raise ValueError(f"rl.ptx.coef: expected 0 without demonstrations, got {rl.ptx.coef}; add a source with the use sft")
    return override


def asks_reward_model(rl: RlConfig) -> bool:
    from rlhf_core.scorers.needs import uses_own_reward_model

    return starts_critic_from_reward_model(rl) or uses_own_reward_model(rl.reward.scorers)


def starts_critic_from_reward_model(rl: RlConfig) -> bool:
    return rl.algorithm == "ppo" and rl.ppo.starts_from_reward_model


def run(stage: Stage, output: Path) -> None:
    """Submit the job, or follow it where it already runs, and pass its output on."""
    from rlhf_core.engines.ray_cluster import local_head, python_path, run_job
    from rlhf_core.models.folder import weight_files
    from rlhf_core.trainers.rl.job import REFUSED, refusal_of

    params = stage.params
    description = stage.scratch / "job.json"
    job = describe(stage, output)
    job.write(description)
    actors = params.rl.trainer.ranks + params.rl.rollout.engines
    with contextlib.ExitStack() as stack:
        address = params.cluster.address
        if address is None:
            head = local_head(
                cpus=max(actors, params.cluster.threads),
                start_timeout=params.cluster.start_timeout,
                weights=sum(path.stat().st_size for path in weight_files(Path(job.sft_model))),
                stop_grace=params.flow.stop_grace - LESS_FOR_THE_JOB,
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
            on_output=show,
            stop_requested=lambda: stage.stop_requested,
        )
    show("", ended=True)
    if stage.stop_requested or code == STOPPED_BY_SIGNAL:
        raise Interrupted
    if code == REFUSED:
        raise StageFailed(f"RL job: {refusal_of(job)}")
    if code != 0:
        raise JobCrashed(f"RL job: expected exit code 0, got {code}; its output above ends with the reason; run it again to go on")


def show(text: str, *, ended: bool = False) -> None:
    """Print the job's output, a piece that may end within a line. Where nobody reads it any more, since the flow was killed, it is
    dropped: the job still has to write its checkpoint.
    """
    try:
        STATUS.pass_on(reordering_shown(text))
        if ended:
            STATUS.end()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def describe(stage: Stage, output: Path):
    from rlhf_core.scorers.needs import model_folders
    from rlhf_core.trainers.rl.job import RlJob

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
        reward_model=str(REWARD_MODEL.resolve()) if starts_critic_from_reward_model(rl) else None,
        work=str(stage.scratch.resolve()),
        checkpoints=stage.store_settings(world_size=rl.trainer.ranks, zero_stage=rl.trainer.zero_stage),
        output=str(output.resolve()),
        timings=str((TIMINGS / "train_policy.csv").resolve()),
    )


def with_absolute_paths(rl: RlConfig) -> RlConfig:
    """Files of functions are found from here; an actor of the job may work in another folder."""

    def absolute(scorer: ScorerConfig) -> ScorerConfig:
        return scorer.model_copy(update={"path": absolute_function(scorer.path)}) if scorer.path else scorer

    scorers = [absolute(scorer) if scorer.kind == "function" else scorer for scorer in rl.reward.scorers]
    return rl.model_copy(update={"reward": rl.reward.model_copy(update={"scorers": scorers})})


def absolute_function(path: str) -> str:
    """`file.py:name` with the file's whole path; what else names a function, or the clerk's judge, as it is."""
    file, _, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else path


def final_figures(work: Path, rl: RlConfig) -> dict[str, Any]:
    """Means over the last steps, the largest log-probability difference of all, what the monitor found, the step that was kept, and which
    GPUs the actors had, where there were some.
    """
    import pandas as pd

    from rlhf_core.trainers.rl.job import PLACEMENT

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


if __name__ == "__main__":
    no_arguments(__doc__)
    main()
