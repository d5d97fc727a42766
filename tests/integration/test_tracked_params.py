"""A changed key of `training` reruns exactly the stages whose section takes it over: for DVC, and for the names of scratch folders."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import warm_python
from clerk_params import CLERK_PARAMS
from ruamel.yaml import YAML

from rlhf_core.config import apply_overrides
from rlhf_core.stage.scratch import read_stage_inputs

ROOT = Path(__file__).parents[2]
TRAINING = ("train_sft", "train_reward", "train_policy")  # the last one is DPO


@pytest.fixture(scope="module")
def tracked(tmp_path_factory) -> Path:
    """The real params.yaml and the params of the real dvc.yaml, with stages that do nothing and have run."""
    project = tmp_path_factory.mktemp("project")
    shutil.copy(CLERK_PARAMS, project)
    apply_overrides(project / "params.yaml", {"alignment.method": "dpo"})
    (project / "data.txt").write_text("data\n")
    yaml = YAML(typ="safe", pure=True)
    stages = {
        name: {"cmd": "true", "params": [p for p in stage["params"] if isinstance(p, str)], "deps": ["data.txt"]}
        for name, stage in yaml.load(ROOT / "dvc.yaml")["stages"].items()
    }
    with (project / "dvc.yaml").open("w") as file:
        yaml.dump({"stages": stages}, file)
    for command in (["init", "--no-scm", "--quiet"], ["repro", "--quiet"]):
        dvc(project, *command)
    return project


def dvc(project: Path, *command: str) -> str:
    return warm_python.run([sys.executable, "-m", "dvc", *command], cwd=project, check=True).stdout


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"training.max_grad_norm": 0.5}, {"train_sft", "train_reward", "gate_reward", "train_policy", "report"}),
        ({"training.checkpoint_every": 10}, {"train_policy", "report"}),  # sft and reward have their own
        ({"training.eval_every": 10}, {"train_sft", "train_policy", "report"}),
        ({"training.zero_stage": 1}, {"check_model", "train_sft", "train_reward", "gate_reward", "train_policy", "report"}),
        ({"training.disable_dropout": True}, {"train_sft", "report"}),
        ({"kto.checkpoint_every": 9}, {"report"}),
        ({"sft.weight_decay": 0.0, "cluster.threads": 3}, set()),  # the shared value, written out
    ],
)
def test_a_changed_shared_key_reruns_the_stages_that_take_it_over(
    tracked: Path, tmp_path, monkeypatch, overrides: dict[str, Any], expected: set[str]
):
    project = shutil.copytree(tracked, tmp_path / "project")
    monkeypatch.chdir(project)
    before = {stage: read_stage_inputs(stage).fingerprint for stage in TRAINING}
    apply_overrides(project / "params.yaml", overrides)
    assert set(json.loads(dvc(project, "status", "--json"))) == expected
    assert {stage for stage in TRAINING if read_stage_inputs(stage).fingerprint != before[stage]} == expected & set(TRAINING)
