"""The online RL loop: one controller, in the driver of a Ray job (rl_driver.py); workers hold the models."""

from __future__ import annotations

import json
import logging
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.checkpoint.store import NoSpace
from rlhf_core.config import RlConfig, curve_columns
from rlhf_core.process import collect_by_default, freeze_gc
from rlhf_core.progress import Bar
from rlhf_core.sampling.scoring import RewardNormalizer
from rlhf_core.tracking import MetricsLog
from rlhf_core.trainers.rl.advantages import compute_advantages, correct, value_units
from rlhf_core.trainers.rl.collect import draw, greedy_components
from rlhf_core.trainers.rl.data import (
    DemonstrationStream,
    PromptStream,
    collate,
    components_of,
    evaluation_prompts,
    read_prompts,
    with_old_logprobs,
)
from rlhf_core.trainers.rl.job import FULL, STOPPED, RlJob, StepAbandoned, Stop, refuse
from rlhf_core.trainers.rl.metrics import Clock, Metrics, TooManyUnscored, batch_metrics, check_scored, evaluation_metrics, told
from rlhf_core.trainers.rl.minibatch import plan_update
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, check_finite, check_logprobs
from rlhf_core.trainers.rl.monitor import Finding, holds, observe
from rlhf_core.trainers.rl.state import Best, Progress
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, ScoredRollout

if TYPE_CHECKING:
    from rlhf_core.trainers.rl.driver import Actors

log = logging.getLogger("rlhf")


def run(job: RlJob, actors: Actors, stop: Stop) -> int:
    """Train and export. Returns the driver's exit code.

    Raises:
        RoleLost: an actor that can't be replaced died or is late.
    """
    try:
        with Workers(job, actors) as workers:
            progress = train(job, workers, stop)
            finished = progress.finished(job.rl)
            if finished:
                export(job, workers, progress)
    except (LogprobMismatch, TooManyUnscored, ValueError) as error:
        return refuse(job, error)
    except NoSpace as error:
        log.error("%s", error)
        return FULL
    return 0 if finished else STOPPED


def train(job: RlJob, workers: Workers, stop: Stop) -> Progress:
    """Every step from the last checkpoint to the end, or until a limit or a signal stops it; on a signal the state is saved."""
    collect_by_default()
    freeze_gc()
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
    if rl.algorithm == "ppo":
        workers.set_value_units(value_units(rl, normalizer))
    curves = open_curves(job, first_step=progress.step + 1)
    bar = Bar("rl step", rl.steps, done=progress.step)
    stopping = False
    while not progress.finished(rl) and not stopping:
        clock, step, kl_coef = Clock(), progress.step, progress.kl_coef
        on_policy = rl.on_policy and trains_policy(rl, step)
        share = 0.0 if on_policy or rl.trusts_engine else rl.rollout.recomputed_fraction
        try:
            with stop.interrupts():
                position = progress.prompts_drawn
                drawn = draw(workers, prompts, rl, normalizer, step=step, prompts_drawn=position, share=share, clock=clock)
        except StepAbandoned:
            log.info("rl: told to stop; step %d is given up before it has changed anything", step + 1)
            workers.snapshot(progress, normalizer, score=None)
            workers.store.publish()
            break
        if rl.rollout.one_step_off_policy:
            following = prompts.take(drawn.prompts_drawn, rl.rollout_batch_size) if step + 1 < rl.steps else []
            workers.rollouts.generate_ahead(following, step=step + 1)
        outputs = workers.forward(drawn.asked)
        clock.lap("forward")
        batch = collate(drawn.scored, outputs, workers.pad_id, drawn.baseline)
        check_scored(batch, rl, step=step)
        if rl.rollout.one_step_off_policy:
            check_finite(batch, step=step)
            difference = check_beginnings(workers, rl, step=step, dtype=job.model.dtype)
        else:
            difference = check_logprobs(batch, rl, step=step, dtype=job.model.dtype)
        clock.lap("collate")
        train_batch, advantage_metrics = compute_advantages(batch, rl, normalizer, kl_coef=kl_coef)
        clock.lap("advantages")
        plans = plan_update(train_batch, demonstrations, rl, seed=job.seed, step=step)
        clock.lap("plan")
        update = workers.update(plans, kl_coef=kl_coef, train_policy=trains_policy(rl, step), on_policy=on_policy)
        clock.lap("update")
        if on_policy:  # only now are the policy's own log-probabilities known; what was sampled stays the same
            batch = with_old_logprobs(batch, workers.updated_logprobs(plans, batch), has_reference="ref_logprobs" in outputs)
            difference = check_logprobs(batch, rl, step=step, dtype=job.model.dtype)
            advantage_metrics |= correct(batch, train_batch.response_mask, rl)[1]
            clock.lap("collate")
        workers.rollouts.collect_ahead()
        clock.lap("generate")
        workers.sync_weights(version=step + 1)
        clock.lap("sync")
        row = {
            "step": step + 1,
            **batch_metrics(batch, rl.reward),
            **drawn.metrics,
            **advantage_metrics,
            **update,
            "kl_coef": kl_coef,
            "logprob_difference": difference,
        }
        if rl.rollout.one_step_off_policy:
            row["policy_lag"] = step - float(batch.policy_versions.float().mean())
        if drawn.scorer_metrics:
            row["scorer_metrics"] = json.dumps(drawn.scorer_metrics)
        progress = progress.after_step(rl, kl=row["kl_mean"], prompts_drawn=drawn.prompts_drawn)
        if rl.kl.refresh_reference_every and progress.step % rl.kl.refresh_reference_every == 0:
            workers.refresh_reference()
        evaluated = evaluate(workers, validation, rl) if is_due(rl.evaluation.every, progress.step, rl) else {}
        monitor, further, found = observe(rl, progress.monitor, row | evaluated, batch)
        row |= evaluated | further
        progress = keep_if_best(workers, replace(progress, monitor=monitor), evaluated, rl)
        clock.lap("evaluate")
        stopping = stop.is_set()
        if stopping or is_due(rl.checkpoint_every, progress.step, rl):
            workers.snapshot(progress, normalizer, score=evaluated.get(f"eval_{rl.evaluation.metric}"))
        clock.lap("checkpoint")
        # First the curve, then the checkpoint: a run that is killed between them does the step again, and writes its row again.
        timings = clock.timings(samples=rl.samples_per_step) | {"replacements": workers.replacements.count}
        curves.log(row, timings, drawn.scorer_metrics)
        workers.store.publish()
        bar.step(**told(row, rl, clock))
        tell(found, rl)
    bar.close()
    workers.store.wait()
    curves.close()
    return progress


