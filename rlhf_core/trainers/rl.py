"""The online RL loop: one controller, which runs as a Ray job; workers hold the models.

python -m rlhf_core.trainers.rl <job.json>
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
import time
from pathlib import Path

from rlhf_core.config import RlConfig
from rlhf_core.quiet import be_quiet, show_own_log
from rlhf_core.trainers.credit import RewardNormalizer, assign_credit
from rlhf_core.trainers.rl_data import PromptStream, collate, rollout_batch_metrics
from rlhf_core.trainers.rl_job import REFUSED, RlJob
from rlhf_core.trainers.rl_workers import Workers
from rlhf_core.types import RolloutBatch

log = logging.getLogger("rlhf")

STOPPED = 143  # exit code after SIGTERM, the checkpoint written
CURVES = (
    "step", "score_mean", "score_std", "reward_mean", "kl_mean", "entropy", "response_length", "cut_off_fraction", "unscored_fraction",
    "policy_loss", "value_loss", "clip_frac", "approx_kl", "grad_norm", "critic_grad_norm", "explained_variance", "logprob_difference",
)  # fmt: skip


class LogprobMismatch(RuntimeError):
    """The sampling engine and the trainer disagree about the same tokens: stale weights, or different arithmetic."""


class TooManyUnscored(RuntimeError):
    """The reward model had no answer for too many responses."""


def main() -> int:
    show_own_log()
    be_quiet()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    job = RlJob.read(Path(sys.argv[1]))
    try:
        with Workers(job) as workers:
            finished = train(job, workers, stop)
            if finished:
                workers.export(job.output)
    except (LogprobMismatch, TooManyUnscored, ValueError) as error:
        log.error("%s", error)
        return REFUSED
    return 0 if finished else STOPPED


def train(job: RlJob, workers: Workers, stop: threading.Event) -> bool:
    """Every step from the last checkpoint to the end. False: stopped by a signal, with the state saved."""
    rl = job.rl
    prompts = PromptStream(job)
    normalizer = RewardNormalizer(rl.reward)
    step = workers.resume(normalizer)
    if step > 0:
        log.info("rl: going on from the checkpoint of step %d", step)
    else:
        normalizer.calibrate(workers.calibration_scores(prompts))
    curves = workers.open_curves(CURVES, first_step=step)
    stopping = False
    while step < rl.steps and not stopping:
        clock = Clock()
        rollouts = workers.generate(prompts.batch(step), step=step)
        clock.lap("generate")
        scored = workers.score(rollouts)
        clock.lap("score")
        batch = collate(scored, workers.forward(rollouts), prompts.pad_id)
        check_scored(batch, rl, step=step)
        difference = check_logprobs(batch, rl, step=step)
        clock.lap("forward")
        train_batch, credit_metrics = assign_credit(batch, rl, normalizer)
        clock.lap("credit")
        update_metrics = workers.update(train_batch, step=step)
        clock.lap("update")
        workers.sync_weights(version=step + 1)
        clock.lap("sync")
        step += 1
        row = {"step": step, **rollout_batch_metrics(batch), **credit_metrics, **update_metrics, "logprob_difference": difference}
        stopping = stop.is_set()
        if step == rl.steps or stopping or step % rl.checkpoint_every == 0:
            workers.checkpoint(step, normalizer)
        clock.lap("other")
        curves.log(row, clock.timings(samples=rl.samples_per_step))
        log.info("%s", progress_line(row, rl, clock))
    curves.close()
    return step == rl.steps


def check_scored(batch: RolloutBatch, rl: RlConfig, *, step: int) -> None:
    """Unscored responses are masked and counted; too many of them mean that the reward is broken.

    Raises:
        TooManyUnscored: their share is above rl.reward.max_unscored_fraction, or nothing was scored.
    """
    unscored = int((~batch.scores.isfinite()).sum()) / len(batch.scores)
    if unscored > rl.reward.max_unscored_fraction or unscored == 1.0:
        raise TooManyUnscored(
            f"step {step}: expected at most rl.reward.max_unscored_fraction={rl.reward.max_unscored_fraction} of the responses "
            f"without a finite score, got {unscored:.3g}; are they too long for the reward model, or are its weights broken?"
        )


def check_logprobs(batch: RolloutBatch, rl: RlConfig, *, step: int) -> float:
    """Largest difference, in nats, between the sampling engine's and the trainer's log-probability of a sampled token.

    Raises:
        LogprobMismatch: it is above rl.rollout.max_logprob_difference.
    """
    difference = float((batch.rollout_logprobs - batch.old_logprobs)[batch.response_mask].abs().max())
    if not difference <= rl.rollout.max_logprob_difference:
        raise LogprobMismatch(
            f"step {step}: expected vLLM's and the trainer's log-probabilities to differ by at most rl.rollout.max_logprob_difference="
            f"{rl.rollout.max_logprob_difference}, got {difference:.3g}; if the weights are in sync, the arithmetic differs "
            "(bfloat16?): raise the limit"
        )
    return difference


class Clock:
    """Where a step's time goes, in seconds per phase."""

    def __init__(self):
        self._start = self._last = time.perf_counter()
        self._laps: dict[str, float] = {}

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._laps[phase] = now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return self._last - self._start

    def timings(self, *, samples: int) -> dict[str, float]:
        return {"seconds": self.total, "samples_per_second": samples / self.total, **{f"seconds_{k}": v for k, v in self._laps.items()}}

    def __str__(self) -> str:
        return " ".join(f"{phase} {seconds:.2f}" for phase, seconds in self._laps.items())


def progress_line(row: dict[str, float], rl: RlConfig, clock: Clock) -> str:
    rate = rl.samples_per_step / clock.total
    return (
        f"rl {row['step']}/{rl.steps}  score {row['score_mean']:.3f}  kl {row['kl_mean']:.3f}  length {row['response_length']:.1f}  "
        f"entropy {row['entropy']:.2f}  {rate:.0f} samples/s  ({clock} s)"
    )


if __name__ == "__main__":
    sys.exit(main())
