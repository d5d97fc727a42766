"""The stage's side of an RL job: checks, the job's description, its submission to Ray, and the stage's metrics."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.agents.environment import check_environment
from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.config import Params, RlConfig, ScorerConfig
from rlhf_core.data.places import locate
from rlhf_core.data.schema import read_rows
from rlhf_core.models.folder import locate_model
from rlhf_core.models.given import teacher_folder
from rlhf_core.models.tokenizer import encode_prompts, load_tokenizer
from rlhf_core.paths import PREPARED, REWARD_MODEL, SFT_MODEL, TIMINGS
from rlhf_core.sampling.prompts import teacher_messages, with_steps
from rlhf_core.scorers.needs import check_scorers, model_folders, try_teachers, uses_own_reward_model
from rlhf_core.stage.files import has_labels, read_json, source_judges
from rlhf_core.stage.job import Job
from rlhf_core.stage.job_inputs import JobInputs
from rlhf_core.stage.ray_job import submit_job
from rlhf_core.stage.run import Stage, check_gate, check_gate_of_judges, steps_at_the_end
from rlhf_core.stage.setup import rl_setup
from rlhf_core.stage.stored_job import uses_storage
from rlhf_core.storage.work import OUTPUTS
from rlhf_core.trainers.rl.heldout import check_evaluated_sources
from rlhf_core.trainers.rl.job import PLACEMENT, POLICY, RlJob
from rlhf_core.trainers.supervised.time_limit import ended_by_time

ASKED = 4  # prompts that a teacher at an address splits into tokens before the training


def check_rewards(rl: RlConfig, gate: dict) -> str | None:
    """Check what the job needs for its rewards, before anything expensive starts.

    Returns:
        As check_gate.
    Raises:
        StageRefused: the chain's own reward model or a judge is used and did not pass the gate.
        ValueError: a reward model's folder, a label, a function or a demonstration is missing.
    """
    override = check_gate(gate) if uses_chain_reward_model(rl) else None
    override = check_gate_of_judges(gate, "rl.reward.scorers", rl.reward.scorers) or override
    check_scorers(rl.reward.scorers, reward_model=REWARD_MODEL, source_judges=source_judges(), has_labels=has_labels)
    if rl.ptx.coef > 0 and not ((PREPARED / "sft.parquet").exists() and read_rows(PREPARED, "sft", "train")):
        raise ValueError(f"rl.ptx.coef: expected 0 without demonstrations, got {rl.ptx.coef}; add a source with the use sft")
    check_evaluated_sources(rl)
    return override


def uses_chain_reward_model(rl: RlConfig) -> bool:
    """Return whether the chain's own reward model scores responses, or the critic starts from it."""
    return rl.critic_starts_from_reward_model or uses_own_reward_model(rl.reward.scorers)


def run_rl(stage: Stage, output: Path) -> RlConfig:
    """Train by a Ray job, or follow the one that already runs; the policy is written to `output`.

    Returns:
        The section rl with its number of steps.
    Raises:
        Interrupted: SIGTERM; the job has written its checkpoint.
        StageRefused: the job refused its input.
        JobCrashed: the job failed otherwise.
    """
    if stage.params.rl.environment is not None:
        check_environment(stage.params.rl.environment, SFT_MODEL, stage.params.model)
    check_teachers(stage.params)
    inputs = JobInputs() if uses_storage(stage.params) else None
    of_rl = describe_job(stage, output, inputs)
    rl, params = of_rl.rl, stage.params if inputs is None else inputs.on_node(stage.params)
    submit_job(
        stage,
        rl_job(of_rl, params, root=Path.cwd(), work=stage.scratch),
        subject="RL job",
        description=stage.scratch / "job.pkl",
        cpus=rl.cpus,
        model=SFT_MODEL if rl.sends_reference else None,
        inputs=inputs,
        engines=["vllm"] if rl.rollout.backend == "vllm" else [],
        results=(OUTPUTS, POLICY),
    )
    return rl


def check_teachers(params: Params) -> None:
    """Check files and services of the teachers, before anything expensive starts.

    Raises:
        ValueError: a teacher can't be loaded or asked, has other tokens than the policy, or is to read a label that a prompt lacks.
    """
    if params.teachers or params.teacher_services:
        own = load_tokenizer(str(SFT_MODEL), trust_remote_code=params.model.trust_remote_code)
        if (top_k := params.rl.distillation.top_k) is not None and top_k >= len(own):
            raise ValueError(f"rl.distillation.top_k: expected less than the {len(own)} tokens there are, got {top_k}; set it to null")
        for key, path in params.teachers.items():
            teacher_folder(path, own, params.model, key=key)
        rows, template = read_rows(PREPARED, "prompt", "train"), params.rl.teacher_template
        if template is not None:
            rows = [row | {"messages": teacher_messages(row, template)} for row in rows]
        try_teachers(params, own, [own.decode(ids) for ids in encode_prompts(own, [row["messages"] for row in rows[:ASKED]])])


