"""Our trainers follow TRL's loss curves: same weights, rows, order, batch and optimizer; texts go in, so tokens and masks count too."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3]))

from tools.bench import ours
from tools.bench.workload import Run, Workload, workloads_to_json, write_jsonl

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("world"),
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="TRL isn't installed; it is in the extra `peers`"),
]
# 40 rows in batches of 8 for 20 steps: four passes, each in an order of its own. Several micro-batches on our side, one on TRL's.
STEPS, BATCH, ROWS = 20, 8, 40
SHARED = {"learning_rate": 1e-3, "weight_decay": 0.1, "max_grad_norm": 0.5, "microbatch_tokens": 200}
DEADLINE = 400  # seconds for TRL's imports and steps on a busy machine
TOLERANCE = 1e-4


def word(number: int) -> str:
    return "".join(chr(97 + (number * 7 + k * k) % 26) for k in range(2 + number % 9))


def question(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"Please sort {number} {word(number)}."}]


@pytest.fixture(scope="module")
def works(sft_folder: Path, reward_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Workload]:
    folder = tmp_path_factory.mktemp("rows")
    demonstrations = [{"messages": question(k), "response": f"Certainly: {word(3 * k)}"} for k in range(ROWS)]
    pairs = [{"messages": question(k), "chosen": f"Certainly: {word(k)}", "rejected": f"No {word(2 * k + 1)}"} for k in range(ROWS)]
    sft_rows, pair_rows = write_jsonl(folder / "sft.jsonl", demonstrations), write_jsonl(folder / "pairs.jsonl", pairs)
    dpo = {
        "sigmoid": {"beta": 0.3, "reference": "live"},
        "ipo": {"beta": 0.5},
        "robust": {"label_smoothing": 0.1},
        "hinge": {},
        "apo_zero": {},
        "apo_down": {},
    }
    return {
        "sft": Workload("sft", str(sft_folder), sft_rows, STEPS, BATCH, SHARED),
        "reward": Workload("reward", str(reward_folder), pair_rows, STEPS, BATCH, {**SHARED, "centering_coef": 0.05}),
        **{
            loss: Workload("dpo", str(sft_folder), pair_rows, STEPS, BATCH, {**SHARED, "nll_coef": 0.0, "loss": loss, **options})
            for loss, options in dpo.items()
        },
    }


@pytest.fixture(scope="module")
def theirs(works: dict[str, Workload], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("theirs")
    (folder / "works.json").write_text(workloads_to_json(list(works.values())))
    command = [sys.executable, "-m", "tools.bench.side", "theirs", str(folder / "works.json"), str(folder / "runs.json")]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    done = subprocess.run(command, cwd=ROOT, env={**environment, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=DEADLINE)
    assert done.returncode == 0, done.stderr
    return {name: Run(**run) for name, run in zip(works, json.loads((folder / "runs.json").read_text()), strict=True)}


@pytest.mark.parametrize("name", ["sft", "reward", "sigmoid", "ipo", "robust", "hinge", "apo_zero", "apo_down"])
def test_the_loss_of_every_step_is_trls(name: str, works: dict[str, Workload], theirs: dict[str, Run], tmp_path: Path):
    losses = ours.train(works[name], tmp_path).losses
    assert len(losses) == len(theirs[name].losses) == STEPS
    difference = max(abs(a - b) for a, b in zip(losses, theirs[name].losses, strict=True))
    print(f"{name}: from {losses[0]:.4f} to {losses[-1]:.4f}, at most {difference:.1e} from TRL's")
    assert difference < TOLERANCE
    assert losses[-1] < losses[0] - 100 * TOLERANCE  # both learn, so that equality says something
