"""Episodes from params to report: a small chain whose RL job and evaluation play them; a killed job ends with the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from small_chain import (
    PYTORCH_ROLLOUTS,
    SMALL,
    actor_process,
    assert_nothing_left,
    await_checkpoint,
    begin,
    change_params,
    copy_chain,
    driver_process,
    forget,
    make_chain,
    newest_checkpoint,
    output_of,
    ran,
    run,
)

from rlhf_core.checkpoint.digest import differences, read_digest
from rlhf_core.stage.run import CRASHED

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]  # tests/unit/trainers/rl/test_rl_episodes.py has engines and ranks

STEPS = 8
PLAY = '''
import asyncio

from rlhf_core.agents.tools import Tool, ToolCall


async def count(text: str) -> int:
    """Letters."""
    await asyncio.sleep(0.2)
    return len(text)


async def play(task, policy):
    """A tool, whether the model calls one or not: this model is too small to learn it."""
    chat = policy.chat(task.messages, tools=[count])
    for turn in range(task.max_turns):
        reply = await chat.generate()
        if not reply.finished or turn + 1 == task.max_turns:
            break
        call = ToolCall("count", {"text": reply.text}, None, {"count": Tool(count)}, 20.0)
        chat.tool(call, await call.run())
        chat.reward(0.25)
    return 1.0 * ("e" in reply.text)
'''
AGENT = {
    "model": {"max_length": 192},
    "data": {"sources": {0: {"clerk": {"notebook": True, "demonstrations": 300, "prompts": 240}, "uses": ["sft", "prompt"]}}},
    "sft": {"train_on": "all_turns", "pretrain": {"steps": 0}},
    "reward": {"enabled": False},
    "rl": {
        "algorithm": "ppo",
        "steps": STEPS,
        "checkpoint_every": 2,
        "ppo": {"critic_init": "sft"},
        "environment": {"path": "agents/letters.py:play", "max_turns": 3},
        "reward": {
            "scorers": [
                {"name": "environment", "kind": "environment", "normalization": "initial"},
                {"name": "brief", "kind": "length", "target_length": 4, "weight": 0.1, "normalization": "none"},
            ]
        },
        "rollout": {"max_new_tokens": 64, "engines": 2, "stop": ["e", "o"]},  # a model that has learned little hardly ever ends a turn
        "evaluation": {"every": 4, "prompts": 16},
    },
    "evaluation": {"max_new_tokens": 64},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Path:
    """The finished chain."""
    folder = tmp_path_factory.mktemp("agent") / "chain"
    folder.mkdir()
    (folder / "agents").mkdir()
    (folder / "agents/letters.py").write_text(PLAY)
    make_chain(folder, SMALL, PYTORCH_ROLLOUTS, AGENT)
    code, printed = run(folder, "dvc", "repro")
    assert code == 0 and "train_policy" in ran(printed), printed
    return folder


def test_an_rl_job_and_the_evaluation_play_episodes(played):
    curves = pd.read_csv(played / "plots/train_policy.csv")
    assert len(curves) == STEPS and curves["logprob_difference"].max() < 1e-4
    assert (curves["turns"] > 1.2).all() and (curves["turns"] <= 3).all()
    assert (curves["tool_calls"] > 0.2).all() and (curves["failed_tool_calls"] == 0).all() and (curves["failed_episodes"] == 0).all()
    assert curves["score_environment"].between(0, 1.5).all() and curves["eval_environment"].notna().sum() == 2
    assert curves["response_length"].max() < 60, "what the tool put in doesn't count"
    metrics = json.loads((played / "metrics/evaluate.json").read_text())
    for model in ("sft", "policy"):
        assert 0 <= metrics["greedy"][model]["scores"]["environment"]["mean"] <= 1.5
    samples = pd.read_parquet(played / "data/evaluation_samples.parquet")
    assert samples["policy_response"].str.match(r"(?s)assistant: .*\ntool: \d+\nassistant: ").any()
    assert "tool: " in (played / "reports/report.html").read_text()
    inputs = json.loads((played / "data/inputs.json").read_text())
    assert list(inputs["environment"]) == ["rl.environment.path"]


def test_a_job_that_is_killed_in_a_step_ends_with_the_same_bits(played, tmp_path):
    undisturbed, workspace = played, copy_chain(played, tmp_path / "killed")
    forget(workspace, "tasks.train_rl")
    stage = begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    driver_process(workspace).kill()  # a step takes 0.4 s at least, in which tools sleep
    assert stage.wait(timeout=400) == CRASHED, output_of(workspace)[-3000:]
    assert_nothing_left(workspace)
    assert 0 < newest_checkpoint(workspace, "train_policy") < STEPS
    code, printed = run(workspace, "tasks.train_rl")
    assert code == 0 and "rl: resuming from the checkpoint of step" in printed, printed
    assert_same_bits(undisturbed, workspace)


def assert_same_bits(undisturbed: Path, workspace: Path) -> None:
    for phase in sorted((undisturbed / "reports/digests/train_policy").iterdir()):
        a, b = (read_digest(top / "reports/digests/train_policy" / phase.name) for top in (undisturbed, workspace))
        assert differences(a, b) == []
    assert (workspace / "plots/train_policy.csv").read_text() == (undisturbed / "plots/train_policy.csv").read_text()


@pytest.fixture(scope="module")
def played_ahead(played, tmp_path_factory) -> Path:
    """The chain with an RL job whose episodes are two versions ahead, and whose rewards belong to turns."""
    workspace = prepared_ahead(played, tmp_path_factory.mktemp("ahead") / "whole")
    code, printed = run(workspace, "tasks.train_rl")
    assert code == 0, printed
    return workspace


def prepared_ahead(played: Path, folder: Path) -> Path:
    workspace = copy_chain(played, folder)
    forget(workspace, "tasks.train_rl")
    change_params(workspace, {"rl": {"rollout": {"max_lag": 2}, "environment": {"credit": "turn"}}})
    return workspace


def test_a_job_plays_episodes_ahead_of_the_trainer(played_ahead):
    curves = pd.read_csv(played_ahead / "plots/train_policy.csv")
    assert len(curves) == STEPS and curves["logprob_difference"].max() < 1e-4
    assert curves["policy_lag_max"].tolist() == [min(step, 2) for step in range(STEPS)] and (curves["cut_off"] == 0).all()
    assert (curves["turns"] > 1.2).all() and (curves["failed_episodes"] == 0).all()


@pytest.mark.parametrize("killed", ["driver", "engine"])
def test_a_job_with_episodes_ahead_that_is_killed_ends_with_the_same_bits(played, played_ahead, tmp_path, killed):
    workspace = prepared_ahead(played, tmp_path / "killed")
    stage = begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    if killed == "driver":
        driver_process(workspace).kill()
        assert stage.wait(timeout=400) == CRASHED, output_of(workspace)[-3000:]
        assert_nothing_left(workspace)
        code, printed = run(workspace, "tasks.train_rl")
        assert code == 0 and "rl: resuming from the checkpoint of step" in printed, printed
    else:
        actor_process(workspace, "rollout", of=2).kill()
        assert stage.wait(timeout=400) == 0, output_of(workspace)[-3000:]
        assert "rollout rank 0: replaced" in output_of(workspace) or "rollout rank 1: replaced" in output_of(workspace)
    assert_same_bits(played_ahead, workspace)
