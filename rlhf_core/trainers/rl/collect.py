"""Rollouts of a step: generated, scored, and with dynamic sampling resampled until their groups differ in reward."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rlhf_core.config import RlConfig
from rlhf_core.sampling.scoring import DISAGREEMENT, RewardNormalizer, ScorerMetrics, weighted_score
from rlhf_core.trainers.rl.advantages import shaped_rewards
from rlhf_core.trainers.rl.data import PromptStream, baseline_of, components_of
from rlhf_core.trainers.rl.metrics import Clock, Metrics, finite_mean
from rlhf_core.trainers.rl.workers import PendingForward, Workers
from rlhf_core.types import Baseline, OldLogprobs, Prompt, ScoredRollout

Group = list[ScoredRollout]


@dataclass(frozen=True)
class Collected:
    """What a step learns from.

    scored: a prompt's rollouts are adjacent.
    baseline: greedy responses to each row's prompt, for remax.
    prompts_drawn: prompts taken from the stream since the run began.
    forward: the trainer ranks' forward passes over the rollouts.
    """

    scored: list[ScoredRollout]
    baseline: Baseline | None
    prompts_drawn: int
    metrics: Metrics
    scorer_metrics: dict[str, float]
    forward: PendingForward


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
    measured = ScorerMetrics()
    recomputed = rl.rollout.recomputed_fraction if old_logprobs_source == "recompute" else 0.0
    how = {"recomputed_fraction": recomputed, "keep_graphs": rl.one_optimizer_step}
    if rl.dynamic_sampling.enabled:

        def sample_groups(start: int, count: int, turn: int) -> list[Group]:
            rollouts = workers.rollouts.generate(prompts.take(start, count), step=step, turn=turn)
            clock.lap("generate")
            scored = workers.score(rollouts, measured)
            clock.lap("score")
            return [scored[i : i + rl.group_size] for i in range(0, len(scored), rl.group_size)]

        groups, prompts_drawn, metrics = resample_groups(sample_groups, rl, normalizer, start=prompts_drawn)
        scored = [replace(s, rollout=replace(s.rollout, group_id=i)) for i, group in enumerate(groups) for s in group]
    else:
        rollouts = workers.rollouts.generate(prompts.take(prompts_drawn, rl.rollout_batch_size), step=step)
        clock.lap("generate")
        workers.turns.trainers(forget=rl.algorithm != "remax")
        scores = workers.submit_scores(rollouts)
        forward = workers.submit_forward(rollouts, **how)
        scored = workers.collect_scores(scores, measured)
        clock.lap("score")
        prompts_drawn, metrics = prompts_drawn + rl.rollout_batch_size, {}
    baseline = None
    if rl.algorithm == "remax":
        baseline = greedy_baseline(workers, [s.rollout.prompt for s in scored[:: rl.group_size]], rl)
        clock.lap("baseline")
    if rl.dynamic_sampling.enabled:
        forward = workers.submit_forward([s.rollout for s in scored], **how)
    scorer_metrics = measured.means()
    for name in [s.name for s in rl.reward.scorers if s.members > 1]:  # the disagreement of an ensemble has a column of its own
        metrics[f"{DISAGREEMENT}_{name}"] = scorer_metrics.pop(f"{name}.{DISAGREEMENT}", math.nan)
    return Collected(scored, baseline, prompts_drawn, metrics, scorer_metrics, forward)


def resample_groups(
    sample_groups: Callable[[int, int, int], list[Group]], rl: RlConfig, normalizer: RewardNormalizer, *, start: int
) -> tuple[list[Group], int, Metrics]:
    """Groups for a step, with those whose rewards have no variance replaced by groups of the next prompts.

    After dynamic_sampling.max_rounds rounds, groups without variance fill the rest, in the order in which they were sampled.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2

    Args:
        sample_groups: position of the first prompt, number of prompts, round from 0 on -> a group for each prompt.
        normalizer: its statistics stay as they are; running statistics of a copy include all groups sampled so far.
    Returns:
        The groups, the position after the last prompt, and for the curves counts and mean scores of all groups that were sampled: those of
        the returned ones are not the policy's, since groups that it always or never solves are left out.
    """
    wanted, position = rl.rollout_batch_size, start
    informative: list[Group] = []
    others: list[Group] = []
    rounds, trial = 0, normalizer.trial()
    while len(informative) < wanted and rounds < rl.dynamic_sampling.max_rounds:
        missing = wanted - len(informative)
        groups = sample_groups(position, missing, rounds)
        for group, varies in zip(groups, have_variance(groups, rl, trial), strict=True):
            (informative if varies else others).append(group)
        position += missing
        rounds += 1
    sampled = [*informative, *others]
    components = components_of([s for group in sampled for s in group])
    scores = {"mean": weighted_score(components, rl.reward.scorers), **components}
    means = {f"drawn_score_{name}": finite_mean(values) for name, values in scores.items()}
    return sampled[:wanted], position, {"dynamic_rounds": rounds, "dropped_groups": position - start - wanted, **means}


def have_variance(groups: list[Group], rl: RlConfig, normalizer: RewardNormalizer) -> list[bool]:
    """Whether at least two different responses of each group have different rewards; masked responses don't count.

    The rewards are normalised, clipped and less the length penalties, but not less the KL, which differs between almost any two responses.
    Equal responses count once: their scores may differ by rounding.
    """
    scored = [s for group in groups for s in group]
    finished = torch.tensor([s.rollout.finished for s in scored])
    lengths = torch.tensor([s.rollout.num_sampled for s in scored])
    rewards = iter(shaped_rewards(components_of(scored), finished, lengths, rl, normalizer).tolist())
    by_response = [{tuple(s.rollout.response_ids): next(rewards) for s in group} for group in groups]
    return [len({reward for reward in group.values() if math.isfinite(reward)}) > 1 for group in by_response]


def greedy_baseline(workers: Workers, prompts: Sequence[Prompt], rl: RlConfig) -> Baseline:
    """The current policy's greedy responses, scored; with log-probabilities of policy and reference where the KL is in the reward."""
    scored = workers.score(workers.rollouts.generate_greedy(prompts))
    outputs = {}
    if rl.kl.in_reward:
        outputs = workers.collect_forward(workers.submit_forward([s.rollout for s in scored], recomputed_fraction=1.0))
    return baseline_of(scored, outputs, copies=rl.group_size)
