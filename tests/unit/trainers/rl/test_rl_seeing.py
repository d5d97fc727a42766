"""RL of models that see: engines and trainer agree with transformers, and an interrupted run has the bits of a whole one."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from rl_here import running, whole
from seeing_models import FAMILIES, ONE_PICTURE
from seeing_runs import PPO, differences, plain_values, seeing_job

from rlhf_core.data.pictures import pictures_of

LIMIT = 1e-5  # nats, in float32
QUICK = ("qwen2_5_vl",)
pytestmark = pytest.mark.usefixtures("world")


OTHERS = [name for name in FAMILIES if name not in (*QUICK, *ONE_PICTURE)]


@pytest.fixture(params=[*QUICK, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def family(request) -> str:
    return request.param


@pytest.mark.parametrize("changes", [{}, {"rl.lora": {"rank": 2}}, {"rl.rollout.max_lag": 1}], ids=["whole", "lora", "ahead"])
def test_after_two_updates_engines_sample_what_transformers_computes(family, changes, tmp_path: Path):
    job = seeing_job(tmp_path, family, **changes)
    with running(job) as run:
        before = run.rank.actors[0].weights()
        before = {name: tensor.clone() for name, tensor in before.items()}
        results = [run.step() for _ in range(2)]
        assert all(row["logprob_difference"] < LIMIT for row in run.rows)
        prompts = [rollout.prompt for rollout in results[0].collected.rollouts]
        rollouts = run.workers.rollouts.generate(prompts, step=99)
        ours, unforbidden = differences(run, rollouts, tmp_path / "saved")
        after = run.rank.actors[0].weights()
    assert ours < LIMIT < unforbidden
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved and not any("vis" in name for name in moved)


def test_critic_and_reward_model_have_the_values_of_transformers(family, tmp_path: Path):
    job = seeing_job(tmp_path, family, **PPO)
    with running(job) as run:
        before = {name: tensor.clone() for name, tensor in run.rank.actors[0].roles.critic.module.state_dict().items()}
        first, _ = run.step(), run.step()
        critic = run.rank.actors[0].roles.critic.module.state_dict()
    for row, rollout in enumerate(first.collected.rollouts):
        plain = partial(plain_values, Path(job.reward_model), Path(job.prepared), pictures=pictures_of(rollout.prompt.messages))
        start, size = len(rollout.prompt.prompt_ids), rollout.num_tokens
        states = plain(rollout.ids)[start - 1 :]
        assert torch.allclose(first.train_batch.old_values[row, :size], states[:-1], atol=LIMIT, rtol=0)
        if not rollout.finished:  # another response gets the end that the template writes
            assert abs(first.collected.components["reward_model"][row] - states[-1]) < LIMIT
    assert not all(rollout.finished for rollout in first.collected.rollouts)
    assert run.rows[1]["value_loss"] > 0.0
    moved = {name for name in before if not torch.equal(before[name], critic[name])}
    assert moved and not any("vis" in name for name in moved)


@pytest.mark.parametrize("changes", [{}, PPO], ids=["grpo", "ppo"])
def test_interrupted_run_has_the_bits_of_a_whole_one(family, changes, tmp_path: Path):
    expected = whole(seeing_job(tmp_path / "whole", family, **changes), 4)
    halves = seeing_job(tmp_path / "halves", family, **changes)
    with running(halves) as run:
        run.step(), run.step()
        run.save()
    with running(halves) as run:
        assert run.progress.step == 2
        run.step(), run.step()
        ours, theirs = run.rank.actors[0].weights(), expected.rank.actors[0].weights()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
