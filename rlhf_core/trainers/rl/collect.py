"""Rollouts of a step: generated, scored, and with dynamic sampling resampled until their groups differ in reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import add
from typing import Any

import torch

from rlhf_core.config import RlConfig
from rlhf_core.sampling.rewards import RewardNormalizer, weighted_score
from rlhf_core.sampling.scoring import DISAGREEMENT, ScorerMetrics, StepScores
from rlhf_core.trainers.rl.credit import compared_rewards
from rlhf_core.trainers.rl.data import PromptStream, baseline_of
from rlhf_core.trainers.rl.metrics import Clock, Metrics, dialogue_metrics, finite_mean
from rlhf_core.trainers.rl.taught import Taught
from rlhf_core.trainers.rl.workers import PendingForward, Workers
from rlhf_core.types import Baseline, OldLogprobs, Prompt, RewardComponents, Rollout

Steps = dict[str, StepScores]  # by scorer
Scored = tuple[list[Rollout], RewardComponents, Steps]  # a prompt's rollouts are adjacent


@dataclass(frozen=True)
class Answers:
    """What a step learns from, by engines, environments and scorers.

    rollouts, components: a prompt's rollouts are adjacent.
    steps: scores of process reward models.
    drawn: of each round of generation, also the groups that dynamic sampling replaced.
    baseline: greedy responses to each row's prompt, where the algorithm needs them.
    prompts_drawn: position in the prompt stream.
    taught: of teachers at an address; None without any.
    """

    rollouts: list[Rollout]
    components: RewardComponents
    steps: Steps
    drawn: list[tuple[list[Rollout], RewardComponents]]
    baseline: Baseline | None
    prompts_drawn: int
    metrics: Metrics
    scorer_metrics: dict[str, float]
    taught: Taught | None


@dataclass(frozen=True)
class Collected(Answers):
    """forward: the trainer ranks' forward passes over the rollouts."""

    forward: PendingForward


def collect_again(workers: Workers, answers: Answers, rl: RlConfig, *, old_logprobs_source: OldLogprobs) -> Collected:
    """Start the forward passes over rollouts that were collected before an interruption."""
    return Collected(**vars(answers), forward=workers.submit_forward(answers.rollouts, **_forward_settings(rl, old_logprobs_source)))


def _forward_settings(rl: RlConfig, old_logprobs_source: OldLogprobs) -> dict[str, Any]:
    recomputed = rl.rollout.recomputed_fraction if old_logprobs_source == "recompute" else 0.0
    return {"recomputed_fraction": recomputed, "keep_graphs": rl.one_optimizer_step}


