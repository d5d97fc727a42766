"""The online RL loop. One controller in the driver of a Ray job runs it; workers hold the models.

A step: generate -> score -> collate -> forward -> advantages -> update -> sync weights.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlhf_core.checkpoint.store import SaveFailed
from rlhf_core.config import RlConfig, curve_columns
from rlhf_core.process import STOPPED_BY_SIGNAL, StepAbandoned, Stop, collect_by_default, freeze_gc
from rlhf_core.progress import Bar
from rlhf_core.sampling.prompts import difficulties
from rlhf_core.sampling.rewards import RewardNormalizer, weighted_score
from rlhf_core.stage.job import FULL, refuse
from rlhf_core.tracking import MetricsLog
from rlhf_core.trainers.rl.collect import Collected, collect_again, collect_rollouts
from rlhf_core.trainers.rl.credit import compute_advantages, correct, sampling_logprobs, shaped_rewards, value_units
from rlhf_core.trainers.rl.curriculum import Curriculum
from rlhf_core.trainers.rl.data import DemonstrationStream, PromptStream, collate, evaluation_prompts, read_prompts
from rlhf_core.trainers.rl.heldout import evaluation_metrics
from rlhf_core.trainers.rl.job import RlJob
from rlhf_core.trainers.rl.journal import CALIBRATION, EVALUATION, Batch, Journal, components_of
from rlhf_core.trainers.rl.metrics import (
    Clock,
    Metrics,
    TooManyUnscored,
    batch_metrics,
    check_scored,
    check_taught,
    lag_metrics,
    progress_figures,
)
from rlhf_core.trainers.rl.minibatch import plan_update
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, check_finite, check_logprobs
from rlhf_core.trainers.rl.monitor import Finding, holds, observe
from rlhf_core.trainers.rl.saved_rollouts import SavedRollouts, TrainedRollouts
from rlhf_core.trainers.rl.state import BestPolicy, Progress
from rlhf_core.trainers.rl.workers import Workers
from rlhf_core.types import Prompt, Rollout, RolloutBatch, TrainBatch, UpdateResult

if TYPE_CHECKING:
    import numpy as np

    from rlhf_core.trainers.rl.driver import Actors

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class Run:
    """What every step of a run uses."""

    job: RlJob
    workers: Workers
    prompts: PromptStream
    validation: list[Prompt]
    demonstrations: DemonstrationStream
    normalizer: RewardNormalizer
    journal: Journal


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for its metrics.

    difference: between the engine's and the trainer's log-probabilities, see `check_logprobs`.
    """

    collected: Collected
    batch: RolloutBatch
    train_batch: TrainBatch
    advantage_metrics: Metrics
    update: UpdateResult
    difference: float


def run(job: RlJob, actors: Actors, stop: Stop) -> int:
    """Train and export. Returns the driver's exit code.

    Raises:
        RoleLost: an actor that can't be replaced died or missed a deadline.
        StepAbandoned: SIGTERM before all actors were ready.
    """
    try:
        with contextlib.ExitStack() as stack:
            with stop.interrupts():
                workers = stack.enter_context(Workers(job, actors))
            progress = train(job, workers, stop)
            finished = progress.finished(job.rl)
            if finished:
                export(job, workers, progress)
    except (LogprobMismatch, TooManyUnscored, ValueError) as error:
        return refuse(Path(job.work), error)
    except SaveFailed as error:
        log.error("%s", error)
        return FULL
    return 0 if finished else STOPPED_BY_SIGNAL


