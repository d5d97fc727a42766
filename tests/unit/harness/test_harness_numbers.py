"""Figures of the harness's tasks by our models, beside those of the harness's own Hugging Face model on the same weights and tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lm_eval.models.huggingface import HFLM
from tiny_models import save_tiny_models, tiny_params
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_core.config import Params
from rlhf_core.harness.run import SharedEngine, _model, run_harness
from rlhf_core.harness.tasks import run_tasks

LONGEST = 32
QUESTIONS = [f"Please sort {number}." for number in (4172, 309, 81, 5526, 730, 1, 98, 64)]
TASKS = {
    "choices": """
        output_type: multiple_choice
        doc_to_text: "{{question}}"
        doc_to_target: "{{gold}}"
        doc_to_choice: "{{options}}"
        metric_list:
          - {metric: acc, aggregation: mean, higher_is_better: true}
          - {metric: acc_norm, aggregation: mean, higher_is_better: true}
    """,
    "endings": """
        output_type: loglikelihood
        doc_to_text: "{{opening}}"
        doc_to_target: "{{ending}}"
        metric_list:
          - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
          - {metric: acc, aggregation: mean, higher_is_better: true}
    """,
    "texts": """
        output_type: loglikelihood_rolling
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
    """,
    "answers": """
        output_type: generate_until
        doc_to_text: "{{question}}"
        doc_to_target: "{{answer}}"
        generation_kwargs: {until: ["s"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
    """,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tasks above, whose data are files beside them, with paths relative to the folder."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [
        {
            "question": question if number else "",  # a context may be empty
            "options": [f" {number}", " Certainly: 17.", "No"],
            "gold": number % 3,
            "opening": question if number % 2 else "",
            "ending": f" It is {number}.",
            "text": question * (number + 1),  # of up to 100 tokens, more than fit
            "answer": "",
        }
        for number, question in enumerate(QUESTIONS)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        lines = [f"task: {name}", "dataset_path: json", "dataset_kwargs: {data_files: {test: rows.jsonl}}", "test_split: test"]
        body = [line[8:] for line in text.strip("\n").splitlines()]
        (folder / f"{name}.yaml").write_text("\n".join([*lines, "fewshot_split: test", *body, "metadata: {version: 1}"]))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> dict[str, Path]:
    made = {name: save_tiny_models(tmp_path_factory.mktemp(name), tokenizer, seed=seed)[0] for name, seed in (("sft", 1), ("policy", 5))}
    return made


def params(tasks: Path, *names: str, **settings: Any) -> Params:
    harness = {"tasks": list(names), "include_path": str(tasks), "max_length": LONGEST, **settings}
    return tiny_params(evaluation__harness=harness, evaluation__backend="pytorch")


def ours(given: Params, folder: Path) -> dict[str, Any]:
    engine = SharedEngine(given)
    try:
        return run_tasks(given.evaluation.harness, _model(given, folder, engine), limit=given.evaluation.harness.limit)
    finally:
        engine.close()


def theirs(given: Params, folder: Path, *, max_length: int) -> dict[str, Any]:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    own = HFLM(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=3, device="cpu")
    return run_tasks(given.evaluation.harness, own, limit=given.evaluation.harness.limit)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["results"].keys() == other["results"].keys()
    for name, figures in one["results"].items():
        assert {k: v for k, v in figures.items() if isinstance(v, float)} == pytest.approx(
            {k: v for k, v in other["results"][name].items() if isinstance(v, float)}, rel=1e-4, nan_ok=True
        )
    for name, samples in one["samples"].items():
        for sample, its in zip(samples, other["samples"][name], strict=True):
            assert sample["arguments"] == its["arguments"]
            for value, same in zip(sample["resps"], its["resps"], strict=True):
                assert flat(value) == [pytest.approx(x, abs=1e-4) if isinstance(x, float) else x for x in flat(same)]


def flat(values: Any) -> list[Any]:
    return [x for value in values for x in flat(value)] if isinstance(values, list | tuple) else [values]


@pytest.mark.parametrize("fewshot", [0, 1])
@pytest.mark.parametrize("chat", [False, True])
def test_log_likelihoods_and_accuracies_are_those_of_the_harness(tasks, folders, world, fewshot, chat):
    """Contexts that are empty, and that are too long with an example; both models cut the same beginnings."""
    given = params(tasks, "choices", "endings", num_fewshot=fewshot, chat_template=chat)
    assert_same(ours(given, folders["sft"]), theirs(given, folders["sft"], max_length=LONGEST - 1))  # theirs doesn't count the last token


def test_perplexity_of_texts_longer_than_the_window_is_that_of_the_harness(tasks, folders, world):
    given = params(tasks, "texts")
    assert_same(ours(given, folders["sft"]), theirs(given, folders["sft"], max_length=LONGEST - 1))


@pytest.mark.parametrize("chat", [False, True])
def test_answers_are_those_of_the_harness(tasks, folders, world, chat):
    """Greedy answers end before the stop sequence or at the end token, and contexts leave room for them."""
    given = params(tasks, "answers", num_fewshot=1, chat_template=chat)
    found = ours(given, folders["sft"])
    assert_same(found, theirs(given, folders["sft"], max_length=LONGEST))
    texts = {sample["resps"][0][0] for sample in found["samples"]["answers"]}
    assert len(texts) > 3 and not any("s" in text for text in texts)


def test_both_models_have_their_own_figures_and_cut_contexts_are_counted(tasks, folders, world):
    """One engine samples from both in turn; the second model samples before its log-likelihoods."""
    given = params(tasks, "choices", "answers", num_fewshot=1, limit=6)
    found = run_harness(given, folders)
    for name, folder in folders.items():
        for task, longest in (("choices", LONGEST - 1), ("answers", LONGEST)):
            figures = theirs(given, folder, max_length=longest)["results"][task]
            for key, figure in found["tasks"][task]["figures"].items():
                assert figure[name]["value"] == pytest.approx(figures[key], abs=1e-9)
                assert figure[name]["stderr"] == pytest.approx(figures[key.replace(",", "_stderr,")], abs=1e-9)
    choices = found["tasks"]["choices"]
    assert (choices["n"], choices["documents"], choices["num_fewshot"]) == (6, len(QUESTIONS), 1)
    assert choices["figures"]["acc,none"]["difference"]["n"] == 6
    assert 0 < choices["truncated"]["sft"] <= 6 and found["tasks"]["answers"]["truncated"]["sft"] > 0


@pytest.mark.long  # starts vLLM; quick tests have PyTorch's engine
def test_answers_of_vllm_are_those_of_pytorch_for_both_models(tasks, tokenizer, tmp_path, world):
    """Greedy answers end at the same stop strings, and the engine has the second model's weights for its answers."""
    folders = [save_tiny_models(tmp_path / str(seed), tokenizer, seed=seed, hidden_size=64)[0] for seed in (1, 5)]
    pytorch = params(tasks, "answers", "choices", num_fewshot=1)
    config = pytorch.evaluation.model_copy(update={"backend": "vllm"})
    vllm = pytorch.model_copy(update={"evaluation": config})
    by_vllm, by_pytorch = SharedEngine(vllm), SharedEngine(pytorch)
    try:
        for folder in folders:
            found = [run_tasks(p.evaluation.harness, _model(p, folder, e), limit=None) for p, e in ((vllm, by_vllm), (pytorch, by_pytorch))]
            one, other = ([s["resps"] for s in of["samples"]["answers"]] for of in found)
            assert one == other and len({text for ((text,),) in one}) > 3
    finally:
        by_vllm.close()
        by_pytorch.close()
