"""RL runs that resume other work with changed settings, on the real parts: a limit, another metric, adapters, and a beginning anew."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pandas as pd
import pytest
from small_chain import DEADLINE, await_checkpoint, begin, change_params, copy_chain, output_of, run

from rlhf_core.process import STOPPED_BY_SIGNAL
from rlhf_core.stage.run import REFUSED

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]

BRIEF = {"name": "brief", "kind": "length", "target_length": 8, "weight": 0.0}  # never above 0
VOWEL = {"name": "vowel", "kind": "regex", "pattern": "[aeiou]", "weight": 1.0}  # a share, never below 0
LIMIT = {"metric": "entropy", "above": 0.0, "action": "warn"}
BEFORE = {
    "algorithm": "grpo",
    "steps": 400,
    "checkpoint_every": 1,
    "grpo": {"group_size": 4},
    "reward": {"scorers": [VOWEL, BRIEF]},
    "rollout": {"backend": "pytorch"},
    "evaluation": {"every": 1, "prompts": 16, "metric": "vowel", "keep_best": True},
    "monitor": {"mine": LIMIT},
}


@pytest.fixture(scope="module")
def stopped(chain, cluster, tmp_path_factory) -> tuple[Path, str, int]:
    """A workspace whose run was stopped by SIGTERM past its limit, its scratch folder and the step of its checkpoint."""
    workspace = copy_chain(chain.workspace, tmp_path_factory.mktemp("stopped") / "stopped")
    change_params(workspace, {"rl": BEFORE}, cluster)
    stage = begin(workspace, "tasks.train_rl")
    for _ in range(3):
        await_checkpoint(workspace, "train_policy", stage)
    stage.terminate()
    assert stage.wait(timeout=DEADLINE) == STOPPED_BY_SIGNAL, output_of(workspace)[-3000:]
    (folder,) = [p for p in (workspace / "scratch/train_policy").iterdir() if p.is_dir()]
    step = max(int(p.name.removeprefix("step-")) for p in (folder / "checkpoints").glob("step-*"))
    return workspace, f"train_policy/{folder.name}", step


def resumed(stopped: tuple[Path, str, int], folder: Path, rl: dict, *, resume_from: bool = True) -> tuple[Path, int, str]:
    workspace = folder if folder.exists() else copy_chain(stopped[0], folder)
    change_params(workspace, {"rl": rl, "checkpoints": {"resume_from": stopped[1] if resume_from else None}})
    return workspace, *run(workspace, "tasks.train_rl")


def metrics(workspace: Path) -> dict:
    return json.loads((workspace / "metrics/train_policy.json").read_text())


@pytest.mark.parametrize("patience", [1, 2])
def test_a_limit_that_has_warned_ends_the_resumed_run_in_its_first_step(stopped, tmp_path: Path, patience: int):
    _, _, step = stopped
    mine = LIMIT | {"action": "stop", "patience": patience}
    workspace, code, printed = resumed(stopped, tmp_path / "stops", {"monitor": {"mine": mine}})
    assert code == 0, printed
    assert metrics(workspace)["monitor"]["stopped"]["step"] == step + 1 == metrics(workspace)["steps"]


def test_the_best_is_chosen_among_values_of_one_metric(stopped, tmp_path: Path):
    _, _, step = stopped
    change = {"steps": step + 3, "evaluation": {"metric": "brief"}}
    workspace, code, printed = resumed(stopped, tmp_path / "best", change)
    assert code == 0, printed
    assert "train_policy: best of the checkpoint: begun anew, since rl.evaluation.metric changed" in printed
    assert "rl: the best policy by vowel so far, of step" in printed
    after = pd.read_csv(workspace / "plots/train_policy.csv").set_index("step").loc[step + 1 :, "eval_brief"]
    found = metrics(workspace)
    assert (found["best_metric"], found["best_step"]) == ("brief", after.idxmax())
    assert found["best_value"] == pytest.approx(after.max(), rel=1e-4) and after.max() <= 0


def test_other_adapters_are_refused_at_once_and_null_begins_anew(stopped, tmp_path: Path):
    adapters = {"lora": {"rank": 4, "alpha": 8.0, "dropout": 0.0, "target_modules": "all-linear"}, "steps": 2}
    began = time.monotonic()
    workspace, code, printed = resumed(stopped, tmp_path / "adapters", adapters)
    print(f"refused after {time.monotonic() - began:.1f} s")
    assert code == REFUSED and "train_policy: rl.lora.alpha: expected null, as for the weights in the checkpoint, got 8.0" in printed
    assert "Ray" not in printed and "Traceback" not in printed
    workspace, code, printed = resumed(stopped, workspace, adapters, resume_from=False)
    assert code == 0, printed
    assert metrics(workspace)["steps"] == 2 and "resumed_from" not in metrics(workspace)
    shutil.rmtree(workspace)
