"""Rewards by turn and turns that aren't learned from, from an episode's rollout to its advantages, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tiny_models import tiny_params

from rlhf_core.config import RlConfig
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.data import collate, pack
from rlhf_core.types import Dialogue, Prompt, Rollout, RolloutBatch, Span

PROMPT = Prompt("p", "made", [], [5, 6], None)


def span(count: int, version: int | None, *, trained: bool = True) -> Span:
    return Span([7] * count, [0.0] * count, version, trained=trained and version is not None)


def episode(spans: list[Span], rewards: list[float], score: float) -> Rollout:
    sampled = [s.version is not None for s in spans for _ in s.ids]
    turns = Dialogue([], 0, sampled, 0, score, rewards, False, turns=len(rewards), calls=0, failed_calls=0)
    return Rollout(PROMPT, spans, True, 0, turns)


# A reply of two tokens, a tool's token, a reply of two tokens whose second is of a newer policy; 0.5 of the score 2 after the first
TWO_TURNS = episode([span(2, 3), span(1, None), span(1, 3), span(1, 4)], [0.5, 0.0], 2.0)
ONE_TURN = episode([span(2, 4)], [0.0], 0.0)


def rl(algorithm: str, credit: str = "turn", **changes) -> RlConfig:
    scorer = {"name": "environment", "kind": "environment", "weight": 2.0, "normalization": "none"}
    environment = {"path": f"{__file__}:play", "credit": credit}
    plain = {"rl.reward.scorers": [scorer], "rl.environment": environment, "rl.kl.coef": 0.0, "rl.reward.clip": None}
    return tiny_params(**{"rl.algorithm": algorithm, "rl.ppo.whiten_advantages": False, "rl.ppo.critic_init": "sft", **plain, **changes}).rl


def batch_of(*episodes: Rollout, values: list[list[float]] | None = None) -> RolloutBatch:
    scores = {"environment": torch.tensor([e.dialogue.score for e in episodes])}
    tokens = sum(e.num_tokens for e in episodes)
    outputs = {"old_logprobs": torch.zeros(tokens), "ref_logprobs": torch.zeros(tokens)}
    batch = collate(list(episodes), pack(episodes), scores, outputs, None, old_logprobs_source="recompute")
    return batch if values is None else replace(batch, values=torch.tensor(values))


def advantages(batch: RolloutBatch, config: RlConfig, normalizer: RewardNormalizer | None = None):
    return compute_advantages(batch, config, normalizer or RewardNormalizer(config.reward), kl_coef=config.kl.coef)


def test_turns_and_their_rewards_are_at_their_tokens():
    batch = batch_of(TWO_TURNS, ONE_TURN)
    assert batch.turns.tolist() == [[0, 0, -1, 1, 1], [0, 0, -1, -1, -1]]
    assert batch.turn_rewards.tolist() == [[0.0, 0.5, 0.0, 0.0, 0.0], [0.0] * 5]


def test_gae_by_hand_with_a_reward_at_a_turn_and_a_gap():
    """CORRECTNESS, GAE over gaps and reward placement."""
    config = rl("ppo", **{"rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 0.5})
    train, metrics = advantages(batch_of(TWO_TURNS, values=[[0.5, 1.0, 99.0, 0.0, 1.5]]), config)
    # Weight 2: 1 at token 1, the rest of 4, 3, at token 4.  d4 = 3 - 1.5 = 1.5, d3 = 1.5 - 0 = 1.5, d1 = 1 + 0 - 1 = 0, d0 = 1 - 0.5 = 0.5
    # A4 = 1.5, A3 = 1.5 + 0.75 = 2.25, A1 = 0 + 0.5 * 2.25 = 1.125, A0 = 0.5 + 0.5 * 1.125 = 1.0625
    torch.testing.assert_close(train.advantages, torch.tensor([[1.0625, 1.125, 0.0, 2.25, 1.5]]))
    torch.testing.assert_close(train.returns, torch.tensor([[1.5625, 2.125, 0.0, 2.25, 3.0]]))
    assert metrics["reward_mean"] == 4.0, "the sum is the episode's, however it is divided"
    by_episode, _ = advantages(batch_of(TWO_TURNS, values=[[0.5, 1.0, 99.0, 0.0, 1.5]]), rl("ppo", "episode"))
    assert by_episode.returns[0, 4] == 4.0


def test_reinforce_pp_by_hand_with_a_reward_at_a_turn():
    train, _ = advantages(batch_of(TWO_TURNS), rl("reinforce_pp"))
    # Rewards to go 4, 4, 3, 3: mean 3.5, unbiased std sqrt(4 * 0.25 / 3) = 0.577350
    torch.testing.assert_close(train.advantages, torch.tensor([[1.0, 1.0, 0.0, -1.0, -1.0]]) * 0.5 / 0.577350)


def test_grpo_by_hand_with_rewards_at_turns():
    train, _ = advantages(batch_of(TWO_TURNS, ONE_TURN), rl("grpo", **{"rl.grpo.normalize_std": False}))
    # Turns have 1, 3 and 0, mean 4/3
    torch.testing.assert_close(train.advantages, torch.tensor([[4 / 3, 4 / 3, 0.0, 5 / 3, 5 / 3], [-4 / 3, -4 / 3, 0.0, 0.0, 0.0]]))
    by_episode, _ = advantages(batch_of(TWO_TURNS, ONE_TURN), rl("grpo", "episode", **{"rl.grpo.normalize_std": False}))
    torch.testing.assert_close(by_episode.advantages, torch.tensor([[2.0, 2.0, 0.0, 2.0, 2.0], [-2.0, -2.0, 0.0, 0.0, 0.0]]))


def test_kl_in_the_reward_counts_at_each_sampled_token_and_not_in_a_gap():
    changes = {"rl.kl.coef": 0.1, "rl.kl.placement": "reward", "rl.kl.estimator": "k1", "rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 1.0}
    batch = batch_of(TWO_TURNS)
    batch = replace(batch, ref_logprobs=torch.tensor([[-1.0, -2.0, 99.0, -3.0, -4.0]]))
    train, _ = advantages(batch, rl("ppo", **changes))
    # To go: 3 - 0.4 = 2.6; 2.6 - 0.3 = 2.3; 2.3 + 1 - 0.2 = 3.1; 3.1 - 0.1 = 3.0
    torch.testing.assert_close(train.returns, torch.tensor([[3.0, 3.1, 0.0, 2.3, 2.6]]))


def test_a_turn_that_is_not_learned_from_has_no_advantage_and_its_reward_goes_to_those_before():
    first, gap, second, third = TWO_TURNS.spans
    unlearned = [replace(s, trained=False) for s in (second, third)]
    last = replace(TWO_TURNS, spans=[first, gap, *unlearned])
    train, _ = advantages(batch_of(last), rl("ppo", **{"rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 1.0}))
    assert train.response_mask.tolist() == [[True, True, False, False, False]]
    assert train.returns.tolist() == [[4.0, 4.0, 0.0, 0.0, 0.0]]
    opening = replace(TWO_TURNS, spans=[replace(first, trained=False), gap, second, third])
    train, _ = advantages(batch_of(opening), rl("ppo", **{"rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 1.0}))
    assert train.returns.tolist() == [[0.0, 0.0, 0.0, 4.0, 4.0]], "no trained token came before the first reward"
    assert batch_of(last).lengths.tolist() == [4], "sampled tokens, learned from or not"


def test_turns_have_the_units_of_the_normalised_score():
    scorer = {"name": "environment", "kind": "environment", "weight": 2.0, "normalization": "initial"}
    config = rl("ppo", **{"rl.reward.scorers": [scorer], "rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 1.0})
    normalizer = RewardNormalizer(config.reward)
    normalizer.calibrate({"environment": torch.tensor([0.0, 2.0])})  # mean 1, std 1; then half of it
    normalizer.moments["environment"] = replace(normalizer.moments["environment"], squares=0.5)  # std 0.5
    train, _ = advantages(batch_of(TWO_TURNS), config, normalizer)
    # The episode has 2 * (2 - 1) / 0.5 = 4, its first turn 2 * 0.5 / 0.5 = 2
    torch.testing.assert_close(train.returns, torch.tensor([[4.0, 4.0, 0.0, 2.0, 2.0]]))


def test_an_unscored_episode_is_not_learned_from():
    train, _ = advantages(batch_of(replace(TWO_TURNS, dialogue=replace(TWO_TURNS.dialogue, score=float("nan"))), ONE_TURN), rl("grpo"))
    assert not train.response_mask[0].any() and not train.advantages.any() and train.advantages.isfinite().all()


@pytest.mark.parametrize("algorithm", ["rloo", "dr_grpo", "remax", "reinforce_pp_baseline"])
def test_an_algorithm_that_compares_whole_episodes_refuses_credit_by_turn(algorithm: str):
    with pytest.raises(ValueError, match=rf"environment.credit: expected episode with algorithm {algorithm}, got turn"):
        rl(algorithm)


def test_credit_by_turn_needs_a_score_of_the_environment():
    with pytest.raises(ValueError, match=r"environment.credit: expected episode without a rewarded scorer of kind environment"):
        rl("grpo", **{"rl.reward.scorers": [{"name": "brief", "kind": "length", "target_length": 3, "normalization": "none"}]})