def collect_rollouts(
    workers: Workers,
    prompts: PromptStream,
    rl: RlConfig,
    normalizer: RewardNormalizer,
    *,
    step: int,
    prompts_drawn: int,
    old_logprobs_source: OldLogprobs,
    clock: Clock,
) -> Collected:
    """Generate and score the rollouts of a step, and start the forward passes over them.

    The trainer ranks compute the forward passes while text scorers run, unless dynamic sampling has to know the scores first.

    Args:
        normalizer: its statistics stay as they are.
        prompts_drawn: position in the prompt stream.
    """
    measured, drawn = ScorerMetrics(), []
    settings = _forward_settings(rl, old_logprobs_source)
    if rl.dynamic_sampling.enabled:

        def sample_groups(start: int, count: int, turn: int) -> Scored:
            rollouts = workers.draw(prompts, start, count, step=step, turn=turn)
            clock.lap("generate")
            steps: Steps = {}
            components = workers.score(rollouts, measured, steps)
            clock.lap("score")
            drawn.append((rollouts, components))
            return rollouts, components, steps

        found = resample_groups(sample_groups, rl, normalizer, start=prompts_drawn, after=prompts.after)
        (rollouts, components, steps), prompts_drawn, metrics = found
        rollouts = [replace(rollout, group_id=i // rl.group_size) for i, rollout in enumerate(rollouts)]
    else:
        rollouts = workers.draw(prompts, prompts_drawn, rl.rollout_batch_size, step=step)
        clock.lap("generate")
        workers.turns.trainers(forget=not rl.spec.greedy_baseline)
        scores = workers.submit_scores(rollouts)
        forward, asked = workers.submit_forward(rollouts, **settings), workers.ask_teachers(rollouts)
        steps: Steps = {}
        components = workers.collect_scores(scores, measured, steps)
        clock.lap("score")
        drawn.append((rollouts, components))
        prompts_drawn, metrics = prompts.after(prompts_drawn, rl.rollout_batch_size), {}
    baseline = None
    if rl.spec.greedy_baseline:
        baseline = greedy_baseline(workers, [rollout.prompt for rollout in rollouts[:: rl.group_size]], rl)
        clock.lap("baseline")
    if rl.dynamic_sampling.enabled:
        forward, asked = workers.submit_forward(rollouts, **settings), workers.ask_teachers(rollouts)
    scorer_metrics = measured.means()
    for name in [s.name for s in rl.reward.scorers if s.members > 1]:  # the disagreement of an ensemble has a column of its own
        metrics[f"{DISAGREEMENT}_{name}"] = scorer_metrics.pop(f"{name}.{DISAGREEMENT}", math.nan)
    metrics |= dialogue_metrics(rollouts) if rl.environment is not None else {}
    taught = asked()
    clock.lap("score")
    return Collected(rollouts, components, steps, drawn, baseline, prompts_drawn, metrics, scorer_metrics, taught, forward)


def resample_groups(
    sample_groups: Callable[[int, int, int], Scored],
    rl: RlConfig,
    normalizer: RewardNormalizer,
    *,
    start: int,
    after: Callable[[int, int], int] = add,
) -> tuple[Scored, int, Metrics]:
    """Groups for a step, with those whose rewards have no variance replaced by groups of the next prompts.

    After dynamic_sampling.max_rounds rounds, groups without variance fill the rest, in the order in which they were sampled.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2

    Args:
        sample_groups: position of the first prompt, number of prompts, round from 0 on -> rollouts of each prompt, and their scores.
        normalizer: its statistics stay as they are; running statistics of a copy include all groups sampled so far.
        after: position and number of prompts -> the position behind them.
    Returns:
        The groups, the position after the last prompt, and for the curves counts and mean scores of all groups that were sampled: those of
        the returned ones are not the policy's, since groups that it always or never solves are left out.
    """
    wanted, size, position = rl.rollout_batch_size, rl.group_size, start
    rollouts: list[Rollout] = []
    rounds: list[RewardComponents] = []
    steps: list[Steps] = []
    vary: list[bool] = []
    trial = normalizer.trial()
    while (missing := wanted - sum(vary)) and len(rounds) < rl.dynamic_sampling.max_rounds:
        sampled, scores, of_steps = sample_groups(position, missing, len(rounds))
        steps.append(of_steps)
        vary += have_variance(sampled, scores, rl, trial)
        rollouts += sampled
        rounds.append(scores)
        position = after(position, missing)
    order = sorted(range(len(vary)), key=lambda group: not vary[group])
    rows = [group * size + i for group in order for i in range(size)]
    components = {name: torch.cat([of_round[name] for of_round in rounds])[rows] for name in rounds[0]}
    scores = {"mean": weighted_score(components, rl.reward.scorers), **components}
    means = {f"drawn_score_{name}": finite_mean(values) for name, values in scores.items()}
    rows = rows[: wanted * size]
    of_steps = {name: StepScores.joined([of_round[name] for of_round in steps]).select(rows) for name in steps[0]}
    kept = [rollouts[row] for row in rows], {name: values[: wanted * size] for name, values in components.items()}, of_steps
    return kept, position, {"dynamic_rounds": len(rounds), "dropped_groups": len(vary) - wanted, **means}


def have_variance(rollouts: list[Rollout], components: RewardComponents, rl: RlConfig, normalizer: RewardNormalizer) -> list[bool]:
    """Return whether at least two different responses of each group have different rewards; masked responses don't count.

    The rewards are normalised, clipped and less the length penalties, but not less the KL, which differs between almost any two responses.
    Equal responses count once: their scores may differ by rounding.
    """
    finished, lengths = torch.tensor([r.finished for r in rollouts]), torch.tensor([r.num_sampled for r in rollouts])
    group_ids = torch.arange(len(rollouts)) // rl.group_size
    rewards = compared_rewards(components, finished, lengths, group_ids, rl, normalizer).tolist()
    pairs = [(tuple(rollout.response_ids), reward) for rollout, reward in zip(rollouts, rewards, strict=True)]
    groups = [dict(pairs[i : i + rl.group_size]) for i in range(0, len(pairs), rl.group_size)]
    return [len(set(filter(math.isfinite, group.values()))) > 1 for group in groups]


def greedy_baseline(workers: Workers, prompts: Sequence[Prompt], rl: RlConfig) -> Baseline:
    """The current policy's greedy responses, scored; with log-probabilities of policy and reference where the KL is in the reward."""
    rollouts = workers.rollouts.generate_greedy(prompts)
    components = workers.score(rollouts)
    outputs = {}
    if rl.kl.in_reward:
        outputs = workers.collect_forward(workers.submit_forward(rollouts, recomputed_fraction=1.0))
    return baseline_of(rollouts, components, outputs, copies=rl.group_size)
