"""Tasks of the harness are found, loaded and tried before anything is trained, and two models' figures are compared by document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_params

from rlhf_core.config import ConfigError, Params
from rlhf_core.harness.figures import compared
from rlhf_core.harness.model import HarnessModel
from rlhf_core.harness.tasks import load_tasks, try_tasks
from rlhf_core.model_check.check import run_trials
from rlhf_core.provenance.inputs import input_problems, read_inputs
from rlhf_core.report.harness import difference, harness_rows

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {settings}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a task in tasks/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/rows.jsonl").write_text(json.dumps({"question": "Please sort 41.", "answer": "14"}) + "\n")
    return tmp_path


def write_task(folder: Path, name: str = "mine", data: str = "rows.jsonl", settings: str = "{until: ['.'], max_gen_toks: 8}") -> None:
    (folder / f"tasks/{name}.yaml").write_text(TASK.format(name=name, data=data, settings=settings))


def params(*tasks: str, **settings: Any) -> Params:
    return tiny_params(evaluation__harness={"tasks": list(tasks), "include_path": "tasks", **settings})


def refusal(given: Params, tokenizer_folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        try_tasks(given, tokenizer_folder)
    return str(error.value)


def test_a_local_task_is_tried_without_a_model_and_the_folder_stays(folder, sft_folder):
    write_task(folder)
    try_tasks(params("mine", chat_template=True), sft_folder)
    assert Path.cwd() == folder and load_tasks(params("mine").evaluation.harness)["tasks"].keys() == {"mine"}


def test_without_tasks_nothing_is_tried(sft_folder):
    try_tasks(tiny_params(), sft_folder)


def test_missing_data_say_what_to_do(folder, sft_folder):
    write_task(folder, data="gone.jsonl")
    assert "expected mine with their data" in (found := refusal(params("mine"), sft_folder)) and "include_path" in found


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("{until: ['.'], repetition_penalty: 1.2}", "got ['repetition_penalty']"),
        ("{until: ['.'], num_beams: 4}", "got ['num_beams']"),
        ("{until: ['.'], max_gen_toks: 64}", "max_length: expected more than the 64 tokens"),
    ],
)
def test_what_engines_do_not_do_is_refused_early(folder, sft_folder, settings, told):
    write_task(folder, settings=settings)
    assert told in refusal(params("mine"), sft_folder)


@pytest.mark.long  # reads the harness's thousands of tasks
def test_an_unknown_task_is_refused_with_names_like_it(folder, sft_folder):
    write_task(folder)
    found = refusal(params("gsm8j"), sft_folder)
    assert "got gsm8j; tasks has mine" in found and "gsm8k" in found


def test_names_are_given_once_and_a_missing_folder_is_refused_before_the_run(folder):
    with pytest.raises(ConfigError, match="expected each name once, got mine several times"):
        params("mine", "mine")
    problems = input_problems(params("mine", include_path="elsewhere"), folder)
    assert any("evaluation.harness: expected a folder with tasks at include_path, elsewhere" in line for line in problems)
    assert not any("harness" in line for line in input_problems(params("mine"), folder))


def test_a_window_longer_than_the_model_has_positions_is_refused_early(folder, sft_folder):
    write_task(folder)
    with pytest.raises(ConfigError, match=r"harness.max_length: expected at most model.max_length=64 of a model from nothing, got 65"):
        params("mine", max_length=65)
    given = tiny_params(model__path=str(sft_folder), model__architecture=None, evaluation__harness={"tasks": ["mine"], "max_length": 65})
    with pytest.raises(ValueError, match=r"evaluation.harness.max_length: expected at most the 64 positions"):
        run_trials(given, sft_folder, folder / "scratch")


def test_a_changed_task_changes_the_inputs_of_the_stage(folder):
    write_task(folder)
    before = read_inputs(params("mine"), folder)["harness"]
    write_task(folder, settings="{until: ['!'], max_gen_toks: 8}")
    after = read_inputs(params("mine"), folder)["harness"]
    assert before.keys() == {"evaluation.harness.include_path"} and before != after
    assert read_inputs(tiny_params(), folder)["harness"] == {}


def test_a_stop_string_that_is_a_special_token_ends_an_answer(tokenizer):
    asked = []

    def generate(prompts, settings, special):
        asked.append((settings, special))
        return [tokenizer.encode("It is 14. Yes") for _ in prompts]

    model = HarnessModel(tokenizer, max_length=64, score=lambda pairs: [], generate=generate)
    given = {"until": ["<|user|>", "."], "max_gen_toks": 8, "do_sample": True, "temperature": 0.5, "top_p": 0.9}
    assert model._answers({0: "Please sort 41."}, given) == ["It is 14"]
    ((settings, special),) = asked
    assert (settings.stop, settings.temperature, settings.top_p, settings.max_new_tokens) == (("<|user|>", "."), 0.5, 0.9, 8)
    assert special == (tokenizer.convert_tokens_to_ids("<|user|>"),)


def results(first: list[float], second: list[float], perplexity: float) -> dict[str, Any]:
    """What the harness returns for a group of two tasks, whose figure is the mean over all documents."""

    def samples(values: list[float]) -> list[dict[str, Any]]:
        return [{"doc_id": i, "doc_hash": f"hash {i}", "filter": "none", "acc": value} for i, value in enumerate(values)]

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    counts = {"a": {"original": 9, "effective": len(first)}, "b": {"original": len(second), "effective": len(second)}}
    return {
        "results": {
            "group": {"alias": "group", "acc,none": mean(first + second), "acc_stderr,none": 0.1},
            "a": {"alias": "a", "acc,none": mean(first), "acc_stderr,none": 0.25, "sample_len": len(first)},
            "b": {"acc,none": mean(second), "acc_stderr,none": "N/A", "perplexity,none": perplexity, "perplexity_stderr,none": 0.5},
        },
        "group_subtasks": {"group": ["a", "b"]},
        "samples": {"a": samples(first), "b": [s | {"perplexity": -2.0} for s in samples(second)]},
        "versions": {"a": 3, "b": 1},
        "n-shot": {"a": 5, "b": 0},
        "n-samples": counts,
        "higher_is_better": {"group": {"acc": True}, "a": {"acc": True}, "b": {"acc": True, "perplexity": False}},
    }


def test_figures_of_both_models_are_compared_by_document():
    sft, policy = results([1, 0, 0, 0], [0.5], 7.0), results([1, 1, 1, 0], [0.25], 6.0)
    tasks = compared(sft, policy, {"sft": {"a": 1}, "policy": {"a": 2, "b": 1}}, confidence=0.95)
    a = tasks["a"]
    assert (a["n"], a["documents"], a["num_fewshot"], a["version"], a["group"]) == (4, 9, 5, 3, False)
    assert a["truncated"] == {"sft": 1, "policy": 2} and tasks["group"]["truncated"] == {"sft": 1, "policy": 3}
    figure = a["figures"]["acc,none"]
    assert figure["sft"] == {"value": 0.25, "stderr": 0.25} and figure["policy"]["value"] == 0.75
    # Two documents of four gained: (2 - 0) / 4, and a sign test of 2 against 0, whose mid-p value is 2 / 4 - 1 / 4.
    assert (figure["difference"]["value"], figure["difference"]["p_value"], figure["difference"]["n"]) == (0.5, 0.25, 4)
    assert figure["difference"]["low"] < 0.5 < figure["difference"]["high"]
    group = tasks["group"]["figures"]["acc,none"]["difference"]
    # Over all five documents: (0 + 1 + 1 + 0 - 0.25) / 5; their standard deviation is 0.602, so 0.35 +- 2.776 * 0.602 / sqrt(5).
    assert group["value"] == pytest.approx(0.35) and group["n"] == 5 and tasks["group"]["group"]
    assert (group["low"], group["high"]) == (pytest.approx(0.35 - 0.7476, abs=1e-3), pytest.approx(0.35 + 0.7476, abs=1e-3))
    perplexity = tasks["b"]["figures"]["perplexity,none"]
    assert perplexity["difference"] == {"value": -1.0, "low": None, "high": None, "p_value": None, "n": 0}
    assert tasks["b"]["figures"]["acc,none"]["policy"] == {"value": 0.25, "stderr": None}


def test_other_documents_have_no_paired_interval():
    sft, policy = results([1, 0], [0.5], 7.0), results([1, 1], [0.5], 7.0)
    policy["samples"]["a"][1]["doc_hash"] = "another"
    figure = compared(sft, policy, {}, confidence=0.95)["a"]["figures"]["acc,none"]["difference"]
    assert (figure["value"], figure["low"], figure["n"]) == (0.5, None, 0)


def test_rows_of_the_report_have_errors_intervals_and_tones():
    sft, policy = results([0] * 40, [0.5], 7.0), results([1] * 20 + [0] * 20, [0.5], 6.0)
    tasks = compared(sft, policy, {"sft": {}, "policy": {}}, confidence=0.95)
    rows = {(row["task"], row["metric"]): row for row in harness_rows({"harness": {"confidence": 0.95, "tasks": tasks}})}
    assert rows["a", "acc"]["policy"] == "0.5000 ± 0.2500" and rows["a", "acc"]["tone"] == "good"
    assert difference(rows["a", "acc"]).startswith("+0.5000 (+0.3") and rows["a", "acc"]["direction"] == "↑"
    assert difference(rows["b", "perplexity"]) == "−1.0000" and rows["b", "perplexity"]["tone"] == ""
    assert harness_rows({}) == []
