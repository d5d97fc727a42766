"""Episodes ahead of the trainer: lag, spans of several policies, tools that sleep, and runs that are killed."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path

import pytest
from rl_here import Dies, Killed, differences, rl_job_here, running, same, whole

from rlhf_core.trainers.rl.job import RlJob

STEPS = 8
SLOWER = [1.0]  # factor of the tool's time


async def sleep(text: str) -> str:
    """Takes 0 to 20 ms, by the text."""
    await asyncio.sleep(SLOWER[0] * hashlib.sha256(text.encode()).digest()[0] / 255 * 0.02)
    return str(len(text))


async def talk(task, policy):
    """One to four turns, by what was said."""
    chat = policy.chat(task.messages)
    for turn in range(task.max_turns):
        reply = await chat.generate()
        if not reply.finished or (len(reply.text) + len(task.messages[0]["content"])) % 4 == turn:
            break
        chat.user(f"{await sleep(f'{turn} {reply.text}')}?")


# Stop strings make replies of 1 to 40 tokens of the tiny model.
EPISODES = {
    "rl.environment": {"path": f"{__file__}:talk", "max_turns": 4},
    "rl.reward.max_unscored_fraction": 0.9,  # conversations are long for the reward model
    "rl.rollout.max_lag": 2,
    "rl.rollout.max_new_tokens": 90,
    "rl.rollout.stop": ["o", "s", "i"],
    "model.max_length": 128,
}


def job_of(folders: tuple[Path, Path], folder: Path, **changes) -> RlJob:
    return rl_job_here(folders, folder, **EPISODES | changes)


@pytest.mark.parametrize("max_lag", [1, 2, 4])
def test_every_span_is_of_the_policy_of_its_version_and_no_episode_is_dropped(model_folders: tuple[Path, Path], tmp_path: Path, max_lag):
    run = whole(job_of(model_folders, tmp_path, **{"rl.rollout.max_lag": max_lag}), STEPS)
    rollouts = [r for result in run.results for r in result.collected.rollouts]
    assert max(differences(run, rollouts)) < 1e-4
    weights = run.rank.weights
    assert max(float((weights[0][name] - weights[STEPS][name]).abs().max()) for name in weights[0]) > 0.01  # the comparison can tell
    assert [row["policy_lag_max"] for row in run.rows] == [min(step, max_lag) for step in range(STEPS)]
    assert all(row["cut_off"] == row["failed_episodes"] == 0 and row["logprob_difference"] < 1e-4 for row in run.rows)
    assert [r.prompt.id for r in rollouts[::2]] == [p.id for p in run.run.prompts.take(0, 4 * STEPS)]  # each once, in the stream's order
    assert {r.dialogue.turns for r in rollouts} == {1, 2, 3, 4}
    if max_lag > 1:  # a reply went on under new weights
        pairs = [(a.version, b.version) for r in rollouts for a, b in zip(r.spans, r.spans[1:], strict=False)]
        assert any(None not in pair and pair[0] < pair[1] for pair in pairs)


def test_results_do_not_depend_on_how_long_tools_take(model_folders: tuple[Path, Path], tmp_path: Path):
    runs = []
    for factor in (0.0, 1.0, 4.0):
        SLOWER[0] = factor
        runs.append(whole(job_of(model_folders, tmp_path / str(factor)), STEPS))
    assert same(runs[0], runs[1], since=0) and same(runs[0], runs[2], since=0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rl.rollout.engines": 2, "rl.correction.kind": "tis"},
        {"rl.algorithm": "ppo", "rl.rollout.max_lag": 1},
        {"rl.algorithm": "remax", "rl.rollout.max_concurrent_sequences": 5, "rl.rollout.max_lag": 4},
        {"rl.algorithm": "grpo", "rl.grpo.group_size": 2, "rl.dynamic_sampling.enabled": True, "rl.reward.clip": 0.1},
    ],
    ids=["plain", "two engines", "ppo", "remax", "dynamic sampling"],
)
def test_a_killed_run_ends_with_the_same_bits(model_folders: tuple[Path, Path], tmp_path: Path, changes: dict):
    undisturbed = whole(job_of(model_folders, tmp_path / "whole", **changes), STEPS)
    job, done = job_of(model_folders, tmp_path / "killed", **changes), 0
    for method, call in (("advance", 9), ("receive_weights", 3), ("advance", 7), ("advance", 4)):
        with pytest.raises(Killed), running(job, wrap=lambda actor, m=method, c=call: Dies(actor, m, c)) as run:
            for _ in range(STEPS):
                run.step()
                run.save()
        done = max(done, run.progress.step)
    with running(job) as run:
        assert 1 <= run.progress.step == done < STEPS
        while run.progress.step < STEPS:
            run.step()
        assert same(undisturbed, run, since=done)
