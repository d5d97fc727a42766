"""The key figures of the table that a run ends with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from flows.chain.stages import read_stages
from flows.chain.summary import key_figure


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / "metrics").mkdir()
    for file in (CLERK_PARAMS, Path(__file__).parents[3] / "dvc.yaml"):
        shutil.copy(file, tmp_path)
    return tmp_path


def figure_of(workspace: Path, stage: str) -> str:
    return key_figure(workspace, read_stages(workspace), stage)


def test_a_later_look_of_the_gate_has_its_number(workspace):
    metrics = {"needed": True, "passed": False, "accuracy": 0.75, "low": 0.65, "threshold": 0.7, "look": {"number": 3}}
    (workspace / "metrics/gate.json").write_text(json.dumps(metrics))
    assert figure_of(workspace, "gate_reward") == "accuracy 0.750, at least 0.650 (needs 0.700), look 3: rejected"
    (workspace / "metrics/gate.json").write_text(json.dumps(metrics | {"look": {"number": 1}}))
    assert "look" not in figure_of(workspace, "gate_reward")


def test_a_gate_without_wrong_steps_shows_no_accuracy_beside_the_limit_of_the_f1(workspace):
    metrics = {
        "needed": True,
        "passed": False,
        "accuracy": 0.97,
        "low": 0.9,
        "threshold": 0.4,
        "first_error": {"n": 0, "f1": None, "low": 0.0},
    }
    (workspace / "metrics/gate.json").write_text(json.dumps(metrics))
    assert figure_of(workspace, "gate_reward") == "no F1 of first errors without responses of both kinds: rejected"


def test_rl_shows_its_score_or_its_distance_from_the_teachers_or_both(workspace):
    figures = {"method": "rl", "algorithm": "distillation", "kl_mean": 2.0, "monitor": {"stopped": None}}
    figures |= {"distillation_loss_first_step": 0.5, "distillation_loss": 0.125}
    (workspace / "metrics/train_policy.json").write_text(json.dumps(figures))
    assert figure_of(workspace, "train_policy") == "distillation: distillation loss 0.50 -> 0.12, KL 2.00"
    both = figures | {"algorithm": "grpo and distillation", "score_first_step": 1.0, "score_mean": 1.5}
    (workspace / "metrics/train_policy.json").write_text(json.dumps(both))
    assert figure_of(workspace, "train_policy") == "grpo and distillation: score 1.00 -> 1.50, distillation loss 0.50 -> 0.12, KL 2.00"


def test_an_evaluation_shows_both_modes(workspace):

    def mode(sft: float, policy: float) -> dict:
        return {"sft": {"score_mean": sft}, "policy": {"score_mean": policy}}

    wins = {"greedy": {"value": 0.37}, "sampled": {"value": 0.8}}
    metrics = {"greedy": mode(0.9, 0.87), "sampled": mode(0.51, 1.26), "win_rate": wins}
    (workspace / "metrics/evaluate.json").write_text(json.dumps(metrics))
    assert figure_of(workspace, "evaluate") == "score 0.51 -> 1.26 (sampled, wins 0.80), 0.90 -> 0.87 (greedy, wins 0.37)"


def test_an_evaluation_that_nothing_compared_says_so(workspace):
    nothing = {"sft": {"score_mean": None}, "policy": {"score_mean": None}}
    wins = {"greedy": {"value": None}, "sampled": {"value": None}}
    metrics = {"greedy": nothing, "sampled": nothing, "win_rate": wins, "kl": {"sampled": 0.25}}
    (workspace / "metrics/evaluate.json").write_text(json.dumps(metrics))
    assert figure_of(workspace, "evaluate") == "neither score nor judge; KL 0.25"
    judged = {"sft": {"judge_ok": 0.5, "score_mean": None}, "policy": {"judge_ok": 0.75, "score_mean": None}}
    (workspace / "metrics/evaluate.json").write_text(json.dumps(metrics | {"greedy": judged, "sampled": judged}))
    assert figure_of(workspace, "evaluate") == "judge 0.50 -> 0.75 (sampled), 0.50 -> 0.75 (greedy)"


def test_a_stage_without_sft_is_not_needed(workspace):
    (workspace / "metrics/train_sft.json").write_text(json.dumps({"trained": False, "reason": "sft.enabled is false"}))
    assert figure_of(workspace, "train_sft") == "not needed: the given model is used"
