"""Distillation through the whole chain: the teacher's files are an input of the stage, and the report names them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pandas as pd
import pytest
from ruamel.yaml import YAML
from small_chain import PYTORCH_ROLLOUTS, SMALL, SMALL_CLERK, change_params, make_chain, outcomes, run
from teacher_service import teaching

from rlhf_core.models.tokenizer import load_tokenizer

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

JUDGE = {"name": "judge", "kind": "judge", "weight": 0.0, "normalization": "none"}
STUDENT = {
    "reward": {"enabled": False},
    "rl": {
        "algorithm": "grpo",
        "grpo": {"group_size": 4},
        "steps": 6,
        "kl": {"coef": 0.0, "placement": "loss", "estimator": "k3"},
        "reward": {"scorers": [JUDGE]},
        "monitor": {"kl": None},
        "evaluation": {"every": 3, "prompts": 16, "metric": "judge"},
        "save_rollouts_every": 3,
    },
}


def learn_from(workspace: Path, teacher: Path, loss: str) -> tuple[int, str]:
    change_params(workspace, {"rl": {"distillation": {"teachers": [{"path": str(teacher)}], "loss": loss}}})
    return run(workspace, "flows.full_pipeline")


def test_a_chain_learns_from_a_teacher_and_runs_again_when_its_files_change(tmp_path: Path):
    workspace, teacher = tmp_path / "flow", tmp_path / "teacher"
    workspace.mkdir()
    make_chain(workspace, SMALL, PYTORCH_ROLLOUTS, {"data": {"sources": {0: {"clerk": SMALL_CLERK}}}}, STUDENT)
    code, printed = learn_from(workspace, teacher, "sampled")
    assert code != 0 and "rl.distillation.teachers.0.path: expected a folder" in printed
    code, printed = learn_from(workspace, Path("models/sft"), "jsd")  # a teacher whose divergence is 0
    assert code == 0, printed[-3000:]
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert abs(curves["distillation_loss"].iloc[0]) < 1e-6 and curves["score_mean"].isna().all()
    shutil.copytree(workspace / "models/policy", teacher)
    code, printed = learn_from(workspace, teacher, "sampled")
    assert code == 0, printed[-3000:]
    assert outcomes(printed)["train_sft"] == "cached" and outcomes(printed)["train_policy"] == "ran"
    figures = json.loads((workspace / "metrics/train_policy.json").read_text())
    assert figures["algorithm"] == "distillation" and "score_mean" not in figures and figures["distillation_loss"] >= -1
    locked = YAML(typ="safe").load((workspace / "dvc.lock").read_text())["stages"]["train_policy"]["params"]["data/inputs.json"]
    entry = locked["teachers"]["rl.distillation.teachers.0.path"]
    assert entry["path"] == str(teacher)
    report = (workspace / "reports/report.html").read_text()
    assert "Distance from the teachers" in report and entry["sha256"][:12] in report
    (teacher / "README.md").write_text("Another card.")
    code, printed = learn_from(workspace, teacher, "sampled")
    assert code == 0 and outcomes(printed)["train_policy"] == "ran" and f"{teacher}/README.md changed" in printed
    with teaching(teacher, load_tokenizer(str(teacher), trust_remote_code=False)) as at_an_address:
        distillation = {"teachers": [{"service": at_an_address.service}], "teacher_template": "{prompt} Be brief.", "loss": "sampled"}
        change_params(workspace, {"rl": {"rollout": {"temperature": 1.0}, "distillation": distillation}})
        code, printed = run(workspace, "flows.full_pipeline")
        assert code == 0, printed[-3000:]
        assert len([asked for asked in at_an_address.requests if isinstance(asked["prompt"], list)]) == 6 * 16
    curves = pd.read_csv(workspace / "plots/train_policy.csv")
    assert curves["distillation_loss"].notna().all()
    change_params(workspace, {"rl": {"distillation": {"coef": 0.5}}})
    code, printed = run(workspace, "flows.full_pipeline")
    assert code != 0 and "rl.distillation.teachers.0.service: expected a model at http://127.0.0.1:" in printed
