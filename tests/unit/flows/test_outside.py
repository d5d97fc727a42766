"""`rlhf gate` and `rlhf evaluate` read a user's data and make params that the chain accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.outside import assignments, gate, source_of
from rlhf_core.config import ConfigError, overridden, parse_assignment

ROOT = Path(__file__).parents[3]
PAIRS = [{"prompt": f"What is {n}?", "chosen": f"It is {n}.", "rejected": f"It is {n + 1}!"} for n in range(30)]


def written(path: Path, rows: list[dict]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    return written(tmp_path / "pairs.jsonl", PAIRS)


def params_of(*given: str):
    text = (ROOT / "params.yaml").read_text()
    return overridden(text, dict(map(parse_assignment, given)), subject="params.yaml")[1]


def test_a_reward_model_from_elsewhere_makes_params_of_its_gate(pairs):
    settings = {"reward.enabled": True, "reward.path": "../reward", "alignment.method": "dpo"}
    params = params_of(*assignments("../base", pairs, None, settings))
    assert (params.model.path, params.reward.path, params.sft.enabled) == ("../base", "../reward", False)
    assert not params.reward.is_trained and params.data.test_fraction == 0.8
    (source,) = params.data.sources
    assert (source.path, source.format, source.uses, source.drop) == (pairs, "preference", ["preference", "prompt"], ["empty"])


STEPS = [{"prompt": f"What is {n}?", "completions": [f"{n} is.", f"So {n}."], "labels": [True, n % 2 == 0]} for n in range(30)]


@pytest.fixture
def process_model(tmp_path):
    (tmp_path / "process").mkdir()
    (tmp_path / "process/config.json").write_text(json.dumps({"model_type": "llama", "step_separator": "\n\n"}))
    return str(tmp_path / "process")


@pytest.mark.parametrize("method", ["dpo", "external"])
def test_a_process_reward_model_from_elsewhere_is_judged_on_labelled_steps(tmp_path, process_model, method):
    settings = {"reward.enabled": True, "reward.path": process_model, "alignment.method": method, "external.path": "../policy"}
    steps = written(tmp_path / "steps.jsonl", STEPS)
    params = params_of(*assignments("../base", steps, None, settings))
    assert (params.reward.step_separator, params.reward.is_trained, params.alignment.method) == ("\n\n", False, "external")
    assert params.external.path == {"dpo": "../base", "external": "../policy"}[method]
    (source,) = params.data.sources
    assert (source.format, source.uses) == ("stepwise", ["stepwise", "prompt"])


def test_pairs_are_no_data_for_a_process_reward_model(pairs, process_model, capsys):
    assert gate(reward_model=process_model, pairs=pairs, reference="../base") == 2
    assert "expected labelled steps for a process reward model, got preference; give steps" in capsys.readouterr().err


def test_a_policy_from_elsewhere_makes_params_of_its_evaluation(tmp_path):
    prompts = written(tmp_path / "prompts.jsonl", [{"prompt": row["prompt"]} for row in PAIRS])
    settings = {"reward.enabled": False, "reward.path": None, "alignment.method": "external", "external.path": "../policy"}
    scored = 'evaluation.scorers=[{"name": "brief", "kind": "length", "target_length": 60}]'
    params = params_of(*assignments("../base", prompts, None, settings), scored)
    assert (params.alignment.method, params.external.path, params.reward.enabled) == ("external", "../policy", False)
    assert params.data.sources[0].uses == ["prompt"]


def test_data_without_pairs_is_no_data_for_a_gate(tmp_path):
    shown = written(
        tmp_path / "shown.jsonl", [{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]}] * 3
    )
    with pytest.raises(ConfigError, match="expected pairs of a better and a worse answer, got messages; give preferences"):
        source_of(shown, None, ["preference", "prompt"])


def test_single_answers_with_a_verdict_are_no_pairs_for_a_gate(tmp_path):
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}.", "label": n % 2 == 0} for n in range(9)]
    rated = written(tmp_path / "rated.jsonl", rows)
    with pytest.raises(ConfigError, match="expected pairs of a better and a worse answer, got unpaired; give preferences"):
        source_of(rated, None, ["preference", "prompt"])


def test_data_that_takes_too_long_to_read_is_refused(pairs, monkeypatch):
    monkeypatch.setattr("flows.outside.LOOK_SECONDS", 0.01)
    with pytest.raises(ConfigError, match=r"expected its format within 0\.01 s, got none; give a local file"):
        source_of(pairs, None, ["prompt"])


def test_a_missing_file_is_refused_before_anything_runs(tmp_path, capsys):
    missing = str(tmp_path / "absent.jsonl")
    assert gate(reward_model="../reward", pairs=missing, reference="../base") == 2
    assert f"{missing}: expected a data file" in capsys.readouterr().err
