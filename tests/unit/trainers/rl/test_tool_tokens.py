"""Tokens that were put into a response, such as a tool's output, are its context and nothing else: by hand, and against plain PyTorch."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from one_rl_rank import SUMS, connected, update
from tiny_models import tiny_params, whole

from rlhf_core.models.build import load_language_model
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.data import collate, pack
from rlhf_core.trainers.rl.metrics import batch_metrics
from rlhf_core.trainers.rl.mismatch import LogprobMismatch, check_finite, check_logprobs
from rlhf_core.types import Prompt, Rollout, RolloutBatch, Span

NAN = math.nan
PROMPT = Prompt("p", "made", [], [11, 12], None)
TOOL = Span([90, 91], [NAN, NAN], None, trained=False)
# Two tokens of version 3, a tool's output, a token of version 4; and a plain response of two tokens.
ROLLOUTS = [
    Rollout(PROMPT, [Span([1, 2], [-1.0, -1.0], 3), TOOL, Span([3], [-1.0], 4)], True, 0),
    Rollout(PROMPT, [Span([4, 5], [-1.0, -1.0], 4)], True, 0),
]
SCORES = {"reward_model": torch.tensor([2.0, 0.0])}
TRAINED = torch.tensor([[True, True, False, False, True], [True, True, False, False, False]])
WITH_TOOL = [-1.0, -1.0, NAN, NAN, -1.0, -1.0, -1.0]  # of each response token


def batch_of(old: list[float] = WITH_TOOL, *, reference: float = -1.5) -> RolloutBatch:
    """Garbage at the tool's tokens, wherever a model computes something for them."""
    old = torch.tensor(old)
    outputs = {"old_logprobs": old, "ref_logprobs": torch.full((7,), reference).where(old.isfinite(), NAN), "values": old * 0}
    return collate(ROLLOUTS, pack(ROLLOUTS), SCORES, outputs, None, old_logprobs_source="recompute")


def rl(**changes):
    scorers = [{"name": "reward_model", "kind": "reward_model", "normalization": "none"}]
    return tiny_params(**{"rl.algorithm": "reinforce_pp", "rl.reward.scorers": scorers, **changes}).rl


def test_a_batch_says_of_each_token_who_sampled_it_and_whether_it_is_trained_on():
    batch = batch_of()
    assert batch.response_ids.tolist() == [[1, 2, 90, 91, 3], [4, 5, 0, 0, 0]]
    assert torch.equal(batch.response_mask, TRAINED)
    assert batch.policy_versions.tolist() == [[3, 3, -1, -1, 4], [4, 4, -1, -1, -1]]
    assert batch.lengths.tolist() == [3, 2]
    unlearned = [replace(r, spans=[replace(span, trained=False) for span in r.spans]) for r in ROLLOUTS]
    other = collate(unlearned, pack(unlearned), SCORES, {}, None, old_logprobs_source="from_engine")
    assert not other.response_mask.any() and other.lengths.tolist() == [3, 2] and torch.equal(other.policy_versions, batch.policy_versions)


def test_what_nobody_sampled_can_not_be_trained_on():
    with pytest.raises(AssertionError):
        Span([90], [0.0], None)


def test_whitened_advantages_and_the_kl_in_the_reward_by_hand():
    """The KL is 0.5 at each sampled token, times 0.5. Rewards to go: 2 - 0.25 = 1.75 at the last, 1.5 and 1.25; of the other response -0.25
    and -0.5. Their mean over five tokens is 0.75, their variance 4.375 / 4.
    """
    config = rl(**{"rl.kl.estimator": "k1", "rl.kl.placement": "reward"})
    trained, metrics = compute_advantages(batch_of(), config, RewardNormalizer(config.reward), kl_coef=0.5)
    std = math.sqrt(4.375 / 4)
    expected = torch.tensor([[0.5, 0.75, 0.0, 0.0, 1.0], [-1.25, -1.0, 0.0, 0.0, 0.0]]) / std
    torch.testing.assert_close(trained.advantages, expected)
    assert torch.equal(trained.response_mask, TRAINED)
    assert metrics["reward_mean"] == pytest.approx(((2 - 0.75) + (0 - 0.5)) / 2)


def test_the_critic_carries_values_across_the_gap_by_hand():
    """gamma 1, lambda 0.5, values 0: the delta of the last token is 2, those before have 0: 2, then 1 and 0.5."""
    changes = {"rl.algorithm": "ppo", "rl.ppo.gamma": 1.0, "rl.ppo.gae_lambda": 0.5, "rl.ppo.whiten_advantages": False}
    config = rl(**changes)
    trained, _ = compute_advantages(batch_of(), config, RewardNormalizer(config.reward), kl_coef=0.0)
    assert trained.advantages.tolist() == [[0.5, 1.0, 0.0, 0.0, 2.0], [0.0] * 5]
    assert torch.equal(trained.returns, trained.advantages)


@pytest.mark.parametrize(("kind", "first"), [("tis", 1.2), ("sequence_tis", 1.2**3)])
def test_importance_weights_by_hand(kind: str, first: float):
    """The trainer gives each of the three sampled tokens of the first response 1.2 times the engine's probability."""
    config = rl(**{"rl.correction": {"kind": kind, "low": 0.5, "high": 2.0}})
    old = [-1.0 + math.log(1.2)] * 2 + [NAN] * 2 + [-1.0 + math.log(1.2)] + [-1.0] * 2
    trained, metrics = compute_advantages(batch_of(old), config, RewardNormalizer(config.reward), kl_coef=0.0)
    expected = torch.tensor([[first, first, 1.0, 1.0, first], [1.0] * 5])
    torch.testing.assert_close(trained.importance_weights, expected)
    assert metrics["mismatch_mean"] == pytest.approx(3 * math.log(1.2) / 5, rel=1e-6)


