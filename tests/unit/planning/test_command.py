"""The command says which workload its prediction is of, and where each quantity comes from."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_core.planning.__main__ import main

PARAMS = Path(__file__).parents[3] / "params.yaml"


def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setattr(sys, "argv", ["planning", "--params", str(PARAMS), *arguments])
    assert main() == 0
    return capsys.readouterr().out


def test_the_workload_stands_before_the_prediction_with_its_keys(monkeypatch, capsys):
    out = printed(monkeypatch, capsys, "--samples", "512", "--response-length", "20")
    workload, _, prediction = out.partition("\n\nproposed: ")
    reported = {line[:20].strip(): line[20:].split() for line in workload.splitlines() if line.startswith("  ")}
    assert reported["samples"] == ["512", "responses", "a", "step", "--samples"]
    assert reported["prompt length"] == ["64", "tokens", "model.max_length", "-", "rl.rollout.max_new_tokens"]  # 96 - 32
    assert reported["response length"][0] == "20" and reported["response length"][-1] == "--response-length"
    assert reported["minibatch"][0] == "256" and reported["minibatch"][-1] == "rl.minibatch_size"
    assert reported["steps"][0] == "60" and reported["steps"][-1] == "rl.steps"
    assert "GPUs" in prediction


def test_json_has_the_workload_too(monkeypatch, capsys):
    found = json.loads(printed(monkeypatch, capsys, "--json", "--algorithm", "grpo"))
    assert found["workload"]["group size"] == {"value": 8, "unit": "responses to a prompt", "source": "rl.grpo.group_size"}
    assert found["workload"]["prompts"]["value"] == 32  # 256 / 8
    assert found["proposed"]["fits"]


def test_a_sync_by_gloo_is_predicted_to_take_longer(monkeypatch, capsys, tmp_path):
    seconds = {}
    for way in ("auto", "gloo"):
        recipe = tmp_path / f"{way}.yaml"
        recipe.write_text(f"rl: {{rollout: {{weight_transfer: {way}}}}}")
        found = json.loads(printed(monkeypatch, capsys, "--json", "--model", "llama3-8b", "--layout", "apart", "--recipe", str(recipe)))
        seconds[way] = [found[name]["seconds"]["sync"] for name in ("requested", "proposed")]
    weights = 4 * 8.03e9  # float32, to 4 engines; those of the proposal may be fewer
    assert seconds["gloo"][0] > 4 * weights / 2.1e9 > 10 * seconds["auto"][0]
    assert seconds["gloo"][1] > weights / 2.1e9 > seconds["auto"][1]
