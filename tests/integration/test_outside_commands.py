"""`rlhf gate` and `rlhf evaluate` put models of other trainers through the chain, in a run of their own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from small_chain import PYTORCH_ROLLOUTS, SMALL, make_chain, run
from tiny_models import save_tiny_models, tiny_tokenizer

FITTING = [
    *("--set", "model.max_length=64", "--set", "model.architecture=null", "--set", "model.dtype=float32"),
    *("--set", "validation.max_length_bias=0.5", "--set", "gate.min_pairs=50"),
]
TASK = """
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_target: gold
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A checkout with a model, a reward model of random weights and pairs beside it."""
    folder = tmp_path_factory.mktemp("outside")
    save_tiny_models(folder / "outside", tiny_tokenizer())
    rows = [{"prompt": f"What is {n} and {n * n}?", "chosen": f"It is {n + n * n}.", "rejected": f"It is {n * n}!"} for n in range(200)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "tasks").mkdir()
    (folder / "tasks/sums.yaml").write_text(TASK)
    sums = [{"question": f"{n} and {n}:", "choices": [f" {2 * n}", f" {n}"], "gold": 0} for n in range(9)]
    (folder / "tasks/sums.jsonl").write_text("\n".join(map(json.dumps, sums)))
    workspace = folder / "project"
    workspace.mkdir()
    return make_chain(workspace, SMALL, PYTORCH_ROLLOUTS)


def test_a_random_reward_model_is_rejected_with_code_3(project):
    given = ("--reward-model", "../outside/reward", "--reference", "../outside/sft", "--pairs", "../pairs.jsonl")
    code, printed = run(project, "rlhf_core.commands", "gate", *given, *FITTING, "--set", "gate.min_accuracy=0.6")
    assert code == 3 and "expected the lower end of the interval to reach gate.min_accuracy=0.6" in printed, printed[-3000:]
    found = json.loads((project / "runs/gate-reward/metrics/gate.json").read_text())
    assert not found["passed"] and found["n"] > 100


def test_a_policy_is_compared_with_its_reference_and_registered(project):
    models = ("--policy", "../outside/sft", "--reference", "../outside/sft", "--reward-model", "../outside/reward")
    why = ("--set", 'gate.override="a test of random weights"')
    harness = ("--set", 'evaluation.harness={"tasks": ["sums"], "include_path": "../tasks", "limit": 8}')
    options = ("--data", "../pairs.jsonl", "--run", "theirs", *FITTING, *why, *harness)
    code, printed = run(project, "rlhf_core.commands", "evaluate", *models, *options)
    assert code == 0, printed[-3000:]
    found = json.loads((project / "runs/theirs/metrics/evaluate.json").read_text())
    assert found["kl"]["greedy"] == pytest.approx(0, abs=1e-4) and found["greedy"]["policy"]["n"] == 20
    inputs = json.loads((project / "runs/theirs/data/inputs.json").read_text())
    assert found["harness"]["task_files"] == inputs["harness"]["evaluation.harness.include_path"]["sha256"]
    sums = found["harness"]["tasks"]["sums"]
    assert (sums["n"], sums["documents"]) == (8, 9) and "sums acc " in printed
    assert sums["figures"]["acc,none"]["sft"] == sums["figures"]["acc,none"]["policy"]  # the same model
    assert sums["figures"]["acc,none"]["difference"]["value"] == 0
    assert "At most 8 documents of each task" in (project / "runs/theirs/reports/report.html").read_text()
    code, printed = run(project, "rlhf_core.commands", "registry", "register", "policy", "--run", "theirs")
    assert code == 0 and "Registered policy v1.0.0" in printed, printed[-3000:]


def test_a_process_reward_model_is_judged_by_first_wrong_steps(project):
    """The share of right steps alone would let a random model pass here; it finds few first wrong ones."""
    folder = project.parent / "outside/process"
    shutil.copytree(project.parent / "outside/reward", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"step_separator": "\n"}))
    rows = [
        {"prompt": f"What is {n}+{n}?", "completions": [f"It is {n}.", f"So {2 * n + n % 2}."], "labels": [True, n % 2 == 0]}
        for n in range(200)
    ]
    (project.parent / "steps.jsonl").write_text("\n".join(map(json.dumps, rows)))
    given = ("--reward-model", "../outside/process", "--reference", "../outside/sft", "--pairs", "../steps.jsonl")
    code, printed = run(project, "rlhf_core.commands", "gate", *given, *FITTING, "--set", "gate.min_first_error_f1=0.6")
    assert code == 3 and "expected the lower end of the interval to reach gate.min_first_error_f1=0.6" in printed, printed[-3000:]
    found = json.loads((project / "runs/gate-process/metrics/gate.json").read_text())
    assert found["first_error"]["erroneous"]["n"] > 50 and found["first_error"]["correct"]["n"] > 50
    code, printed = run(project, "rlhf_core.commands", "gate", *given[:-1], "../pairs.jsonl", *FITTING, "--run", "pairs")
    assert code == 2 and "expected labelled steps for a process reward model, got preference" in printed, printed[-3000:]
