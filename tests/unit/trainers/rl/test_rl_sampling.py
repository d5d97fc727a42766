"""Rollouts of a step: resampled groups, the position in the prompt stream, and the order of scoring and forward passes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.config import RlConfig, curve_columns
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.sampling.scoring import DISAGREEMENT, ScorerMetrics, StepScores
from rlhf_core.trainers.rl.collect import Collected, Scored, collect_rollouts, have_variance, resample_groups
from rlhf_core.trainers.rl.metrics import Clock
from rlhf_core.trainers.rl.turns import GpuTimeSharing
from rlhf_core.types import Prompt, RewardComponents, Rollout, Span

NAN = math.nan
SCORERS = [
    {"name": "right", "kind": "exact_match", "weight": 1.0, "normalization": "none"},
    {"name": "watched", "kind": "regex", "weight": 0.0, "normalization": "none", "pattern": "e"},
]


Member = tuple[Rollout, float]  # with its score by `right`


def group(number: int, *scores: float) -> list[Member]:
    prompt = Prompt(str(number), "clerk", [], [5], None)
    return [(Rollout(prompt, [Span([10 + i], [-1.0], 0)], True, number), s) for i, s in enumerate(scores)]


def rollout(score: float, response_ids: list[int], *, finished: bool = True) -> Member:
    prompt = Prompt("1", "clerk", [], [5], None)
    return Rollout(prompt, [Span(response_ids, [-1.0] * len(response_ids), 0)], finished, 1), score


def scored(*groups: list[Member]) -> Scored:
    """Groups of equal sizes; `watched` differs within each of them, but has no weight."""
    rollouts, scores = zip(*(member for group in groups for member in group), strict=True)
    return (
        list(rollouts),
        {
            "right": torch.tensor(scores),
            "watched": torch.tensor([float(i) for group in groups for i in range(len(group))]),
        },
        {},
    )


def config(*, enabled: bool = True, max_rounds: int = 3, minibatch_size: int = 8, **changes) -> RlConfig:
    overrides = {
        "rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.samples_per_step": 8, "rl.reward.scorers": SCORERS,
        "rl.minibatch_size": minibatch_size,
        "rl.dynamic_sampling.enabled": enabled, "rl.dynamic_sampling.max_rounds": max_rounds, **changes,
    }  # fmt: skip
    return tiny_params(**overrides).rl


class Source:
    """Groups by position of their prompt: informative where `good` says so. Remembers its calls."""

    def __init__(self, good: set[int]):
        self.good, self.calls = good, []

    def __call__(self, start: int, count: int, turn: int) -> Scored:
        self.calls.append((start, count, turn))
        return scored(*(group(i, 0.0, 1.0 if i in self.good else 0.0) for i in range(start, start + count)))


def select(source: Source, rl: RlConfig, *, start: int):
    return resample_groups(source, rl, RewardNormalizer(rl.reward), start=start)


def numbers(rollouts: list[Rollout]) -> list[int]:
    """The prompts of groups of two."""
    assert [r.prompt.id for r in rollouts[::2]] == [r.prompt.id for r in rollouts[1::2]]
    return [int(r.prompt.id) for r in rollouts[::2]]


def counts(metrics: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if not name.startswith("drawn_score_")}


@pytest.mark.parametrize(
    ("scores", "informative"),
    [((0.0, 1.0), True), ((1.0, 1.0), False), ((0.0, 0.0), False), ((1.0, NAN), False), ((NAN, NAN), False), ((0.0, NAN, 1.0), True),
     ((math.inf, 1.0), False)],
)  # fmt: skip
def test_a_group_has_variance_where_two_scored_responses_differ(scores, informative):
    rl = config(**{"rl.grpo.group_size": len(scores), "rl.samples_per_step": 2 * len(scores), "rl.minibatch_size": len(scores)})
    assert have_variance(*scored(group(0, *scores))[:2], rl, RewardNormalizer(rl.reward)) == [informative]


LONG = {"rl.rollout.max_new_tokens": 3, "rl.reward.overlong": {"buffer": 2, "penalty": 0.5}}
JUDGED = [
    ("the end penalty tells equal scores apart", {}, [rollout(1.0, [1]), rollout(1.0, [2, 3, 4], finished=False)], True),
    ("without it they are equal", {"rl.reward.no_eos_penalty": 0.0}, [rollout(1.0, [1]), rollout(1.0, [2, 3], finished=False)], False),
    ("so does the penalty for length", LONG, [rollout(1.0, [1]), rollout(1.0, [2, 3])], True),
    ("penalties make unequal scores equal", {}, [rollout(0.0, [1]), rollout(1.0, [2, 3], finished=False)], False),
    ("a mask leaves one", {"rl.reward.mask_truncated": True}, [rollout(0.0, [1]), rollout(1.0, [2, 3], finished=False)], False),
    ("clipping makes them equal", {"rl.reward.clip": 1.0}, [rollout(3.0, [1]), rollout(2.0, [2])], False),
    ("rounding of one response's score is no difference", {}, [rollout(0.1 + 0.2, [1]), rollout(0.3 - 1e-6, [1])], False),
]


@pytest.mark.parametrize(("changes", "members", "informative"), [case[1:] for case in JUDGED], ids=[case[0] for case in JUDGED])
def test_variance_is_that_of_shaped_rewards(changes: dict, members: list[Member], informative: bool):
    rl = config(**changes)
    assert have_variance(*scored(members)[:2], rl, RewardNormalizer(rl.reward)) == [informative]


def test_running_statistics_of_a_copy_judge_groups():
    """Before anything was seen every difference would be clipped: with deviation 0 a score of 1 would be a million."""
    rl = config(**{"rl.reward.scorers": [SCORERS[0] | {"normalization": "running"}, SCORERS[1]]})
    normalizer = RewardNormalizer(rl.reward)
    (rollouts, _, _), _, metrics = resample_groups(
        lambda start, count, _: scored(*(group(i, 1.0, 2.0) for i in range(count))), rl, normalizer, start=0
    )
    assert (len(rollouts), metrics["dropped_groups"]) == (8, 0)
    assert normalizer.moments["right"].count == 0


def test_uninformative_groups_are_replaced_by_the_next_prompts():
    source = Source({10, 12, 15, 16})
    (rollouts, _, _), position, metrics = select(source, config(), start=10)
    # 10 to 13: two are missing; 14 and 15: one is missing; 16
    assert source.calls == [(10, 4, 0), (14, 2, 1), (16, 1, 2)]
    assert numbers(rollouts) == [10, 12, 15, 16]
    assert position == 17
    assert counts(metrics) == {"dynamic_rounds": 3, "dropped_groups": 3}


def test_after_the_last_round_the_rest_is_filled_up_informative_groups_first():
    (rollouts, components, _), position, metrics = select(Source({3}), config(max_rounds=2), start=0)
    assert numbers(rollouts) == [3, 0, 1, 2]
    assert components["right"].tolist() == [0.0, 1.0, *[0.0] * 6]
    assert (position, counts(metrics)) == (7, {"dynamic_rounds": 2, "dropped_groups": 3})


def test_scores_of_all_groups_are_named_beside_those_of_the_groups_that_are_kept():
    rl = config()
    (_, components, _), _, metrics = select(Source({10, 12, 15, 16}), rl, start=10)
    # Seven groups of two, of which four have a score of 1: 4 of 14; of the four groups that are kept 4 of 8. `watched` is 0 and 1 in each.
    assert metrics["drawn_score_mean"] == metrics["drawn_score_right"] == pytest.approx(4 / 14)
    assert metrics["drawn_score_watched"] == 0.5
    assert float(components["right"].mean()) == 0.5
    assert metrics.keys() <= set(curve_columns(rl)) and "drawn_score_mean" not in curve_columns(config(enabled=False))


def test_a_round_that_is_enough_is_the_only_one():
    source = Source(set(range(100)))
    (rollouts, _, _), position, metrics = select(source, config(), start=20)
    assert source.calls == [(20, 4, 0)] and numbers(rollouts) == [20, 21, 22, 23]
    assert (position, counts(metrics)) == (24, {"dynamic_rounds": 1, "dropped_groups": 0})


class RecordingWorkers:
    """Stands in for the actors: rollouts of any prompts, the second prompt's all as good as each other. Remembers the order of calls."""

    def __init__(self):
        self.calls: list[str] = []
        self.rollouts, self.turns = self, GpuTimeSharing(None, None, on=False, deadline=1.0)

    def draw(self, stream: NumberedPrompts, start: int, count: int, **_) -> list[Rollout]:
        self.calls.append("generate")
        return [Rollout(p, [Span([i], [-1.0], 0)], True, number) for number, p in enumerate(stream.take(start, count)) for i in range(2)]

    def generate_greedy(self, prompts: list[Prompt]) -> list[Rollout]:
        self.calls.append("greedy")
        return [Rollout(p, [Span([7, 8], [-1.0, -1.0], 0)], p.id != "1", number) for number, p in enumerate(prompts)]

    def submit_forward(self, rollouts: list[Rollout], *, recomputed_fraction: float, keep_graphs: bool = False) -> list[Rollout]:
        self.calls.append(f"forward {recomputed_fraction}{' keeping graphs' if keep_graphs else ''}")
        return rollouts

    def ask_teachers(self, rollouts: list[Rollout]) -> Callable[[], None]:
        return lambda: None

    def collect_forward(self, rollouts: list[Rollout]) -> dict[str, torch.Tensor]:
        flat = torch.arange(sum(len(r.response_ids) for r in rollouts)).float()
        return {"old_logprobs": flat, "ref_logprobs": flat - 1}

    def submit_scores(self, rollouts: list[Rollout]) -> list[Rollout]:
        self.calls.append("score")
        return rollouts

    def collect_scores(
        self, rollouts: list[Rollout], metrics: ScorerMetrics | None = None, steps: dict[str, StepScores] | None = None
    ) -> RewardComponents:
        self.calls.append("scored")
        if metrics is not None:
            metrics.add("right", {DISAGREEMENT: 0.25, "speed": 3.0}, count=len(rollouts))
        if steps is not None:
            tokens = [[r.response_ids[0]] for r in rollouts]
            steps["right"] = StepScores([[0.5]] * len(rollouts), tokens, [[float(r.prompt.id)] for r in rollouts])
        right = torch.tensor([float(r.prompt.id != "1" and r.response_ids[0]) for r in rollouts])
        return {"right": right, "watched": torch.zeros(len(rollouts))}

    def score(
        self, rollouts: list[Rollout], metrics: ScorerMetrics | None = None, steps: dict[str, StepScores] | None = None
    ) -> RewardComponents:
        return self.collect_scores(self.submit_scores(rollouts), metrics, steps)


