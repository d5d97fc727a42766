"""The key figures of the table that a run ends with."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from flows.summary import key_figure


def test_an_evaluation_shows_both_modes(tmp_path):
    (tmp_path / "metrics").mkdir()
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(Path(__file__).parents[2] / name, tmp_path)

    def mode(sft: float, policy: float) -> dict:
        return {"sft": {"score_mean": sft}, "policy": {"score_mean": policy}}

    wins = {"greedy": {"value": 0.37}, "sampled": {"value": 0.8}}
    metrics = {"greedy": mode(0.9, 0.87), "sampled": mode(0.51, 1.26), "win_rate": wins}
    (tmp_path / "metrics/evaluate.json").write_text(json.dumps(metrics))
    assert key_figure(tmp_path, "evaluate") == "score 0.51 -> 1.26 (sampled, wins 0.80), 0.90 -> 0.87 (greedy, wins 0.37)"


def test_an_evaluation_that_nothing_compared_says_so(tmp_path):
    (tmp_path / "metrics").mkdir()
    for name in ("dvc.yaml", "params.yaml"):
        shutil.copy(Path(__file__).parents[2] / name, tmp_path)
    nothing = {"sft": {"score_mean": None}, "policy": {"score_mean": None}}
    wins = {"greedy": {"value": None}, "sampled": {"value": None}}
    metrics = {"greedy": nothing, "sampled": nothing, "win_rate": wins, "kl": {"sampled": 0.25}}
    (tmp_path / "metrics/evaluate.json").write_text(json.dumps(metrics))
    assert key_figure(tmp_path, "evaluate") == "neither score nor judge; KL 0.25"
    judged = {"sft": {"judge_ok": 0.5, "score_mean": None}, "policy": {"judge_ok": 0.75, "score_mean": None}}
    (tmp_path / "metrics/evaluate.json").write_text(json.dumps(metrics | {"greedy": judged, "sampled": judged}))
    assert key_figure(tmp_path, "evaluate") == "judge 0.50 -> 0.75 (sampled), 0.50 -> 0.75 (greedy)"
