"""Which responses a step learns from: drawn, scored, and where asked for drawn again until their groups can teach something."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rlhf_core.config import RlConfig, ScoreConfig
from rlhf_core.trainers.credit import weighted_score
from rlhf_core.trainers.rl_data import Components, PromptStream, components_of
from rlhf_core.trainers.rl_metrics import Clock, Metrics
from rlhf_core.trainers.rl_scoring import DISAGREEMENT, ScorerMetrics
from rlhf_core.trainers.rl_workers import Asked, Workers
from rlhf_core.types import Prompt, ScoredRollout

Group = list[ScoredRollout]


@dataclass(frozen=True)
class Drawn:
    """What a step learns from, a prompt's rollouts next to each other.

    baseline_components: of the greedy response to each row's prompt; empty where the algorithm asks for none.
    prompts_drawn: of the prompt stream, from the run's beginning.
    asked: what the trainer ranks say of them will be there.
    """

    scored: list[ScoredRollout]
    baseline_components: Components
    prompts_drawn: int
    metrics: Metrics
    scorer_metrics: dict[str, float]
    asked: Asked


def draw(workers: Workers, prompts: PromptStream, rl: RlConfig, *, step: int, prompts_drawn: int, share: float, clock: Clock) -> Drawn:
    """A step's rollouts and their scores, of prompts from position `prompts_drawn` on.

    Args:
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

    groups, position, metrics = select_groups(draw_groups, rl, start=prompts_drawn)
    scored = [replace(s, rollout=replace(s.rollout, group_id=i)) for i, group in enumerate(groups) for s in group]
    baseline = {}
    if rl.algorithm == "remax":
        components = greedy_components(workers, [group[0].rollout.prompt for group in groups])
        baseline = {name: scores.repeat_interleave(rl.group_size) for name, scores in components.items()}
        clock.lap("baseline")
    asked = ahead[0] if ahead else workers.ask([s.rollout for s in scored], share=share, learn=rl.one_optimizer_step)
    further = measured.means()
    return Drawn(scored, baseline, position, metrics | take_disagreements(further, rl), further, asked)


def take_disagreements(measured: dict[str, float], rl: RlConfig) -> Metrics:
    """How far the members of each scorer that is an ensemble disagree, taken out of what scorers measured: it has a column of its own."""
    ensembles = [s.name for s in rl.reward.scorers if s.members > 1]
    return {f"{DISAGREEMENT}_{name}": measured.pop(f"{name}.{DISAGREEMENT}", math.nan) for name in ensembles}


def select_groups(draw_groups: Callable[[int, int, int], list[Group]], rl: RlConfig, *, start: int) -> tuple[list[Group], int, Metrics]:
    """Groups for a step, the position after the last prompt that was drawn, and how many were dropped.

    With rl.dynamic_sampling, groups that teach nothing are replaced by those of the next prompts, in at most `max_rounds` rounds. Should
    too few teach something even then, the rest is filled up with the others, in the order in which they came.
    Source: Yu et al. 2025 (DAPO), https://arxiv.org/abs/2503.14476, section 3.2

    Args:
        draw_groups: position of the first prompt, number of prompts, round from 0 on -> a group for each prompt.
    """
    wanted, position = rl.rollout_batch_size, start
    if not rl.dynamic_sampling.enabled:
        return draw_groups(position, wanted, 0), position + wanted, {}
    informative: list[Group] = []
    others: list[Group] = []
    rounds = 0
    while len(informative) < wanted and rounds < rl.dynamic_sampling.max_rounds:
        missing = wanted - len(informative)
        for group in draw_groups(position, missing, rounds):
            (informative if is_informative(group, rl.reward) else others).append(group)
        position += missing
        rounds += 1
    chosen = [*informative, *others][:wanted]
    return chosen, position, {"dynamic_rounds": rounds, "dropped_groups": position - start - wanted}


def is_informative(group: Group, config: ScoreConfig) -> bool:
    """Whether at least two of a group's responses have different scores; those without one don't count."""
    scores = weighted_score(components_of(group), config.scorers)
    return len(scores[scores.isfinite()].unique()) > 1


def greedy_components(workers: Workers, prompts: Sequence[Prompt]) -> Components:
    """Scores of the current policy's greedy responses."""
    return components_of(workers.score(workers.rollouts.generate_greedy(prompts)))