def train(job: RlJob, workers: Workers, stop: Stop) -> Progress:
    """Every step from the last checkpoint to the end, or until a limit, rl.max_minutes or SIGTERM stops the run. SIGTERM saves the state
    first.
    """
    rl = job.rl
    run, progress = start_or_resume(job, workers)
    curves = MetricsLog(
        Path(job.work) / "curves.csv",
        curve_columns(rl),
        timings=Path(job.timings),
        tracking=job.tracking,
        run_name=job.run_name,
        first_step=progress.step + 1,
    )
    saved = SavedRollouts(job, first_step=progress.step + 1)
    bar = Bar("rl step", rl.steps, done=progress.step)
    stopping, began = False, time.monotonic() - progress.seconds
    while not progress.finished(rl) and not stopping:
        clock = Clock(apart=workers.turns.seconds)
        try:
            result = train_step(run, progress, stop, clock)
        except StepAbandoned:
            log.info("rl: SIGTERM: step %d abandoned, no state changed", progress.step + 1)
            workers.turns.end_engines()
            workers.snapshot(progress, run.normalizer, score=None)
            workers.store.publish()
            break
        progress, row, findings = finish_step(run, replace(progress, seconds=time.monotonic() - began), result)
        clock.lap("evaluate")
        if saves_rollouts(progress, rl):
            curves.log_table("rollouts", saved.write(progress.step, trained_rollouts(run, result)), step=progress.step)
        clock.lap("save_rollouts")
        stopping = stop.is_set()
        if stopping or progress.is_best or is_due(rl.checkpoint_every, progress, rl):
            workers.snapshot(progress, run.normalizer, score=row.get(f"eval_{rl.evaluation.metric}"))
        clock.lap("checkpoint")
        # The curve is written before the checkpoint: a run that is killed between the two repeats the step, and overwrites its row.
        timings = clock.timings(samples=rl.samples_per_step) | {
            "replacements": workers.replacements.count,
            **workers.transfer.take_traffic(),
            **workers.turns.memory,
        }
        workers.turns.log_order()
        curves.log(row, timings, result.collected.scorer_metrics)
        workers.store.publish()
        run.journal.trim(workers.store.surely_done)
        bar.step(**progress_figures(row, rl, clock))
        log_findings(findings, rl)
    bar.close()
    if progress.step == rl.steps or progress.monitor.stopped is not None:
        run.journal.end()
    workers.store.wait()
    curves.close()
    return progress


def train_step(run: Run, progress: Progress, stop: Stop, clock: Clock) -> StepResult:
    """Return one step of the loop, up to the weight sync.

    Raises:
        StepAbandoned: SIGTERM while the rollouts were collected, which changes no state.
        LogprobMismatch: engine and trainer compute different log-probabilities.
        TooManyUnscored: a scorer failed for too many responses.
    """
    rl, workers, step, kl_coef = run.job.rl, run.workers, progress.step, progress.kl_coef
    source = rl.old_logprobs_source(step)
    noted = run.journal.batch(step)
    with stop.interrupts():
        if noted is not None:
            collected = collect_again(workers, noted.answers, rl, old_logprobs_source=source)
        else:
            place = {"step": step, "prompts_drawn": progress.prompts_drawn, "old_logprobs_source": source}
            collected = collect_rollouts(workers, run.prompts, rl, run.normalizer, **place, clock=clock)
    samples_ahead = rl.rollout.max_lag > 0 and noted is None
    if samples_ahead:
        workers.ahead.begin(step=step)
    outputs = workers.collect_forward(collected.forward)
    clock.lap("forward")
    rollouts, sequences = collected.rollouts, collected.forward.sequences
    how = {"old_logprobs_source": source, "steps": collected.steps, "taught": collected.taught}
    batch = collate(rollouts, sequences, collected.components, outputs, collected.baseline, **how)
    check_scored(batch, rl, step=step)
    check_taught(collected.taught, rl, step=step)
    if source != "from_update":
        difference = check_engine(run, batch, noted, step=step)
    if noted is None:
        run.journal.note_batch(step, Batch(collected, difference if samples_ahead else None, workers.ahead.state(step=step)))
    elif noted.ahead is not None:
        workers.ahead.restore(noted.ahead)
    clock.lap("collate")
    train_batch, advantage_metrics = compute_advantages(batch, rl, run.normalizer, kl_coef=kl_coef)
    clock.lap("advantages")
    plans = [plan_update(train_batch, run.demonstrations, rl.of_group(group), seed=run.job.seed, step=step) for group in rl.learning_groups]
    clock.lap("plan")
    update = workers.update(plans, batch, kl_coef=kl_coef, train_policy=rl.trains_policy(step))
    clock.lap("update")
    if source == "from_update":  # the policy's log-probabilities are known only now
        try:
            difference = check_logprobs(batch, update.old_logprobs, rl, step=step, dtype=run.job.model.dtype)
        except LogprobMismatch:
            run.journal.forget(step)  # a rerun, whose engines may be right, samples it anew
            raise
    if samples_ahead:
        workers.ahead.end()
    clock.lap("generate")
    workers.sync_weights(version=step + 1)
    clock.lap("sync")
    return StepResult(collected, batch, train_batch, advantage_metrics, update, difference)


