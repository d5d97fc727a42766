"""Which responses a step learns from: drawn, scored, and where asked for drawn again until their groups can teach something."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from rlhf_core.config import RlConfig
from rlhf_core.sampling.scoring import DISAGREEMENT, RewardNormalizer, ScorerMetrics
from rlhf_core.trainers.rl.advantages import shaped_rewards
from rlhf_core.trainers.rl.data import Components, PromptStream, baseline_of, components_of
from rlhf_core.trainers.rl.metrics import Clock, Metrics
from rlhf_core.trainers.rl.workers import Asked, Workers
from rlhf_core.types import Baseline, Prompt, ScoredRollout

Group = list[ScoredRollout]


@dataclass(frozen=True)
class Drawn:
    """What a step learns from, a prompt's rollouts next to each other.

    baseline: of the greedy response to each row's prompt; None where the algorithm asks for none.
    prompts_drawn: of the prompt stream, from the run's beginning.
    asked: what the trainer ranks say of them will be there.
    """

    scored: list[ScoredRollout]
    baseline: Baseline | None
    prompts_drawn: int
    metrics: Metrics
    scorer_metrics: dict[str, float]
    asked: Asked


def draw(
    workers: Workers,
    prompts: PromptStream,
    rl: RlConfig,
    normalizer: RewardNormalizer,
    *,
    step: int,
    prompts_drawn: int,
    share: float,
    clock: Clock,
) -> Drawn:
    """A step's rollouts and their scores, of prompts from position `prompts_drawn` on.

    Args:
        normalizer: for what groups can teach; it doesn't move.
        share: of which the trainer's policy is asked; see `Workers.ask`. The trainer looks at rollouts while they are scored, unless it
            takes scores to know which of them are of any use.
    """
    measured = ScorerMetrics()
    ahead: list[Asked] = []

    def draw_groups(start: int, count: int, turn: int) -> list[Group]:
        rollouts = workers.rollouts.generate(prompts.take(start, count), step=step, turn=turn)
        clock.lap("generate")

        def look() -> None:
            if not rl.dynamic_sampling.enabled:
                ahead.append(workers.ask(rollouts, share=share, learn=rl.one_optimizer_step))

        scored = workers.score(rollouts, measured, meanwhile=look)
        clock.lap("score")
        return [scored[i : i + rl.group_size] for i in range(0, len(scored), rl.group_size)]

    groups, position, metrics = select_groups(draw_groups, rl, normalizer, start=prompts_drawn)
    scored = [replace(s, rollout=replace(s.rollout, group_id=i)) for i, group in enumerate(groups) for s in group]
    baseline = None
    if rl.algorithm == "remax":
        baseline = greedy_baseline(workers, [group[0].rollout.prompt for group in groups], rl)
        clock.lap("baseline")
    asked = ahead[0] if ahead else workers.ask([s.rollout for s in scored], share=share, learn=rl.one_optimizer_step)
    further = measured.means()
    return Drawn(scored, baseline, position, metrics | take_disagreements(further, rl), further, asked)


def take_disagreements(measured: dict[str, float], rl: RlConfig) -> Metrics:
    """How far the members of each scorer that is an ensemble disagree, taken out of what scorers measured: it has a column of its own."""
    ensembles = [s.name for s in rl.reward.scorers if s.members > 1]
    return {f"{DISAGREEMENT}_{name}": measured.pop(f"{name}.{DISAGREEMENT}", math.nan) for name in ensembles}


def select_groups(
    draw_groups: Callable[[int, int, int], list[Group]], rl: RlConfig, normalizer: RewardNormalizer, *, start: int
) -> tuple[list[Group], int, Metrics]:
    """Groups for a step, the position after the last prompt that was drawn, and how many were dropped.

    With rl.dynamic_sampling, groups that teach nothing are replaced by those of the next prompts, in at most `max_rounds` rounds. Should
    too few teach something even then, the rest is filled up with the others, in the order in which they came.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2

    Args:
        draw_groups: position of the first prompt, number of prompts, round from 0 on -> a group for each prompt.
        normalizer: it doesn't move; running statistics are judged by as they are with all that was drawn so far.
    """
    wanted, position = rl.rollout_batch_size, start
    if not rl.dynamic_sampling.enabled:
        return draw_groups(position, wanted, 0), position + wanted, {}
    informative: list[Group] = []
    others: list[Group] = []
    rounds, trial = 0, normalizer.trial()
    while len(informative) < wanted and rounds < rl.dynamic_sampling.max_rounds:
        missing = wanted - len(informative)
        drawn = draw_groups(position, missing, rounds)
        for group, teaches in zip(drawn, are_informative(drawn, rl, trial), strict=True):
            (informative if teaches else others).append(group)
        position += missing
        rounds += 1
    chosen = [*informative, *others][:wanted]
    return chosen, position, {"dynamic_rounds": rounds, "dropped_groups": position - start - wanted}


def are_informative(groups: list[Group], rl: RlConfig, normalizer: RewardNormalizer) -> list[bool]:
    """Whether at least two different responses of each group have different rewards; those that are masked don't count.

    The rewards are those that are learned from: normalised, clipped, less the penalties. Not less the KL, which tells almost any two
    responses apart. The same response twice says nothing, though its scores may differ by rounding.
    """
    scored = [s for group in groups for s in group]
    finished = torch.tensor([s.rollout.finished for s in scored])
    lengths = torch.tensor([len(s.rollout.response_ids) for s in scored])
    rewards = iter(shaped_rewards(components_of(scored), finished, lengths, rl, normalizer).tolist())
    by_response = [{tuple(s.rollout.response_ids): next(rewards) for s in group} for group in groups]
    return [len({reward for reward in group.values() if math.isfinite(reward)}) > 1 for group in by_response]


def greedy_baseline(workers: Workers, prompts: Sequence[Prompt], rl: RlConfig) -> Baseline:
    """Of the current policy's greedy responses: scores, and where the KL is in the reward what policy and reference say of them."""
    scored = _scored_greedily(workers, prompts)
    outputs = workers.forward(workers.ask([s.rollout for s in scored], share=1.0)) if rl.kl.in_reward else {}
    return baseline_of(scored, outputs, copies=rl.group_size)


def greedy_components(workers: Workers, prompts: Sequence[Prompt]) -> Components:
    """Scores of the current policy's greedy responses."""
    return components_of(_scored_greedily(workers, prompts))


def _scored_greedily(workers: Workers, prompts: Sequence[Prompt]) -> list[ScoredRollout]:
    return workers.score(workers.rollouts.generate_greedy(prompts))
