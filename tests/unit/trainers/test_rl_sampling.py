"""Which groups a step learns from, how often it draws, where the prompt stream goes on, and when the trainer looks at responses."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from tiny_models import tiny_params

from rlhf_core.config import RlConfig, curve_columns
from rlhf_core.trainers.rl_metrics import Clock
from rlhf_core.trainers.rl_sampling import draw, is_informative, select_groups, take_disagreements
from rlhf_core.types import Prompt, Rollout, ScoredRollout

NAN = math.nan
SCORERS = [
    {"name": "right", "kind": "exact_match", "weight": 1.0, "normalization": "none"},
    {"name": "watched", "kind": "regex", "weight": 0.0, "normalization": "none", "pattern": "e"},
]


def group(number: int, *scores: float) -> list[ScoredRollout]:
    prompt = Prompt(str(number), "clerk", [], [5], None)
    watched = iter(range(100))  # differs within every group, but has no weight
    return [ScoredRollout(Rollout(prompt, [1], [-1.0], True, number, 0), {"right": s, "watched": float(next(watched))}) for s in scores]


def config(*, enabled: bool = True, max_rounds: int = 3, minibatch_size: int = 8) -> RlConfig:
    overrides = {
        "rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.samples_per_step": 8, "rl.reward.scorers": SCORERS,
        "rl.minibatch_size": minibatch_size,
        "rl.dynamic_sampling.enabled": enabled, "rl.dynamic_sampling.max_rounds": max_rounds,
    }  # fmt: skip
    return tiny_params(**overrides).rl


class Source:
    """Groups by position of their prompt: informative where `good` says so. Remembers what was asked of it."""

    def __init__(self, good: set[int]):
        self.good, self.asked = good, []

    def __call__(self, start: int, count: int, turn: int) -> list[list[ScoredRollout]]:
        self.asked.append((start, count, turn))
        return [group(i, 0.0, 1.0 if i in self.good else 0.0) for i in range(start, start + count)]


def numbers(groups: list[list[ScoredRollout]]) -> list[int]:
    return [int(g[0].rollout.prompt.id) for g in groups]


@pytest.mark.parametrize(
    ("scores", "informative"),
    [((0.0, 1.0), True), ((1.0, 1.0), False), ((0.0, 0.0), False), ((1.0, NAN), False), ((NAN, NAN), False), ((0.0, NAN, 1.0), True),
     ((math.inf, 1.0), False)],
)  # fmt: skip
def test_a_group_teaches_something_where_two_scored_responses_differ(scores, informative):
    assert is_informative(group(0, *scores), config().reward) == informative


def test_uninformative_groups_are_replaced_by_the_next_prompts():
    source = Source({10, 12, 15, 16})
    groups, position, metrics = select_groups(source, config(), start=10)
    # 10 to 13: two are missing; 14 and 15: one is missing; 16
    assert source.asked == [(10, 4, 0), (14, 2, 1), (16, 1, 2)]
    assert numbers(groups) == [10, 12, 15, 16]
    assert position == 17
    assert metrics == {"dynamic_rounds": 3, "dropped_groups": 3}


def test_after_the_last_round_the_rest_is_filled_up_informative_groups_first():
    groups, position, metrics = select_groups(Source({3}), config(max_rounds=2), start=0)
    assert numbers(groups) == [3, 0, 1, 2]
    assert (position, metrics) == (7, {"dynamic_rounds": 2, "dropped_groups": 3})


def test_a_round_that_is_enough_is_the_only_one():
    source = Source(set(range(100)))
    groups, position, metrics = select_groups(source, config(), start=20)
    assert source.asked == [(20, 4, 0)] and numbers(groups) == [20, 21, 22, 23]
    assert (position, metrics) == (24, {"dynamic_rounds": 1, "dropped_groups": 0})


def test_without_dynamic_sampling_every_group_is_taken_as_it_comes():
    source = Source({2})
    groups, position, metrics = select_groups(source, config(enabled=False), start=8)
    assert source.asked == [(8, 4, 0)] and numbers(groups) == [8, 9, 10, 11]
    assert (position, metrics) == (12, {})


def test_the_disagreement_of_an_ensemble_has_a_column_and_a_scorers_own_figures_stay():
    ensemble = {"name": "both", "kind": "reward_model", "path": "x", "members": 2, "weight": 1.0, "normalization": "none"}
    mine = {"name": "mine", "kind": "function", "path": "f.py:f", "weight": 0.0, "normalization": "none"}
    rl = tiny_params(**{"rl.reward.scorers": [ensemble, mine]}).rl
    measured = {"both.disagreement": 0.25, "mine.disagreement": 3.0}
    assert take_disagreements(measured, rl) == {"disagreement_both": 0.25} and measured == {"mine.disagreement": 3.0}
    assert math.isnan(take_disagreements({}, rl)["disagreement_both"]) and "disagreement_both" in curve_columns(rl)


class RecordingWorkers:
    """Stands in for the actors: rollouts of any prompts, the second prompt's all as good as each other. Remembers the order of calls."""

    def __init__(self):
        self.calls: list[str] = []
        self.rollouts = self

    def generate(self, prompts: list[Prompt], **_) -> list[Rollout]:
        self.calls.append("generate")
        return [Rollout(p, [i], [-1.0], True, number, 0) for number, p in enumerate(prompts) for i in range(2)]

    def ask(self, rollouts: list[Rollout], *, share: float, learn: bool) -> list[Rollout]:
        self.calls.append(f"ask {share} {'to learn' if learn else 'only'}")
        return rollouts

    def score(self, rollouts: list[Rollout], _, *, meanwhile: Callable[[], None]) -> list[ScoredRollout]:
        meanwhile()
        self.calls.append("score")
        return [ScoredRollout(r, {"right": float(r.prompt.id != "1" and r.response_ids[0]), "watched": 0.0}) for r in rollouts]


class NumberedPrompts:
    def take(self, start: int, count: int) -> list[Prompt]:
        return [Prompt(str(i), "clerk", [], [5], None) for i in range(start, start + count)]


@pytest.mark.parametrize(
    ("enabled", "minibatch_size", "calls", "prompts"),
    [
        (False, 8, ["generate", "ask 0.5 to learn", "score"], [0, 1, 2, 3]),
        (False, 4, ["generate", "ask 0.5 only", "score"], [0, 1, 2, 3]),
        (True, 8, ["generate", "score", "generate", "score", "ask 0.5 to learn"], [0, 2, 3, 4]),
    ],
)
def test_the_trainer_looks_at_responses_while_they_are_scored_unless_scores_choose_them(enabled, minibatch_size, calls, prompts):
    workers = RecordingWorkers()
    rl = config(enabled=enabled, minibatch_size=minibatch_size)
    drawn = draw(workers, NumberedPrompts(), rl, step=0, prompts_drawn=0, share=0.5, clock=Clock())
    assert workers.calls == calls
    assert numbers([drawn.scored[i : i + 2] for i in range(0, 8, 2)]) == prompts
    assert [(r.prompt, r.response_ids) for r in drawn.asked] == [(s.rollout.prompt, s.rollout.response_ids) for s in drawn.scored]
