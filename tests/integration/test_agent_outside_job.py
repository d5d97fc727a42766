"""An RL job whose episodes a program outside plays, from params to report; killed jobs and killed agents change no bit of it."""

from __future__ import annotations

import json
import random
import time
from contextlib import suppress
from pathlib import Path

import pandas as pd
import psutil
import pytest
from small_chain import (
    PYTORCH_ROLLOUTS,
    SMALL,
    alive_processes,
    assert_nothing_left,
    await_checkpoint,
    begin,
    command_line,
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

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]  # tests/unit/agents/test_agent_command.py has commands alone

STEPS = 8
PROGRAM = "agents/notebook_client.py"
OUTSIDE = {
    "model": {"max_length": 224},
    "data": {"sources": {0: {"clerk": {"notebook": True, "demonstrations": 400, "prompts": 240}, "uses": ["sft", "prompt"]}}},
    "sft": {"train_on": "all_turns", "pretrain": {"steps": 0}, "steps": 300},
    "reward": {"enabled": False},
    "rl": {
        "algorithm": "grpo",
        "steps": STEPS,
        "checkpoint_every": 2,
        "ppo": {"critic_init": "sft"},
        "environment": {"command": ["python", PROGRAM], "processes": 2, "claims": 32, "max_turns": 4},
        "reward": {"scorers": [{"name": "environment", "kind": "environment"}]},
        "rollout": {"max_new_tokens": 96, "engines": 2},
        "evaluation": {"every": 4, "prompts": 16},
    },
    "evaluation": {"max_new_tokens": 96},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory) -> Path:
    """The finished chain."""
    folder = tmp_path_factory.mktemp("outside") / "chain"
    folder.mkdir()
    make_chain(folder, SMALL, PYTORCH_ROLLOUTS, OUTSIDE)
    code, printed = run(folder, "dvc", "repro")
    assert code == 0 and "train_policy" in ran(printed), printed
    assert_nothing_left(folder)
    return folder


def assert_same(undisturbed: Path, workspace: Path) -> None:
    for phase in sorted((undisturbed / "reports/digests/train_policy").iterdir()):
        a, b = (read_digest(top / "reports/digests/train_policy" / phase.name) for top in (undisturbed, workspace))
        assert differences(a, b) == []
    assert (workspace / "plots/train_policy.csv").read_text() == (undisturbed / "plots/train_policy.csv").read_text()


def test_an_rl_job_and_the_evaluation_play_by_the_program(played):
    curves = pd.read_csv(played / "plots/train_policy.csv")
    assert len(curves) == STEPS and curves["logprob_difference"].max() < 1e-4
    assert (curves["turns"] >= 1).all() and curves["turns"].max() > 1 and (curves["failed_episodes"] == 0).all()
    assert curves["score_environment"].between(0, 1).all() and curves["eval_environment"].notna().sum() == 2
    metrics = json.loads((played / "metrics/evaluate.json").read_text())
    for model in ("sft", "policy"):
        assert 0 <= metrics["greedy"][model]["scores"]["environment"]["mean"] <= 1
    assert "tool: " in (played / "reports/report.html").read_text()
    inputs = json.loads((played / "data/inputs.json").read_text())
    assert next(iter(inputs["environment"])) == "rl.environment.command.1"


def test_a_job_that_is_killed_in_a_step_ends_with_the_same_bits_and_leaves_no_agent(played, tmp_path):
    workspace = copy_chain(played, tmp_path / "killed")
    forget(workspace, "tasks.train_rl")
    stage = begin(workspace, "tasks.train_rl")
    await_checkpoint(workspace, "train_policy", stage)
    driver_process(workspace).kill()
    assert stage.wait(timeout=400) == CRASHED, output_of(workspace)[-3000:]
    assert_nothing_left(workspace)
    assert 0 < newest_checkpoint(workspace, "train_policy") < STEPS
    code, printed = run(workspace, "tasks.train_rl")
    assert code == 0 and "rl: resuming from the checkpoint of step" in printed, printed
    assert_same(played, workspace)


def test_agents_that_are_killed_at_any_time_change_no_bit(played, tmp_path):
    """One of the two processes after each checkpoint; the other one, or its successor, plays its episodes on."""
    workspace = copy_chain(played, tmp_path / "disturbed")
    forget(workspace, "tasks.train_rl")
    stage, pick, killed, last = begin(workspace, "tasks.train_rl"), random.Random(0), 0, -1
    while stage.poll() is None:
        agents = [p for p in alive_processes(workspace) if "".join(command_line(p)[1:]).endswith(PROGRAM) and len(command_line(p)) == 2]
        if len(agents) == 2 and (now := newest_checkpoint(workspace, "train_policy")) > last:
            time.sleep(pick.uniform(0, 0.5))
            with suppress(psutil.NoSuchProcess):  # the job may have ended meanwhile
                pick.choice(agents).kill()
                killed, last = killed + 1, now
        time.sleep(0.02)
    assert stage.returncode == 0 and killed >= 2, output_of(workspace)[-3000:]
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert (curves["failed_episodes"] == 0).all(), output_of(workspace)[-3000:]
    assert_same(played, workspace)