def check_engine(run: Run, batch: RolloutBatch, noted: Batch | None, *, step: int) -> float:
    """Difference between the engine's and the trainer's log-probabilities before the update, see `check_logprobs`.

    Rollouts ahead are of older policies, whose weights the trainer no longer has. In their place the engines' short responses are compared,
    which the current policy sampled; on the last step there are none, and the difference is the last weight sync's.
    """
    rl, workers, dtype = run.job.rl, run.workers, run.job.model.dtype
    if not rl.rollout.max_lag:
        return check_logprobs(batch, batch.sampler_logprobs, rl, step=step, dtype=dtype)
    check_finite(batch, step=step)
    if noted is not None:
        return noted.difference
    rollouts = workers.ahead.short_rollouts()
    if not rollouts:
        return workers.rollouts.sync_check.difference
    forward = workers.submit_forward(rollouts, recomputed_fraction=1.0)
    short = collate(rollouts, forward.sequences, {}, workers.collect_forward(forward), None, old_logprobs_source="recompute")
    return check_logprobs(short, short.sampler_logprobs, rl, step=step, dtype=dtype)


def finish_step(run: Run, progress: Progress, result: StepResult) -> tuple[Progress, Metrics, list[Finding]]:
    """Metrics, reference refresh, evaluation, monitor and best policy. Returns the progress, the row of the curves, and findings."""
    rl, workers, batch, update = run.job.rl, run.workers, result.batch, result.update
    row = {
        "step": progress.step + 1,
        **batch_metrics(batch, sampling_logprobs(batch, update.old_logprobs, rl), rl.reward),
        **result.collected.metrics,
        **result.advantage_metrics,
        **update.metrics,
        "kl_coef": progress.kl_coef,
        "logprob_difference": result.difference,
    }
    if batch.old_logprobs_source == "from_update":
        row |= correct(update.old_logprobs, batch.rollout_logprobs, result.train_batch.response_mask, rl)[1]
    if rl.rollout.max_lag:
        row |= lag_metrics(result.collected.rollouts, version=progress.step, longest=rl.rollout.max_new_tokens)
    if result.collected.scorer_metrics:
        row["scorer_metrics"] = json.dumps(result.collected.scorer_metrics)
    progress = progress.after_step(rl, kl=row["kl_mean"], prompts_drawn=result.collected.prompts_drawn)
    if (curriculum := run.prompts.curriculum) is not None:
        row |= curriculum.learn(result.collected.drawn, step=progress.step)
        progress = replace(progress, curriculum=dict(curriculum.seen))
    if rl.kl.refresh_reference_every and progress.step % rl.kl.refresh_reference_every == 0:
        workers.refresh_reference()
    evaluated = {}
    if is_due(rl.evaluation.every, progress, rl):
        evaluated = run.journal.answer(EVALUATION, progress.step, lambda: evaluate(workers, run.validation, rl))
    monitor, further, findings = observe(rl, progress.monitor, row | evaluated, batch)
    progress = note_if_best(replace(progress, monitor=monitor), evaluated, rl)
    return progress, row | evaluated | further, findings


def start_or_resume(job: RlJob, workers: Workers) -> tuple[Run, Progress]:
    """Read the data, and load the newest checkpoint; without one, calibrate the reward and evaluate the initial policy."""
    collect_by_default()
    freeze_gc()
    rl = job.rl
    train, curriculum = read_prompts(job, "train"), Curriculum(rl.curriculum, rl, seed=job.seed) if rl.measures_success else None
    by_difficulty = difficulties(Path(job.prepared), train, rl)
    prompts = PromptStream(train, rl.prompt_weights, seed=job.seed, curriculum=curriculum, difficulties=by_difficulty)
    normalizer = RewardNormalizer(rl.reward)
    journal = Journal(rl, Path(job.work))
    run = Run(job, workers, prompts, evaluation_prompts(job), DemonstrationStream(job), normalizer, journal)
    if rl.kl.coef == 0 and rl.learns_from_reward:
        log.warning(
            "rl: kl.coef is 0: nothing holds the policy near the SFT model, so it will follow the reward wherever it is wrong%s",
            "" if rl.kl.measure else "; no reference is kept, and kl_mean is always 0 in the curves",
        )
    progress = workers.resume(normalizer)
    if progress is not None:
        log.info("rl: resuming from the checkpoint of step %d", progress.step)
        if curriculum is not None:
            curriculum.seen, curriculum.step = dict(progress.curriculum), progress.step
    else:
        if rl.starts_rounded:
            workers.sync_weights(version=0)
        if normalizer.needs_calibration:
            shuffled = PromptStream(train, rl.prompt_weights, seed=job.seed)  # of any difficulty
            first = shuffled.take(0, rl.reward.normalization_samples)
            normalizer.calibrate(components_of(journal.answer(CALIBRATION, 0, lambda: calibration_scores(workers, first))))
        progress = Progress.start(rl)
        if rl.evaluation.every:
            evaluated = journal.answer(EVALUATION, 0, lambda: evaluate(workers, run.validation, rl))
            progress = note_if_best(progress, evaluated, rl)
            if progress.is_best:
                workers.snapshot(progress, normalizer, score=progress.best.value)
                workers.store.publish()
            log.info("rl: before training  %s", "  ".join(f"{name} {value:.3f}" for name, value in evaluated.items()))
    if rl.critic is not None:
        workers.set_value_units(value_units(rl, normalizer))
    if noted := journal.count(progress.step):
        log.info("rl: the journal has the next %d batches, which are trained on without sampling", noted)
    return run, progress


