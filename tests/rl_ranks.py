"""RL of tiny models on any number of ranks, processes of this machine with gloo between them: a step of each algorithm but generation and
weight sync. The rollouts are given; every rank does what the driver does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tiny_models import rl_job, sequences

from rlhf_core.config import RlConfig
from rlhf_core.engines.deepspeed.ranks import all_gather, rank, world_size
from rlhf_core.sampling.rewards import RewardNormalizer
from rlhf_core.trainers.rl.credit import compute_advantages
from rlhf_core.trainers.rl.data import DemonstrationStream, baseline_of, collate, pack
from rlhf_core.trainers.rl.metrics import update_metrics
from rlhf_core.trainers.rl.minibatch import Totals, add_totals, plan_update
from rlhf_core.trainers.rl.rank import TrainerRank
from rlhf_core.types import Baseline, Prompt, RewardComponents, Rollout, Span

ALGORITHMS = ("ppo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax")
GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")  # that need several samples of a prompt
SAMPLES, GROUP, STEPS, KL_COEF = 16, 4, 2, 0.1  # each step of two optimizer steps
SETTINGS = {
    "rl.samples_per_step": SAMPLES,
    "rl.minibatch_size": SAMPLES // 2,
    "rl.learning_rate": 3e-3,
    "rl.ppo.critic_learning_rate": 3e-3,
    "rl.trainer.microbatch_tokens": 40,
    "rl.reward.scorers": [{"name": "reward_model", "kind": "reward_model"}],
}
SMALL = 0.01  # metrics below are compared by their absolute difference over this: a policy loss is near 0 by its advantages

Outputs = dict[str, torch.Tensor]


def train_by_rl(algorithm: str, trainer: dict[str, Any], start: Path, reward: Path) -> dict[str, Any]:
    """On every rank.

    Args:
        trainer: keys of rl.trainer.
        start, reward: folders of the models.
    Returns:
        curves: metrics of each step. outputs: of each step's forward passes, and once more in the end. weights: of the policy, on rank 0.
    """
    own = {f"rl.trainer.{key}": value for key, value in ({"ranks": world_size()} | trainer).items()}
    group = GROUP if algorithm in GROUPS else 1
    job = rl_job(start, reward, **{**SETTINGS, **own, "rl.algorithm": algorithm, f"rl.{algorithm}.group_size": group})
    of_rank, rl = TrainerRank(rank(), world_size(), job), job.rl
    of_rank.connect(None)
    normalizer, demonstrations = RewardNormalizer(rl.reward), DemonstrationStream(job)
    curves, outputs = [], []
    for step in range(STEPS):
        rollouts = given_rollouts(step, group)
        found, scored = forward(of_rank, rollouts, rl), score(of_rank, rollouts, rl)
        outputs.append(found | {"scores": scored["reward_model"].nan_to_num(0.0)})
        baseline = greedy_baseline(of_rank, rollouts[::group], rl, copies=group) if algorithm == "remax" else None
        batch = collate(rollouts, pack(rollouts), scored, found, baseline, old_logprobs_source=rl.old_logprobs_source(step))
        train_batch, _ = compute_advantages(batch, rl, normalizer, kl_coef=KL_COEF)
        plan = plan_update(train_batch, demonstrations, rl, seed=0, step=step)[rank()]
        updates = all_gather(of_rank.update(plan, kl_coef=KL_COEF, train_policy=True).totals)
        totals: Totals = {}
        for of_group in rl.trainer.of_groups(updates):
            add_totals(totals, of_group)
        curves.append(update_metrics(totals, ranks=rl.trainer.data_parallel_size))
    outputs.append(forward(of_rank, given_rollouts(STEPS, group), rl))
    return {"curves": curves, "outputs": outputs, "weights": of_rank.weights()}


def given_rollouts(step: int, group: int) -> list[Rollout]:
    """Prompts of 2 to 9 tokens with `group` responses of 1 to 8 tokens each."""
    prompts = sequences(SAMPLES // group, seed=100 + step, shortest=2, longest=9)
    responses = sequences(SAMPLES, seed=200 + step, shortest=1, longest=8)
    noise = torch.Generator().manual_seed(step)
    return [
        Rollout(
            Prompt(str(i // group), "tiny", [], prompts[i // group], None),
            [Span(ids, (-5.5 + 0.3 * torch.randn(len(ids), generator=noise)).tolist(), step)],
            finished=i % 5 > 0,
            group_id=i // group,
        )
        for i, ids in enumerate(responses)
    ]


def dealt_out(items: Sequence[Any], rl: RlConfig, call: Callable[[list[Any]], Any]) -> list[Any]:
    """Results of each group of ranks, in the items' order; the ranks of a group get the same items."""
    shards = [list(part) for part in np.array_split(np.arange(len(items)), rl.trainer.data_parallel_size)]
    return rl.trainer.of_groups(all_gather(call([items[i] for i in rl.trainer.of_ranks(shards)[rank()]])))


def forward(of_rank: TrainerRank, rollouts: list[Rollout], rl: RlConfig) -> Outputs:
    found = dealt_out(rollouts, rl, lambda own: of_rank.forward(pack(own)))
    return {name: torch.cat([outputs[name] for outputs in found]) for name in found[0]}


def score(of_rank: TrainerRank, rollouts: list[Rollout], rl: RlConfig) -> RewardComponents:
    """By the reward model, which is sharded like the rest. The fourth response has no score."""
    ids: list[list[int] | None] = [*pack(rollouts).lists()]
    ids[3] = None
    scores = torch.cat(dealt_out(ids, rl, lambda own: of_rank.score_by_reward_model("reward_model", own))).mean(1)
    return {"reward_model": scores}


def greedy_baseline(of_rank: TrainerRank, rollouts: list[Rollout], rl: RlConfig, *, copies: int) -> Baseline:
    """In place of a greedy response, the one to the next prompt."""
    following = rollouts[1:] + rollouts[:1]
    others = [replace(other, prompt=rollout.prompt, group_id=rollout.group_id) for rollout, other in zip(rollouts, following, strict=True)]
    return baseline_of(others, score(of_rank, others, rl), forward(of_rank, others, rl), copies=copies)


def metric_difference(first: list[dict[str, float]], second: list[dict[str, float]]) -> float:
    """Largest difference of any metric, relative to it or to SMALL."""
    assert [row.keys() for row in first] == [row.keys() for row in second]
    return max(abs(a[name] - b[name]) / max(abs(a[name]), SMALL) for a, b in zip(first, second, strict=True) for name in a)


def output_difference(first: list[Outputs], second: list[Outputs]) -> float:
    """Largest difference of any log-probability, value or score."""
    assert [outputs.keys() for outputs in first] == [outputs.keys() for outputs in second]
    return max(float((a[name] - b[name]).abs().max()) for a, b in zip(first, second, strict=True) for name in a)