class NumberedPrompts:
    def take(self, start: int, count: int) -> list[Prompt]:
        return [Prompt(str(i), "clerk", [], [5], None) for i in range(start, start + count)]

    def after(self, start: int, count: int) -> int:
        return start + count


def collect(workers: RecordingWorkers, rl: RlConfig, *, source: str = "recompute", start: int = 0) -> Collected:
    how = {"step": 0, "prompts_drawn": start, "old_logprobs_source": source, "clock": Clock()}
    return collect_rollouts(workers, NumberedPrompts(), rl, RewardNormalizer(rl.reward), **how)


@pytest.mark.parametrize(
    ("enabled", "minibatch_size", "calls", "prompts"),
    [
        (False, 8, ["generate", "score", "forward 0.5 keeping graphs", "scored"], [0, 1, 2, 3]),
        (False, 4, ["generate", "score", "forward 0.5", "scored"], [0, 1, 2, 3]),
        (True, 8, ["generate", "score", "scored", "generate", "score", "scored", "forward 0.5 keeping graphs"], [0, 2, 3, 4]),
    ],
)
def test_forward_passes_run_beside_text_scorers_unless_scores_choose_the_rollouts(enabled, minibatch_size, calls, prompts):
    workers = RecordingWorkers()
    rl = config(enabled=enabled, minibatch_size=minibatch_size, **{"rl.rollout.recomputed_fraction": 0.5})
    collected = collect(workers, rl)
    assert workers.calls == calls
    assert numbers(collected.rollouts) == prompts
    assert [(r.prompt, r.response_ids) for r in collected.forward] == [(r.prompt, r.response_ids) for r in collected.rollouts]