def rl_job(job: RlJob, params: Params, *, root: Path, work: Path) -> Job:
    """Return an RL job for the driver.

    Args:
        params: of which the driver reads the sections cluster and flow.
    """
    return Job(
        stage="train_policy",
        launch="rlhf_core.trainers.rl.driver:launch",
        function="rlhf_core.trainers.rl.loop:run",
        arguments=(job,),
        params=params,
        ranks=job.rl.ranks,
        root=root,
        work=work,
        run_name=job.run_name,
        checkpoints=job.checkpoints,
        threads=job.threads,
        actor_output=True,
    )


def describe_job(stage: Stage, output: Path, inputs: JobInputs | None = None) -> RlJob:
    """Return the description of the stage's RL job.

    Args:
        inputs: takes the inputs along, for nodes that don't see this folder.
    """
    params = stage.params
    rl = with_steps(params, SFT_MODEL)
    rl = with_absolute_paths(rl) if inputs is None else inputs.on_node(rl)
    judges, models = source_judges(), model_folders(params.rl.reward.scorers, REWARD_MODEL)
    timings = TIMINGS / "train_policy.csv"

    def place(path: Path) -> str:
        return str(path.resolve()) if inputs is None else inputs.add(path)

    return RlJob(
        seed=params.seed,
        model=params.model,
        train_on=params.sft.train_on,
        train_on_thoughts=params.sft.train_on_thoughts,
        rl=rl,
        tracking=params.tracking,
        threads=params.cluster.threads,
        run_name=f"train_policy-{stage.fingerprint[:8]}",
        prepared=place(PREPARED),
        sft_model=place(SFT_MODEL),
        scorer_models={name: place(folder) for name, folder in models.items()},
        teacher_models=[place(Path(locate_model(path, key=key))) for key, path in params.teachers.items()],
        source_judges={n: absolute_function(j) for n, j in judges.items()} if inputs is None else inputs.judges_on_node(judges),
        reward_model=place(REWARD_MODEL) if rl.critic_starts_from_reward_model else None,
        work=str(stage.scratch.resolve() if inputs is None else stage.scratch),
        checkpoints=checkpoint_settings(stage, rl),
        output=str(output.resolve() if inputs is None else output),
        timings=str(timings.resolve() if inputs is None else timings),
    )


def checkpoint_settings(stage: Stage, rl: RlConfig) -> StoreSettings:
    policy, *critic = rl.learning_groups
    settings = stage.store_settings(world_size=policy.ranks, zero_stage=rl.trainer.zero_stage)
    return replace(settings, engine_ranks={"critic": critic[0].ranks} if critic else {})


def with_absolute_paths(rl: RlConfig) -> RlConfig:
    """Absolute paths of functions and judges' templates: an actor of the job may have another working directory."""

    def absolute(scorer: ScorerConfig) -> ScorerConfig:
        if scorer.kind == "function" and scorer.path:
            return scorer.model_copy(update={"path": absolute_function(scorer.path)})
        return scorer.model_copy(update={"template": str(locate(scorer.template).resolve())}) if scorer.template else scorer

    scorers = [absolute(scorer) for scorer in rl.reward.scorers]
    reward, environment = rl.reward.model_copy(update={"scorers": scorers}), rl.environment
    if environment is not None:
        environment = environment.on_files(absolute_function, lambda file: str(Path(file).resolve()))
    return rl.model_copy(update={"reward": reward, "environment": environment})


def absolute_function(path: str) -> str:
    """`file.py:name` with the file's absolute path; other names of functions and judges as they are."""
    file, _, name = path.rpartition(":")
    return f"{Path(file).resolve()}:{name}" if file.endswith(".py") else path


def final_figures(work: Path, rl: RlConfig) -> dict[str, Any]:
    """The stage's metrics: means over the last steps, the largest log-probability difference, the monitor's findings, the exported step,
    and how it was trained.

    Args:
        rl: with the number of steps.
    """
    import pandas as pd

    rows = pd.read_csv(work / "curves.csv")
    last = rows.tail(steps_at_the_end(len(rows)))
    means = ("kl_mean", "response_length", "entropy", "truncated_fraction", *(f"score_{s.name}" for s in rl.reward.scorers))
    means += ("score_mean",) * rl.learns_from_reward + ("distillation_loss",) * (rl.distillation is not None)
    means += ("drawn_score_mean",) * rl.dynamic_sampling.enabled
    monitor = read_json(work / "monitor.json")
    is_short = len(rows) < rl.steps and monitor["stopped"] is None
    means += tuple(f"disagreement_{s.name}" for s in rl.reward.scorers if s.members > 1)
    return {
        **{name: float(last[name].mean()) for name in means},
        "method": "rl",
        "algorithm": rl.title,
        "steps": len(rows),
        **(ended_by_time("rl", len(rows), rl.steps) if is_short else {}),
        "averaged_steps": len(last),
        **({"score_first_step": float(rows["score_mean"].iloc[0])} if rl.learns_from_reward else {}),
        **({"distillation_loss_first_step": float(rows["distillation_loss"].iloc[0])} if rl.distillation is not None else {}),
        "logprob_difference_max": float(rows["logprob_difference"].max()),
        "monitor": monitor,
        **({f"best_{name}": value for name, value in read_json(work / "best.json").items()} if rl.evaluation.keep_best else {}),
        "setup": rl_setup(rl, read_json(work / PLACEMENT)),
    }
