"""Episodes ahead hide tools that sleep 50 to 500 ms: twice the samples per second of lock step, and the same success, on three seeds.

The recipe of the notebook with such tools, and with fewer samples a step, so that two cores spend most of a step in lock step waiting.
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
STEPS, PER_STEP, FIRST = 160, 32, 10  # FIRST: steps until all engines are warm and episodes of all steps in flight
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
    "rl": {
        "steps": STEPS,
        "samples_per_step": PER_STEP,
        "minibatch_size": PER_STEP,
        "checkpoint_every": STEPS,
        "learning_rate": 2.5e-4,
        "environment": {"path": "agents/sleepy.py:play"},
        "rollout": {"engines": 1},
        "evaluation": {"every": STEPS, "prompts": 200, "metric": "environment"},
    },
}


def prepared(folder: Path) -> Path:
    """The chain up to the SFT model."""
    (folder / "agents").mkdir(parents=True)
    play = (ROOT / "agents/notebook.py").read_text()
    (folder / "agents/sleepy.py").write_text(TOOLS + play[play.index("\nasync def play") :])
    read = YAML(typ="safe", pure=True).load
    make_chain(folder, *(read((ROOT / "recipes" / f"{name}.yaml").read_text()) for name in ("clerk", "agent")), SLEEPY)
    for stage in ("hash_inputs", "prepare_data", "validate_data", "check_model", "train_sft", "train_reward", "gate_reward"):
        code, printed = run(folder, "dvc", "repro", "--single-item", stage, deadline=DEADLINE)
        assert code == 0, printed
    return folder


def figures(folder: Path) -> dict[str, float]:
    """Samples a second, success greedy and sampled, and the largest lag of a finished run."""
    curves = pd.read_csv(folder / "plots/train_policy.csv")
    (timings,) = [path for path in folder.rglob("*timings*/train_policy.csv") if ".dvc" not in path.parts]
    seconds = pd.read_csv(timings)["seconds"]
    return {
        "samples_per_second": PER_STEP * (STEPS - FIRST) / float(seconds[FIRST:].sum()),
        "greedy": float(curves["eval_environment"].iloc[-1]),
        "sampled": float(curves["score_environment"].tail(5).mean()),
        "lag": float(curves["policy_lag_max"].max()) if "policy_lag_max" in curves else 0.0,
        "failed": float(curves["failed_episodes"].sum()),
    }


def test_twice_the_samples_per_second_at_the_same_success(tmp_path: Path):
    chain, found = prepared(tmp_path / "chain"), {}
    for seed in SEEDS:
        for lag in LAGS:
            folder = copy_chain(chain, tmp_path / f"{seed}-{lag}")
            change_params(folder, {"seed": seed, "rl": {"rollout": {"max_lag": lag}}})
            code, printed = run(folder, "tasks.train_rl", deadline=DEADLINE)
            assert code == 0, printed
            found[seed, lag] = figures(folder)
            print(json.dumps({"seed": seed, "max_lag": lag, **found[seed, lag]}), flush=True)
    mean = {
        (name, lag): sum(found[seed, lag][name] for seed in SEEDS) / len(SEEDS)
        for name in ("samples_per_second", "greedy") for lag in LAGS
    }  # fmt: skip
    assert mean["samples_per_second", 4] >= 2 * mean["samples_per_second", 0]
    assert abs(mean["greedy", 4] - mean["greedy", 0]) <= 0.02
    assert all(one["failed"] == 0 for one in found.values()) and {found[seed, 4]["lag"] for seed in SEEDS} == {4.0}
