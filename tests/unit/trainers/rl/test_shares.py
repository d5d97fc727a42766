"""What each scorer contributes to the advantages: by hand, and as parts that add up for every algorithm."""

from __future__ import annotations

import math

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.algorithms.online import ALGORITHMS
from rlhf_core.config import curve_columns
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.collect import have_variance
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.types import Baseline, Prompt, Rollout, RolloutBatch, Sequences, Span

pytestmark = pytest.mark.filterwarnings("ignore:groups of equal rewards")
NAN = math.nan


def config(algorithm: str, weights: dict[str, float], **changes):
    scorers = [{"name": name, "kind": "regex", "pattern": "x", "weight": weight} for name, weight in weights.items()]
    plain = {"rl.reward.scorers": scorers, "rl.kl.coef": 0.0, "rl.reward.clip": None, "rl.ppo.critic_init": "sft"}
    return tiny_params(**{"rl.algorithm": algorithm, **plain, **changes}).rl


def metrics(rl, scores: dict[str, list[float]], groups: list[int], *, finished: list[bool] | None = None) -> dict[str, float]:
    count = len(groups)
    zeros, mask = torch.zeros(count, 2), torch.ones(count, 2, dtype=torch.bool)
    components = {name: torch.tensor(values, dtype=torch.float64) for name, values in scores.items()}
    ended = torch.tensor(finished or [True] * count)
    baseline = None
    if rl.spec.greedy_baseline:
        zero = {name: torch.zeros(count, dtype=torch.float64) for name in scores}
        baseline = Baseline(zero, torch.ones(count, dtype=torch.bool), torch.full((count,), 2), mask, zeros, zeros)
    batch = RolloutBatch(
        sequences=Sequences.of([[5, 6, 6]] * count, [1] * count), response_ids=zeros.long(), response_mask=mask, rollout_logprobs=zeros,
        old_logprobs_source="recompute", old_logprobs=zeros, sampler_logprobs=zeros, ref_logprobs=zeros, values=zeros,
        turns=zeros.long(), turn_rewards=zeros,
        components=components, baseline=baseline, policy_versions=zeros.long(), group_ids=torch.tensor(groups), finished=ended,
        lengths=torch.full((count,), 2),
    )  # fmt: skip
    return compute_advantages(batch, rl, RewardNormalizer(rl.reward), kl_coef=0.0)[1]


def test_shares_by_hand_of_two_scorers_that_disagree():
    # d_a = 0.5, -0.5; d_b = -1, 1; A = -0.5, 0.5: the sum of d A is -0.5 and 1, of A A 0.5
    found = metrics(config("dr_grpo", {"a": 1.0, "b": 1.0}), {"a": [1.0, 0.0], "b": [0.0, 2.0]}, [0, 0])
    assert found["share_a"] == pytest.approx(-1.0) and found["share_b"] == pytest.approx(2.0)
    assert found["correlation_a.b"] == pytest.approx(-1.0)


def test_weights_count_in_shares_and_not_in_correlations():
    # The sum's deviations are 0.5 * (1, -1) and -0.25 * (2, -2): 0. With weight -0.25 of b they are 0.5 + 0.5 = 1.
    found = metrics(config("dr_grpo", {"a": 1.0, "b": -0.25}), {"a": [1.0, 0.0], "b": [0.0, 4.0]}, [0, 0])
    assert found["share_a"] == pytest.approx(0.5) and found["share_b"] == pytest.approx(0.5)
    assert found["correlation_a.b"] == pytest.approx(-1.0)


def test_with_grpo_each_group_counts_alike_as_its_advantages_are():
    scores, groups = {"a": [1.0, 0.0, 0.0, 0.0], "b": [0.0, 0.0, 10.0, 0.0]}, [0, 0, 1, 1]
    divided = metrics(config("grpo", {"a": 1.0, "b": 1.0}), scores, groups)
    assert divided["share_a"] == pytest.approx(0.5) and divided["share_b"] == pytest.approx(0.5)
    # Undivided, the variances are 0.5 and 50: 1 / 101 and 100 / 101
    undivided = metrics(config("dr_grpo", {"a": 1.0, "b": 1.0}), scores, groups)
    assert undivided["share_a"] == pytest.approx(1 / 101) and undivided["share_b"] == pytest.approx(100 / 101)


