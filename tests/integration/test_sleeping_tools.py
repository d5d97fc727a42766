"""Episodes ahead hide tools that sleep 50 to 500 ms: twice the samples per second of lock step, and the same success, on three seeds.

The recipe of the notebook with such tools, and with fewer samples a step, so that two cores spend most of a step in lock step waiting. The
success is compared where it has converged, after steps of twice as many samples. Needs an idle machine: other work slows
episodes ahead, which wait for cores, more than lock step, which waits for sleeps.
"""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML
from small_chain import change_params, copy_chain, make_chain, run

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.timeout(3600), pytest.mark.long]

SEEDS, LAGS = (0, 1, 2), (0, 4)
DEADLINE = 1200.0  # seconds of a stage
FIRST = 10  # steps until all engines are warm and episodes of all steps in flight
FAST = {"steps": 30, "samples_per_step": 32, "minibatch_size": 32}
WHOLE = {"steps": 50, "samples_per_step": 64, "minibatch_size": 64, "learning_rate": 5e-4}
LAST = 20  # steps whose episodes show the success at the end: 1,280 of each job, sampled
TOOLS = '''"""The notebook, whose tools sleep 50 to 500 ms, by the call."""

import asyncio
import hashlib

from rlhf_core.data.clerk.notebook import number_on


async def rest(*call):
    await asyncio.sleep(0.05 + 0.45 * hashlib.sha256(repr(call).encode()).digest()[0] / 255)


async def read(page: int) -> int:
    """The number on a page of the notebook."""
    await rest("read", page)
    return number_on(page)


async def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    await rest("add", a, b)
    return a + b

'''
SLEEPY = {
    "cluster": {"threads": 1},
    "rl": {"learning_rate": 2.5e-4, "environment": {"path": "agents/sleepy.py:play"}, "rollout": {"engines": 1}},
}


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chain up to the SFT model."""
    folder = tmp_path_factory.mktemp("sleepy") / "chain"
    (folder / "agents").mkdir(parents=True)
    play = (ROOT / "agents/notebook.py").read_text()
    (folder / "agents/sleepy.py").write_text(TOOLS + play[play.index("\nasync def play") :])
    read = YAML(typ="safe", pure=True).load
    make_chain(folder, *(read((ROOT / "recipes" / f"{name}.yaml").read_text()) for name in ("clerk", "agent")), SLEEPY)
    for stage in ("hash_inputs", "prepare_data", "validate_data", "check_model", "train_sft", "train_reward", "gate_reward"):
        code, printed = run(folder, "dvc", "repro", "--single-item", stage, deadline=DEADLINE)
        assert code == 0, printed
    return folder


def trained(sft: Path, folder: Path, seed: int, lag: int, rl: dict) -> tuple[pd.DataFrame, float]:
    """Curves and samples a second of a job."""
    workspace = copy_chain(sft, folder / f"{seed}-{lag}")
    change_params(workspace, {"seed": seed, "rl": {**rl, "checkpoint_every": rl["steps"], "rollout": {"max_lag": lag}}})
    code, printed = run(workspace, "tasks.train_rl", deadline=DEADLINE)
    assert code == 0, printed
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert curves["failed_episodes"].sum() == 0
    assert not lag or curves["policy_lag_max"].max() == lag
    (timings,) = [path for path in workspace.rglob("*timings*/train_policy.csv") if ".dvc" not in path.parts]
    seconds = pd.read_csv(timings)["seconds"][FIRST:]
    return curves, rl["samples_per_step"] * len(seconds) / float(seconds.sum())


def test_twice_the_samples_per_second(sft: Path, tmp_path: Path):
    speed = {lag: trained(sft, tmp_path, 0, lag, FAST)[1] for lag in LAGS}
    print(json.dumps(speed), flush=True)
    assert speed[4] >= 2 * speed[0]


def test_the_same_success_at_the_end_on_three_seeds(sft: Path, tmp_path: Path):
    found = {
        (lag, seed): float(trained(sft, tmp_path, seed, lag, WHOLE)[0]["score_environment"].tail(LAST).mean())
        for lag in LAGS
        for seed in SEEDS
    }
    mean = {lag: sum(found[lag, seed] for seed in SEEDS) / len(SEEDS) for lag in LAGS}
    print(json.dumps({f"{lag}, {seed}": success for (lag, seed), success in found.items()}), flush=True)
    assert min(found.values()) >= 0.9 and abs(mean[4] - mean[0]) <= 0.02