def check_beginnings(workers: Workers, rl: RlConfig, *, step: int, dtype: str) -> float:
    """See `check_logprobs`, of the beginnings of responses that engines drew with the weights that the trainer still has; where no step
    follows nothing is drawn, and the difference is the probe's.
    """
    rollouts = workers.rollouts.beginnings()
    if not rollouts:
        return workers.rollouts.sync_check.difference
    outputs = workers.forward(workers.ask(rollouts, share=1.0))
    batch = collate([ScoredRollout(r, {}) for r in rollouts], outputs, workers.pad_id, None)
    return check_logprobs(batch, rl, step=step, dtype=dtype, few=True)


def warn(rl: RlConfig) -> None:
    if rl.kl.coef == 0:
        log.warning(
            "rl: kl.coef is 0: nothing holds the policy near the SFT model, so it will follow the reward wherever it is wrong%s",
            "" if rl.kl.measure else "; no reference is kept, and kl_mean is 0 in the curves whatever happens",
        )


def tell(found: list[Finding], rl: RlConfig) -> None:
    """What was found in a step, and what follows from it."""
    for finding in found:
        follows = {"warn": "training goes on", "stop": "training ends here", "rollback": f"back to the best by {rl.evaluation.metric}"}
        log.warning("rl: %s; %s", finding.message, follows[finding.action])


def begin(workers: Workers, prompts: PromptStream, validation: list[Prompt], normalizer: RewardNormalizer, rl: RlConfig) -> Progress:
    """What a run that isn't resumed does before its first step."""
    if rl.starts_rounded:
        workers.sync_weights(version=0)
    if normalizer.needs_calibration:
        rollouts = workers.rollouts.generate_for_calibration(prompts.take(0, rl.reward.normalization_samples))
        normalizer.calibrate(components_of(workers.score(rollouts)))
    progress = Progress.start(rl)
    if rl.evaluation.every:
        evaluated = evaluate(workers, validation, rl)
        progress = keep_if_best(workers, progress, evaluated, rl)
        log.info("rl: before training  %s", "  ".join(f"{name} {value:.3f}" for name, value in evaluated.items()))
    return progress


def evaluate(workers: Workers, prompts: list[Prompt], rl: RlConfig) -> Metrics:
    """Scores of the policy's greedy responses."""
    return evaluation_metrics(greedy_components(workers, prompts), rl.reward)


def keep_if_best(workers: Workers, progress: Progress, evaluated: Metrics, rl: RlConfig) -> Progress:
    """Put the policy of now aside if it was evaluated, is the best so far, and passes no limit that ends the run."""
    value = evaluated.get(f"eval_{rl.evaluation.metric}", math.nan)
    if not (rl.keeps_best and progress.improves(value) and holds(rl, progress.monitor)):
        return progress
    workers.store.keep_best(workers.export)
    return replace(progress, best=Best(progress.step, value))


def export(job: RlJob, workers: Workers, progress: Progress) -> None:
    """The policy of the last step; or the best that could be evaluated, with rl.evaluation.keep_best or where a limit rolled back.

    best.json and monitor.json in the job's folder say which one it is and why.
    """
    best, stopped = progress.best, progress.monitor.stopped
    keep_best = job.rl.evaluation.keep_best
    chosen = best if keep_best or (stopped is not None and stopped.action == "rollback") else None
    if chosen is None:
        workers.export(Path(job.output))
    else:
        shutil.copytree(workers.store.best_policy, job.output, dirs_exist_ok=True)
    step = progress.step if chosen is None else chosen.step
    if keep_best:
        found = {"step": step, "value": chosen and chosen.value, "metric": job.rl.evaluation.metric}
        (Path(job.work) / "best.json").write_text(json.dumps(found))
    (Path(job.work) / "monitor.json").write_text(json.dumps(progress.monitor.findings | {"chosen_step": step}))


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