def test_metrics_count_sampled_tokens_only():
    """A KL of 0.5 at three and at two tokens; three and two of them, all different."""
    batch = batch_of()
    found = batch_metrics(batch, batch.old_logprobs, rl().reward)
    assert found["kl_mean"] == pytest.approx(1.25) and found["kl_token_max"] == pytest.approx(0.5)
    assert found["response_length"] == 2.5 and found["distinct_1"] == 1.0


def test_penalties_for_length_count_sampled_tokens_only():
    """No more than two tokens are free of the penalty, which is full at four: a half for three, nothing for two."""
    overlong = {"rl.rollout.max_new_tokens": 4, "rl.reward.overlong": {"buffer": 2, "penalty": 1.0}, "rl.kl.coef": 0.0}
    config = rl(**overlong, **{"rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.grpo.normalize_std": False})
    trained, _ = compute_advantages(batch_of(), config, RewardNormalizer(config.reward), kl_coef=0.0)
    assert trained.advantages[:, 0].tolist() == [0.75, -0.75]


def test_the_engine_is_compared_at_sampled_tokens_only():
    config = rl(**{"rl.rollout.min_new_tokens": 0})
    batch = batch_of()
    check_finite(batch, step=0)
    assert check_logprobs(batch, batch.sampler_logprobs, config, step=0, dtype="float32") == 0.0
    with pytest.raises(LogprobMismatch):
        check_logprobs(batch, batch.sampler_logprobs + torch.tensor([0, 0, 0, 0, 1.0]), config, step=0, dtype="float32")


LOSS = {"rl.kl.placement": "loss", "rl.kl.estimator": "k2", "rl.entropy_coef": 0.01, "rl.dual_clip": None, "rl.clip_low": 0.2}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize(("policy_loss", "aggregation"), [("ppo_clip", "token_mean"), ("gspo", "sequence_mean"), ("cispo", "token_mean")])
def test_the_update_learns_from_sampled_tokens_only(model_folders: tuple[Path, Path], policy_loss: str, aggregation: str, shared: bool):
    """The tool's output is seen by what follows it, and has no loss, no KL and no entropy; what is said of its tokens is garbage."""
    rank = connected(
        model_folders,
        **LOSS,
        **{"rl.algorithm": "rloo", "rl.policy_loss": policy_loss, "rl.loss_aggregation": aggregation, "rl.clip_high": 0.2},
        **{} if shared else {"rl.trainer.microbatch_tokens": 1},
    )
    batch = batch_of([-5.4, -5.6, NAN, NAN, -5.5, -5.3, -5.7], reference=-5.2)
    config = rank._job.rl
    train_batch, _ = compute_advantages(batch, config, RewardNormalizer(config.reward), kl_coef=0.0)
    garbage = torch.full(TRAINED.shape, NAN)
    advantages = torch.tensor([[1.0, 1.0, NAN, NAN, 1.0], [-0.5, -0.5, NAN, NAN, NAN]])
    weights = torch.where(TRAINED, 0.5, garbage)
    train_batch = replace(train_batch, advantages=advantages, importance_weights=weights)
    totals = update(rank, [whole(train_batch)], kl_coef=0.3)

    policy, losses, entropies, tokens = load_language_model(model_folders[0]), [], 0.0, 0
    sequences = pack(ROLLOUTS)
    for i, (ids, start) in enumerate(zip(sequences.lists(), sequences.starts.tolist(), strict=True)):
        at = [t for t in range(len(ids) - start) if TRAINED[i, t]]
        distribution = (policy(input_ids=torch.tensor([ids])).logits[0, [start + t - 1 for t in at]] / 0.8).log_softmax(-1)
        logprobs = distribution.gather(1, torch.tensor([[ids[start + t]] for t in at]))[:, 0]
        entropy = -(distribution.exp() * distribution).sum(-1)
        ratio = (logprobs - batch.old_logprobs[i, at]).exp()
        ratio = ratio.log().mean().exp().expand(len(at)) if policy_loss == "gspo" else ratio
        advantage = advantages[i, 0]
        if policy_loss == "cispo":
            loss = -ratio.detach().clamp(0.8, 1.2) * advantage * logprobs
        else:
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        losses.append(0.5 * loss + 0.3 * 0.5 * (logprobs + 5.2).square() - 0.01 * entropy)
        entropies, tokens = entropies + float(entropy.sum().detach()), tokens + len(at)
    expected = torch.cat(losses).mean() if aggregation == "token_mean" else torch.stack([x.mean() for x in losses]).mean()
    expected.backward()
    norm = float(torch.nn.utils.clip_grad_norm_(policy.parameters(), 0.5))
    assert totals["policy_loss"] == pytest.approx(float(expected.detach()), rel=1e-5, abs=SUMS)
    assert totals["entropy_sum"] == pytest.approx(entropies, rel=1e-5)
    assert totals["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert totals["tokens"] == tokens == 5
