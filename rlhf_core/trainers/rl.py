"""The online RL loop: one controller, which runs as a Ray job; workers hold the models.

python -m rlhf_core.trainers.rl <job.json>
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

from rlhf_core.config import RlConfig
from rlhf_core.quiet import be_quiet, show_own_log
from rlhf_core.tracking import MetricsLog
from rlhf_core.trainers.credit import RewardNormalizer, assign_credit
from rlhf_core.trainers.rl_data import DemonstrationStream, PromptStream, collate, components_of, evaluation_prompts, read_prompts
from rlhf_core.trainers.rl_job import REFUSED, RlJob
from rlhf_core.trainers.rl_metrics import (
    Clock,
    LogprobMismatch,
    Metrics,
    TooManyUnscored,
    batch_metrics,
    check_logprobs,
    check_scored,
    curve_columns,
    evaluation_metrics,
    progress_line,
)
from rlhf_core.trainers.rl_sampling import draw, greedy_components
from rlhf_core.trainers.rl_state import Best, Progress
from rlhf_core.trainers.rl_workers import Workers, plan_update
from rlhf_core.types import Prompt

log = logging.getLogger("rlhf")

STOPPED = 143  # exit code after SIGTERM, the checkpoint written


def main() -> int:
    show_own_log()
    be_quiet()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job = RlJob.read(Path(sys.argv[1]))
    try:
        with Workers(job) as workers:
            progress = train(job, workers, stop)
            finished = progress.step == job.rl.steps
            if finished:
                export(job, workers, progress)
    except (LogprobMismatch, TooManyUnscored, ValueError) as error:
        log.error("%s", error)
        return REFUSED
    return 0 if finished else STOPPED


def train(job: RlJob, workers: Workers, stop: threading.Event) -> Progress:
    """Every step from the last checkpoint to the end, or until a signal stops it; then the state is saved."""
    rl = job.rl
    prompts = PromptStream(read_prompts(job, "train"), rl.prompt_weights, seed=job.seed)
    validation = evaluation_prompts(job)
    demonstrations = DemonstrationStream(job)
    normalizer = RewardNormalizer(rl.reward)
    warn(rl)
    progress = workers.resume(normalizer)
    if progress is not None:
        log.info("rl: going on from the checkpoint of step %d", progress.step)
    else:
        progress = begin(workers, prompts, validation, normalizer, rl)
    curves = open_curves(job, first_step=progress.step + 1)
    stopping = False
    while progress.step < rl.steps and not stopping:
        clock, step, kl_coef = Clock(), progress.step, progress.kl_coef
        drawn = draw(workers, prompts, rl, step=step, prompts_drawn=progress.prompts_drawn, clock=clock)
        outputs = workers.forward([s.rollout for s in drawn.scored])
        clock.lap("forward")
        batch = collate(drawn.scored, outputs, workers.pad_id, drawn.baseline_components)
        check_scored(batch, rl, step=step)
        difference = check_logprobs(batch, rl, step=step)
        clock.lap("collate")
        train_batch, credit_metrics = assign_credit(batch, rl, normalizer, kl_coef=kl_coef)
        clock.lap("credit")
        plans = plan_update(train_batch, demonstrations, rl, seed=job.seed, step=step)
        clock.lap("plan")
        update = workers.update(plans, kl_coef=kl_coef, train_policy=trains_policy(rl, step))
        clock.lap("update")
        workers.sync_weights(version=step + 1)
        clock.lap("sync")
        row = {
            "step": step + 1,
            **batch_metrics(batch, rl.reward),
            **drawn.metrics,
            **credit_metrics,
            **update,
            "kl_coef": kl_coef,
            "logprob_difference": difference,
        }
        if drawn.scorer_metrics:
            row["scorer_metrics"] = json.dumps(drawn.scorer_metrics)
        progress = progress.after_step(rl, kl=row["kl_mean"], prompts_drawn=drawn.prompts_drawn)
        if rl.kl.refresh_reference_every and progress.step % rl.kl.refresh_reference_every == 0:
            workers.refresh_reference()
        if is_due(rl.evaluation.every, progress.step, rl):
            progress, evaluated = evaluate(workers, validation, progress, rl)
            row |= evaluated
        clock.lap("evaluate")
        stopping = stop.is_set()
        if stopping or is_due(rl.checkpoint_every, progress.step, rl):
            workers.checkpoint(progress, normalizer)
        clock.lap("checkpoint")
        curves.log(row, clock.timings(samples=rl.samples_per_step), drawn.scorer_metrics)
        log.info("%s", progress_line(row, rl, clock))
    curves.close()
    return progress


def warn(rl: RlConfig) -> None:
    if rl.kl.coef == 0:
        log.warning(
            "rl: kl.coef is 0: nothing holds the policy near the SFT model, so it will follow the reward wherever it is wrong; no "
            "reference is kept, and kl_mean is 0 in the curves whatever happens"
        )


def begin(workers: Workers, prompts: PromptStream, validation: list[Prompt], normalizer: RewardNormalizer, rl: RlConfig) -> Progress:
    """What a run that isn't resumed does before its first step."""
    if normalizer.needs_calibration:
        rollouts = workers.generate_for_calibration(prompts.take(0, rl.reward.normalization_samples))
        normalizer.calibrate(components_of(workers.score(rollouts)))
    progress = Progress.start(rl)
    if rl.evaluation.every:
        progress, evaluated = evaluate(workers, validation, progress, rl)
        log.info("rl: before training  %s", "  ".join(f"{name} {value:.3f}" for name, value in evaluated.items()))
    return progress


def evaluate(workers: Workers, prompts: list[Prompt], progress: Progress, rl: RlConfig) -> tuple[Progress, Metrics]:
    """Score the policy's greedy responses, and with rl.evaluation.keep_best put it aside if it is the best so far."""
    metrics = evaluation_metrics(greedy_components(workers, prompts), rl.reward)
    value = metrics[f"eval_{rl.evaluation.metric}"]
    if rl.evaluation.keep_best and progress.improves(value):
        workers.store.keep_best(workers.export)
        progress = replace(progress, best=Best(progress.step, value))
    return progress, metrics


def export(job: RlJob, workers: Workers, progress: Progress) -> None:
    """The policy of the last step, or with rl.evaluation.keep_best the best one that could be evaluated, which best.json then names."""
    best = progress.best
    if best is None:
        workers.export(Path(job.output))
    else:
        shutil.copytree(workers.store.best_policy, job.output, dirs_exist_ok=True)
    if job.rl.evaluation.keep_best:
        found = {"step": best.step, "value": best.value} if best else {"step": progress.step, "value": None}
        (Path(job.work) / "best.json").write_text(json.dumps({**found, "metric": job.rl.evaluation.metric}))


def trains_policy(rl: RlConfig, step: int) -> bool:
    """False in the first steps of PPO, where only the critic learns."""
    return rl.algorithm != "ppo" or step >= rl.ppo.critic_warmup_steps


def is_due(every: int | None, step: int, rl: RlConfig) -> bool:
    """Whether what happens every so many steps, and after the last one, happens after this one."""
    return every is not None and (step % every == 0 or step == rl.steps)


def open_curves(job: RlJob, *, first_step: int) -> MetricsLog:
    return MetricsLog(
        Path(job.work) / "curves.csv",
        curve_columns(job.rl),
        timings=Path(job.timings),
        tracking=job.tracking,
        run_name=job.run_name,
        first_step=first_step,
    )


if __name__ == "__main__":
    sys.exit(main())