def test_gdpo_gives_both_scorers_the_same_share_whatever_their_scales():
    scores, groups = {"a": [0.1, 0.0, 0.1, 0.0], "b": [0.0, 100.0, 0.0, 0.0]}, [0] * 4
    summed, decoupled = (metrics(config(name, {"a": 1.0, "b": 1.0}), scores, groups) for name in ("grpo", "gdpo"))
    assert summed["share_b"] > 0.99
    assert decoupled["share_a"] == pytest.approx(0.5) and decoupled["share_b"] == pytest.approx(0.5)


def test_penalties_have_the_rest_of_the_share():
    # d_a = 1, -1; penalties (1, 0) take 0.5 each: D = 0.5, -0.5. share_a = 2
    changes = {"rl.reward.no_eos_penalty": 1.0}
    found = metrics(config("dr_grpo", {"a": 1.0, "b": 1.0}, **changes), {"a": [2.0, 0.0], "b": [1.0, 1.0]}, [0, 0], finished=[False, True])
    assert found["share_a"] == pytest.approx(2.0) and found["share_b"] == 0.0
    assert math.isnan(found["correlation_a.b"]), "one of them doesn't vary"


@pytest.mark.parametrize("algorithm", tuple(ALGORITHMS))
def test_the_shares_of_every_algorithm_add_up_to_one_without_penalties(algorithm: str):
    generator = torch.Generator().manual_seed(3)
    scores = {name: torch.randn(12, generator=generator).tolist() for name in "abc"}
    scores["b"][4] = NAN
    rl = config(algorithm, {"a": 1.0, "b": 0.5, "c": 2.0})
    found = metrics(rl, scores, [i // 4 for i in range(12)])
    assert sum(found[f"share_{name}"] for name in "abc") == pytest.approx(1.0, abs=1e-6)
    assert {f"correlation_{pair}" for pair in ("a.b", "a.c", "b.c")} < found.keys()
    assert {name for name in found if name.startswith(("share_", "correlation_"))} < set(curve_columns(rl))


def test_a_step_without_advantages_has_no_shares_and_a_single_scorer_no_columns():
    found = metrics(config("grpo", {"a": 1.0, "b": 1.0}), {"a": [1.0, 1.0], "b": [2.0, 2.0]}, [0, 0])
    assert math.isnan(found["share_a"]) and math.isnan(found["share_b"])
    single = config("grpo", {"a": 1.0, "b": 0.0})
    assert not [c for c in (*curve_columns(single), *metrics(single, {"a": [1.0, 0.0], "b": [1.0, 2.0]}, [0, 0])) if c.startswith("share")]


def vary(rl, scores: dict[str, list[float]]) -> list[bool]:
    prompt = Prompt("p", "s", [], [1], None)
    rollouts = [Rollout(prompt, [Span([i], [0.0], 0)], True, group_id=0) for i in range(len(scores["a"]))]
    return have_variance(rollouts, {name: torch.tensor(v) for name, v in scores.items()}, rl, RewardNormalizer(rl.reward))


def test_dynamic_sampling_with_gdpo_judges_the_sum_of_the_normalised_scores():
    enabled = {"rl.dynamic_sampling.enabled": True, "rl.samples_per_step": 12, "rl.minibatch_size": 12}
    summed, decoupled = (config(name, {"a": 1.0, "b": 1.0}, **{f"rl.{name}.group_size": 3, **enabled}) for name in ("grpo", "gdpo"))
    cancels = {"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0, 0.5]}
    assert vary(summed, cancels) == [False] == vary(decoupled, cancels)
    cancels_once_normalised = {"a": [1.0, 0.0, 0.1], "b": [0.0, 2.0, 1.8]}
    assert vary(summed, cancels_once_normalised) == [True]
    assert vary(decoupled, cancels_once_normalised) == [False], "but for a rest of rounding"
    assert vary(decoupled, {"a": [1.0, 0.0, 0.0], "b": [0.0, 0.0, 1.0]}) == [True]
    assert vary(decoupled, {"a": [1.0, 0.0, 0.0], "b": [NAN, 0.0, 0.0]}) == [False], "the response that differs lacks a score"
