"""Stage check_model as run by DVC: a model that the engine can't run is refused before training, with the setting to change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS
from small_chain import SMALL, change_params

from rlhf_core.models.tokenizer import build_tokenizer

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.long
NARROW = {"model": {"architecture": {"heads": 4}}}  # head width 16, which vLLM's CPU attention lacks


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml"):
        shutil.copy(file, tmp_path)
    for package in ("tasks", "rlhf_core", "rewards"):  # dependencies of the stage, covered by its fingerprint
        (tmp_path / package).symlink_to(ROOT / package)
    (tmp_path / "data/prepared").mkdir(parents=True)  # read where epochs give the number of steps
    change_params(tmp_path, SMALL)
    build_tokenizer([f"Double {i}. It is {i}. No." for i in range(20)], vocab_size=300).save_pretrained(tmp_path / "models" / "tokenizer")
    return tmp_path


def run(workspace: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "tasks.check_model"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=workspace, env=environment, capture_output=True, text=True, timeout=240)
    return done.returncode, done.stdout + done.stderr


def verdicts(workspace: Path) -> dict[str, str]:
    return json.loads((workspace / "metrics/check_model.json").read_text())["checks"]


def test_the_default_model_agrees_with_vllm_and_the_figures_say_how_far(workspace):
    code, printed = run(workspace)
    assert code == 0, printed
    assert verdicts(workspace) == {"sft": "right", "reward": "right", "shared_prefix": "on", "vllm": "right"}
    assert json.loads((workspace / "checks/model.json").read_text()) == {"accepted": True, "model": "LlamaForCausalLM"}
    figures = json.loads((workspace / "reports/check_model.json").read_text())["findings"]
    assert len(figures) == 4 and all(finding["difference"] < 1e-4 for finding in figures)
    assert not list((workspace / "scratch/check_model").glob("*/*"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def score(prompts, responses): ...", "expected it to take (prompts, responses, labels, metadata), got (prompts, responses)"),
        ("import os; os.environ['TABLE_FILE']", "got KeyError ('TABLE_FILE'); TABLE_FILE is set in the shell but hidden from stages"),
    ],
)
def test_a_function_that_cannot_score_is_refused_before_anything_is_trained(workspace, monkeypatch, source, message):
    monkeypatch.setenv("TABLE_FILE", "somewhere")
    (workspace / "mine.py").write_text(source)
    scorer = {"name": "mine", "kind": "function", "path": "mine.py:score", "weight": 1.0, "normalization": "none"}
    change_params(workspace, {"rl": {"algorithm": "grpo", "reward": {"scorers": [scorer]}}})
    code, printed = run(workspace)
    assert code == 1 and "check_model: scorer function mine.py:score: expected" in printed and message in printed, printed
    assert "Traceback" not in printed and not (workspace / "checks/model.json").exists()


def test_a_shape_that_vllm_lacks_is_refused_with_what_to_set_which_then_passes(workspace):
    change_params(workspace, NARROW)
    code, printed = run(workspace)
    assert code == 1 and "Traceback" not in printed, printed
    assert "check_model: rollouts by vLLM: expected a model that vLLM's CPU build can run, got LlamaForCausalLM with" in printed
    assert printed.count("set rl.rollout.backend to pytorch") == 1 and "; set rollout.backend" not in printed.split("check_model:")[-1]
    assert verdicts(workspace)["vllm"].startswith("refused: ") and not (workspace / "checks/model.json").exists()
    change_params(workspace, {"rl": {"rollout": {"backend": "pytorch"}}})
    code, printed = run(workspace)
    assert code == 0, printed
    assert verdicts(workspace)["pytorch"] == "right" and (workspace / "checks/model.json").exists()


@pytest.mark.parametrize(
    ("rl", "message"),
    [
        ({"rollout": {"tensor_parallel_size": 3}}, "rl.rollout.tensor_parallel_size: expected a divisor of the model's 2 heads"),
        ({"rollout": {"weight_transfer": "nccl"}}, "rl.rollout.weight_transfer: expected auto or gloo on a cluster without GPUs, got nccl"),
        (
            {"rollout": {"quantization": "fp8"}, "correction": {"kind": "tis"}},
            "rl.rollout.quantization: expected null on a cluster without GPUs, got fp8",
        ),
        (
            {"rollout": {"take_turns": True}},
            "rl.rollout.take_turns: expected auto or false with this build of vLLM, which has no sleep mode, got true",
        ),
    ],
)
def test_an_rl_job_that_cannot_start_is_refused_before_training(workspace, rl, message):
    change_params(workspace, {"rl": rl, "model": {"dtype": "bfloat16" if "correction" in rl else "float32"}})
    code, printed = run(workspace)
    assert code == 1 and f"check_model: {message}" in printed and "Traceback" not in printed, printed
    assert not (workspace / "checks/model.json").exists()