def test_scores_of_steps_stay_with_their_rollouts_where_groups_are_replaced():
    collected = collect(RecordingWorkers(), config(enabled=True))
    assert [reward for (reward,) in collected.steps["right"].rewards] == [float(r.prompt.id) for r in collected.rollouts]
    assert collected.steps["right"].ends == [[r.response_ids[0]] for r in collected.rollouts]


def test_without_dynamic_sampling_every_group_is_taken_and_the_next_prompt_counted():
    collected = collect(RecordingWorkers(), config(enabled=False), start=8)
    assert numbers(collected.rollouts) == [8, 9, 10, 11]
    assert (collected.prompts_drawn, collected.metrics) == (12, {})


@pytest.mark.parametrize("source", ["from_update", "from_engine"])
def test_the_policy_is_not_computed_before_the_update_unless_it_is_recomputed(source: str):
    workers = RecordingWorkers()
    collect(workers, config(enabled=False), source=source)
    assert "forward 0.0 keeping graphs" in workers.calls


def test_the_disagreement_of_an_ensemble_has_a_column_and_other_figures_stay_with_the_scorer():
    ensemble = {"name": "right", "kind": "reward_model", "path": "x", "members": 2, "weight": 1.0, "normalization": "none"}
    rl = config(enabled=False, **{"rl.reward.scorers": [ensemble, SCORERS[1]]})
    collected = collect(RecordingWorkers(), rl)
    assert collected.metrics == {"disagreement_right": 0.25} and collected.scorer_metrics == {"right.speed": 3.0}
    assert "disagreement_right" in curve_columns(rl)


@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_remax_needs_the_log_probabilities_of_greedy_responses_where_the_kl_is_in_the_reward(placement: str):
    workers = RecordingWorkers()
    fraction = 0.5 if placement == "reward" else 1.0  # with the KL in the loss the old log-probabilities are the update's
    kl = {"rl.kl.placement": placement, "rl.kl.estimator": "k3", "rl.rollout.recomputed_fraction": fraction}
    collected = collect(workers, config(enabled=False, **{"rl.algorithm": "remax", "rl.remax.group_size": 2, **kl}))
    greedy = ["greedy", "score", "scored", *(["forward 1.0"] if placement == "reward" else [])]
    assert workers.calls == ["generate", "score", f"forward {fraction} keeping graphs", "scored", *greedy]
    assert collected.baseline.finished.tolist() == [True, True, False, False, True, True, True, True]
    logprobs = [[0, 1], [0, 1], [2, 3], [2, 3], [4, 5], [4, 5], [6, 7], [6, 7]]
    assert collected.baseline.old_logprobs.tolist() == (logprobs if placement == "reward" else [[0, 0]] * 8)
