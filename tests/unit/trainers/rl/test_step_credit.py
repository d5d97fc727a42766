"""Rewards of steps: where PPO and REINFORCE++ have them, and what group methods compare."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.config import RlConfig
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.sampling.scoring import StepScores
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.data import collate, pack
from rlhf_core.types import Prompt, Rollout, RolloutBatch, Span

PLAIN = {"name": "prm", "kind": "reward_model", "path": "x", "weight": 2.0, "normalization": "none"}


def rl(algorithm: str, **changes) -> RlConfig:
    fixed = {"rl.kl.coef": 0.0, "rl.kl.target": None, "rl.reward.clip": None, "rl.reward.no_eos_penalty": 0.0}
    own = {"rl.ppo.critic_init": "sft", "rl.ppo.whiten_advantages": False} if algorithm == "ppo" else {}
    return tiny_params(**{"rl.algorithm": algorithm, "rl.reward.scorers": [PLAIN], **fixed, **own, **changes}).rl


def batch_of(*lengths: int, scores: list[float], steps: StepScores, values: list[list[float]] | None = None) -> RolloutBatch:
    prompt = Prompt("p", "made", [], [5], None)
    rollouts = [Rollout(prompt, [Span([6] * n, [0.0] * n, 0)], True, 0) for n in lengths]
    outputs = {"old_logprobs": torch.zeros(sum(lengths)), "ref_logprobs": torch.zeros(sum(lengths))}
    batch = collate(rollouts, pack(rollouts), {"prm": torch.tensor(scores)}, outputs, None, old_logprobs_source="recompute",
                    steps={"prm": steps})  # fmt: skip
    return batch if values is None else replace(batch, values=torch.tensor(values))


THREE = StepScores([[0.9, 0.4, 0.7]], [[1, 2, 4]], [[0.9, 0.4, 0.7]])  # sum: 2.0


def advantages(batch: RolloutBatch, config: RlConfig):
    return compute_advantages(batch, config, RewardNormalizer(config.reward), kl_coef=0.0)


def test_scores_of_steps_are_at_the_tokens_that_end_them():
    batch = batch_of(5, 2, scores=[2.0, 0.3], steps=StepScores([[], [0.3]], [[1, 2, 4], [1]], [[0.9, 0.4, 0.7], [0.3]]))
    torch.testing.assert_close(batch.step_rewards["prm"], torch.tensor([[0.0, 0.9, 0.4, 0.0, 0.7], [0.0, 0.3, 0.0, 0.0, 0.0]]))


def test_two_steps_that_end_at_one_token_add_up():
    batch = batch_of(3, scores=[1.3], steps=StepScores([[0.9, 0.4]], [[2, 2]], [[0.9, 0.4]]))
    torch.testing.assert_close(batch.step_rewards["prm"], torch.tensor([[0.0, 0.0, 1.3]]))


def test_gae_by_hand_with_rewards_at_steps():
    """CORRECTNESS, reward placement."""
    config = rl("ppo", **{"rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 0.5})
    train, metrics = advantages(batch_of(5, scores=[2.0], steps=THREE, values=[[1.0, 1.0, 0.0, 0.0, 1.0]]), config)
    # Weight 2: rewards 0, 1.8, 0.8, 0, 1.4.  d4 = 0.4, d3 = 1, d2 = 0.8, d1 = 1.8 + 0 - 1 = 0.8, d0 = 0
    # A4 = 0.4, A3 = 1 + 0.2 = 1.2, A2 = 0.8 + 0.6 = 1.4, A1 = 0.8 + 0.7 = 1.5, A0 = 0.75
    torch.testing.assert_close(train.advantages, torch.tensor([[0.75, 1.5, 1.4, 1.2, 0.4]]))
    assert metrics["reward_mean"] == pytest.approx(4.0)


def test_what_normalisation_subtracts_belongs_to_the_last_token():
    scorer = PLAIN | {"normalization": "initial", "weight": 1.0}
    config = rl("reinforce_pp", **{"rl.reward.scorers": [scorer]})
    normalizer = RewardNormalizer(config.reward)
    normalizer.calibrate({"prm": torch.tensor([1.0, 3.0])})  # mean 2, std 1 or sqrt(2) by its definition
    mean, std = normalizer.location_and_spread(config.reward.scorers[0])
    train, _ = compute_advantages(batch_of(5, scores=[2.0], steps=THREE), config, normalizer, kl_coef=0.0)
    to_go = torch.tensor([0.0, 0.0, -0.9, -1.3, -1.3]) / std + (2.0 - mean) / std  # of 0.9, 0.4, 0 and 0.7 - 2
    torch.testing.assert_close(train.advantages, ((to_go - to_go.mean()) / to_go.std())[None], rtol=1e-4, atol=1e-4)


def test_group_methods_compare_the_whole_score_whatever_the_steps():
    config = rl("grpo", **{"rl.grpo.group_size": 2, "rl.samples_per_step": 8, "rl.minibatch_size": 8})
    steps = StepScores([[0.9, 0.4, 0.7], [0.5]], [[1, 2, 4], [1]], [[0.9, 0.4, 0.7], [0.5]])
    found = advantages(batch_of(5, 2, scores=[2.0, 0.5], steps=steps), config)[0].advantages
    bare = replace(batch_of(5, 2, scores=[2.0, 0.5], steps=steps), step_rewards={})
    torch.testing.assert_close(found, advantages(bare, config)[0].advantages)


def test_a_response_without_a_score_learns_nothing_from_its_steps():
    steps = StepScores([[0.9], []], [[1], []], [[0.9], []])
    train, _ = advantages(batch_of(3, 3, scores=[0.9, float("nan")], steps=steps), rl("reinforce_pp"))
    assert not train.response_mask[1].any() and (train.advantages[1] == 0).all()