def calibration_scores(workers: Workers, prompts: list[Prompt]) -> dict[str, list[float]]:
    """Raw scores of the initial policy's responses, by scorer."""
    scores = workers.score(workers.rollouts.generate_for_calibration(prompts))
    return {name: of_one.tolist() for name, of_one in scores.items()}


def evaluate(workers: Workers, prompts: list[Prompt], rl: RlConfig) -> Metrics:
    """Scores of the policy's greedy responses, and with rl.evaluation.samples pass@k of sampled ones."""

    def scored(rollouts: list[Rollout]) -> dict[str, np.ndarray]:
        components = workers.score(rollouts)
        scores = {"score": weighted_score(components, rl.reward.scorers, count=len(rollouts)), **components}
        return {name: values.numpy() for name, values in scores.items()}

    greedy = scored(workers.rollouts.generate_greedy(prompts))
    sampled = scored(workers.rollouts.generate_for_evaluation(prompts)) if rl.evaluation.samples else None
    return evaluation_metrics(greedy, sampled, [prompt.source for prompt in prompts], rl)


def note_if_best(progress: Progress, evaluated: Metrics, rl: RlConfig) -> Progress:
    """Note the current policy as the best one if it was evaluated, beats the best before, and passes no limit that ends the run.

    The step's checkpoint then keeps it.
    """
    value = evaluated.get(f"eval_{rl.evaluation.metric}", math.nan)
    if not (rl.keeps_best and progress.improves(value) and holds(rl, progress.monitor)):
        return progress
    return replace(progress, best=BestPolicy(progress.step, value, rl.evaluation.metric))


def export(job: RlJob, workers: Workers, progress: Progress) -> None:
    """The policy of the last step; or the best that could be evaluated, with rl.evaluation.keep_best or where a limit rolled back.

    best.json and monitor.json in the job's folder say which one it is and why.
    """
    best, stopped = progress.best, progress.monitor.stopped
    keep_best = job.rl.evaluation.keep_best
    chosen = best if keep_best or (stopped is not None and stopped.action == "rollback") else None
    if chosen is not None and chosen.step != progress.step:
        workers.load_step(chosen.step)
    workers.export(Path(job.output))
    step = progress.step if chosen is None else chosen.step
    if keep_best:
        found = {"step": step, "value": chosen and chosen.value, "metric": job.rl.evaluation.metric}
        (Path(job.work) / "best.json").write_text(json.dumps(found))
    (Path(job.work) / "monitor.json").write_text(json.dumps(progress.monitor.findings | {"chosen_step": step}))


def saves_rollouts(progress: Progress, rl: RlConfig) -> bool:
    """Return whether the rollouts of the step that has ended are saved: every so many steps, of the first step and of the last."""
    return rl.save_rollouts_every is not None and (progress.step == 1 or progress.finished(rl) or is_due(rl.rollouts_every, progress, rl))


def trained_rollouts(run: Run, result: StepResult) -> TrainedRollouts:
    """Return the step's rollouts with what the update made of them."""
    batch, rl = result.batch, run.job.rl
    rewards = shaped_rewards(batch.components, batch.finished, batch.lengths, rl, run.normalizer, learn=False)
    return TrainedRollouts(result.collected.rollouts, batch, result.train_batch, result.update.old_logprobs, rewards)


def log_findings(findings: list[Finding], rl: RlConfig) -> None:
    """Limits that were passed in a step, and what follows."""
    for finding in findings:
        follows = {"warn": "training continues", "stop": "training ends here", "rollback": f"back to the best by {rl.evaluation.metric}"}
        log.warning("rl: %s; %s", finding.message, follows[finding.action])


def is_due(every: int | None, progress: Progress, rl: RlConfig) -> bool:
    """Return whether what happens every so many steps, and after the last one, happens after this one."""
    return every is not None and (progress.step % every == 0 or progress.is_last(rl))
