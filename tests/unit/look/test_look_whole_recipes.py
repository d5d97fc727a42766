"""With a model the look prints a recipe that params.yaml accepts as it is, what its stages take, and the same as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from whole_matrix import cells

from rlhf_core.config import Params, load_overlaid, parse_yaml
from rlhf_core.look import propose
from rlhf_core.look.__main__ import main
from rlhf_core.look.facts import own_system_prompt
from rlhf_core.models.template import CHATML, CONTINUATION
from tests.tiny_models import save_tiny_models, tiny_tokenizer

WHOLE = Path(__file__).parents[3] / "params.yaml"
PAIRS = [{"prompt": f"Sort {i} of these.", "chosen": "1 2 3"[: 3 + 2 * (i % 2)], "rejected": "3 2 1"[: 5 - 2 * (i % 2)]} for i in range(40)]
MARKED = [{"prompt": f"Sort {i}.", "completion": f"It is {i}.", "label": bool(i % 2)} for i in range(40)]
SOLVED = [{"question": f"What is {i} and 2?", "answer": f"It is {i + 2}.\n#### {i + 2}"} for i in range(40)]
DEMONSTRATIONS = [{"instruction": f"Count to {i} and on.", "output": f"I count to {i}, and then I go on."} for i in range(40)]
TEXTS = [{"text": f"This is text {i}, and it goes on."} for i in range(40)]


def written(folder: Path, records: list[dict]) -> Path:
    path = folder / "d.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    return save_tiny_models(tmp_path_factory.mktemp("chat"), tiny_tokenizer())[0]


@pytest.fixture(scope="module")
def base_model(tmp_path_factory) -> Path:
    """Without a template, and with 64 positions."""
    return without_template(save_tiny_models(tmp_path_factory.mktemp("base"), tiny_tokenizer())[0])


def without_template(folder: Path) -> Path:
    (folder / "chat_template.jinja").unlink()
    return folder


def looked(capsys, path: Path, model: Path, *options: str, params: Path = WHOLE) -> dict[str, Any]:
    assert main([str(path), "--model", str(model), "--params", str(params), "--json", *options]) == 0
    (reading,) = json.loads(capsys.readouterr().out)["readings"]
    return reading


def accepted(reading: dict[str, Any], folder: Path) -> Params:
    """The params with the recipe as it is printed."""
    (folder / "recipe.yaml").write_text(reading["yaml"], encoding="utf-8")
    return load_overlaid(WHOLE, folder / "recipe.yaml")


QUICK = [(PAIRS, "dpo", False), (SOLVED, "rl", True)]


@pytest.mark.parametrize(
    ("records", "method", "sft"),
    cells([(PAIRS, "dpo", False), (MARKED, "kto", False), (SOLVED, "rl", True), (DEMONSTRATIONS, "external", True)], QUICK),
)
def test_the_recipe_is_accepted_as_printed(records, method, sft, chat_model, tmp_path, capsys):
    reading = looked(capsys, written(tmp_path, records), chat_model)
    params = accepted(reading, tmp_path)
    assert (params.alignment.method, params.sft.enabled, params.reward.enabled) == (method, sft, False)
    assert params.model.path == str(chat_model) and params.model.max_length == reading["max_length"]
    stages = reading["proposal"]["stages"]
    assert {"check_model", "evaluate"} <= set(stages) and ("train_sft" in stages) == sft
    assert all(stage["seconds"] > 0 for stage in stages.values())


def test_gpus_are_planned_for_without_being_there(chat_model, tmp_path, capsys):
    path = written(tmp_path, PAIRS)
    params = accepted(looked(capsys, path, chat_model, "--gpu", "a100-80", "--gpus", "8"), tmp_path)
    assert (params.dpo.ranks, params.model.dtype, params.dpo.zero_stage) == (8, "bfloat16", 1)
    assert main([str(path), "--model", str(chat_model), "--params", str(WHOLE), "--gpus", "2"]) == 0
    assert "on 2 GPUs (h100) of 79 GiB" in capsys.readouterr().out


@pytest.mark.long
def test_a_config_json_without_weights_is_enough_for_a_proposal(chat_model, tmp_path, capsys):
    folder = tmp_path / "shape"
    shutil.copytree(chat_model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    path = written(tmp_path, PAIRS)
    bare, whole = looked(capsys, path, folder), looked(capsys, path, chat_model)
    (added,) = set(bare["proposal"]["warnings"]) - set(whole["proposal"]["warnings"])
    assert "no weights" in added
    assert bare["proposal"]["settings"] | {"model.path": ""} == whole["proposal"]["settings"] | {"model.path": ""}


def test_pairs_alone_are_said_to_give_no_verdict(chat_model, tmp_path, capsys):
    renamed = [{"question": pair["prompt"], "good_answer": pair["chosen"], "bad_answer": pair["rejected"]} for pair in PAIRS]
    reading = looked(capsys, written(tmp_path, renamed), chat_model)
    assert accepted(reading, tmp_path).data.sources[0].columns["chosen"] == "good_answer"
    assert any("no verdict" in line and "reward.enabled=true" in line for line in reading["proposal"]["notes"])


def test_a_recipe_that_is_not_written_is_said(tmp_path, capsys):
    path, recipe = written(tmp_path, [{"question": "What is 2 + 2?", "answer": "4"}]), tmp_path / "mine.yaml"
    assert main([str(path), "--params", str(WHOLE), "--recipe", str(recipe)]) != 0
    assert not recipe.exists() and "mine.yaml is not written" in capsys.readouterr().err


def test_the_system_prompt_that_a_template_adds_is_found():
    tokenizer, turn = tiny_tokenizer(), "{{ '[' + m['role'] + ']' + m['content'] + '[/' + m['role'] + ']' }}"
    tokenizer.chat_template = plain = "{% for m in messages %}" + turn + "{% endfor %}"
    assert own_system_prompt(tokenizer) == ""
    tokenizer.chat_template = "{% if messages[0]['role'] != 'system' %}[system]Be kind.[/system]{% endif %}" + plain
    assert own_system_prompt(tokenizer) == "Be kind."
    tokenizer.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + plain
    assert own_system_prompt(tokenizer) == ""


def test_a_tiny_model_gets_rates_by_which_it_learns_unless_the_user_gave_some(chat_model, tmp_path, capsys):
    path = written(tmp_path, PAIRS)
    params = accepted(looked(capsys, path, chat_model), tmp_path)
    assert params.dpo.learning_rate == 5e-4
    (tmp_path / "own.yaml").write_text("dpo: {learning_rate: 0.002}\n")
    reading = looked(capsys, path, chat_model, params=tmp_path / "own.yaml")
    assert "learning_rate" not in reading["yaml"] and any("learning rate 0.002" in line for line in reading["proposal"]["notes"])


def test_a_small_pretrained_model_gets_a_higher_rate_for_few_steps_on_pairs(chat_model, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(propose, "SMALL_MODEL", 0)  # the tiny model counts as one of usual size
    path = written(tmp_path, PAIRS)
    assert accepted(looked(capsys, path, chat_model), tmp_path).dpo.learning_rate == 5e-6
    (tmp_path / "own.yaml").write_text("dpo: {learning_rate: 2.0e-6}\n")
    assert "learning_rate" not in looked(capsys, path, chat_model, params=tmp_path / "own.yaml")["yaml"]
    monkeypatch.setattr(propose, "FEW_STEPS", 0)
    assert accepted(looked(capsys, path, chat_model), tmp_path).dpo.learning_rate == 1e-6


def test_a_base_model_gets_a_template_and_sft_first(base_model, tmp_path, capsys):
    texts = [{**pair, "chosen": " " + pair["chosen"], "rejected": " " + pair["rejected"]} for pair in PAIRS]
    params = accepted(looked(capsys, written(tmp_path, texts), base_model), tmp_path)
    assert (params.model.chat_template, params.sft.enabled) == ("continuation", True)
    assert accepted(looked(capsys, written(tmp_path, PAIRS), base_model), tmp_path).model.chat_template is None  # a question and its answer
    several = [{"messages": [{"role": role, "content": f"{i} {role}"} for role in ("user", "assistant") * 2]} for i in range(40)]
    assert accepted(looked(capsys, written(tmp_path, several), base_model), tmp_path).model.chat_template is None


@pytest.mark.long
def test_a_base_model_with_chatml_tokens_gets_chatml(tmp_path, capsys):
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    model = without_template(save_tiny_models(tmp_path / "m", tokenizer)[0])
    reading = looked(capsys, written(tmp_path, PAIRS), model)
    assert accepted(reading, tmp_path).model.chat_template == "chatml" and CHATML != CONTINUATION
    first = reading["samples"][0]["sequences"][-1]
    assert tokenizer.decode(first["ids"]).startswith("<|im_start|>user\n") and first["name"] == "prompt"


def test_rows_beyond_the_positions_are_said_and_never_dropped_in_silence(base_model, tmp_path, capsys):
    long = [{**pair, "chosen": "1 " * 100} for pair in PAIRS[:10]]
    reading = looked(capsys, written(tmp_path, PAIRS[10:] + long), base_model)
    assert "25% of the" in " ".join(reading["proposal"]["warnings"])
    recipe = parse_yaml(reading["yaml"], "printed")
    assert recipe["model"]["max_length"] == 64 and "drop" not in recipe["data"]["sources"][0]
    assert "max_dropped_fraction" not in recipe.get("validation", {})


def test_plain_text_has_no_method_for_a_pretrained_model(chat_model, tmp_path, capsys):
    reading = looked(capsys, written(tmp_path, TEXTS), chat_model)
    assert reading["proposal"]["method"] == "" and reading["proposal"]["stages"] == {}
    assert "demonstrations" in reading["proposal"]["notes"][0]


def test_the_recipe_is_written_to_a_new_file_only(chat_model, tmp_path, capsys):
    arguments = [str(written(tmp_path, PAIRS)), "--model", str(chat_model), "--params", str(WHOLE), "--recipe", str(tmp_path / "mine.yaml")]
    assert main(arguments) == 0
    assert load_overlaid(WHOLE, tmp_path / "mine.yaml").alignment.method == "dpo" and "Written to" in capsys.readouterr().out
    assert main(arguments) == 2
    assert "expected a new file, got one that exists" in capsys.readouterr().err


def test_predicted_steps_are_about_so_many(chat_model, tmp_path, capsys):
    path = written(tmp_path, PAIRS)
    of_policy = looked(capsys, path, chat_model)["proposal"]["stages"]["train_policy"]["steps"]
    main([str(path), "--model", str(chat_model), "--params", str(WHOLE)])
    printed = capsys.readouterr().out
    assert f"~{of_policy:,} " in next(line for line in printed.splitlines() if line.startswith("#   train_policy"))
