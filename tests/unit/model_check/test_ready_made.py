"""A reward model from elsewhere is tried before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from chat_templates import templated
from classifiers import save_classifier
from safetensors.torch import load_file, save_file
from tiny_models import tiny_params, tiny_tokenizer

from rlhf_core.config import ScorerConfig
from rlhf_core.model_check.check import run_trials, try_ready_made
from rlhf_core.model_check.trial import LIMIT


def tried(folder: Path, **changes):
    scorer = ScorerConfig(name="ready", kind="reward_model", weight=1.0, normalization="none", path=str(folder), **changes)
    return try_ready_made(scorer, tiny_params().model)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "bert", "roberta", "modernbert"])
def test_an_encoder_and_a_decoder_are_read_as_their_own_forward_reads_them(kind, tmp_path):
    found = tried(save_classifier(tmp_path, kind, templated("chatml"), vocab_size=400))
    assert found.refusal is None and found.difference < LIMIT, found


def test_the_chosen_label_is_the_one_that_is_compared(tmp_path):
    folder = save_classifier(tmp_path, "llama", templated("chatml"), vocab_size=400, num_labels=2, id2label={0: "BAD", 1: "GOOD"})
    assert tried(folder, label="GOOD").difference < LIMIT
    assert "which has BAD, GOOD, got none; set label" in tried(folder).refusal


def test_one_without_a_template_is_refused_with_what_to_add(tmp_path):
    tokenizer = templated("chatml")
    tokenizer.chat_template = None
    found = tried(save_classifier(tmp_path, "llama", tokenizer, vocab_size=400))
    assert found.difference is None and "add a chat_template.jinja" in found.refusal, found


def test_one_whose_pad_token_has_no_row_is_refused_with_the_token(tmp_path):
    tokenizer = templated("chatml")
    folder, rows = save_classifier(tmp_path, "llama", tokenizer, vocab_size=len(tokenizer)), len(tokenizer)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    tokenizer.save_pretrained(folder)
    found = tried(folder)
    assert found.difference is None and f"below the {rows} rows of its embedding, got [PAD] ({rows}); resize it" in found.refusal, found


def test_one_with_weights_that_nothing_reads_is_refused_by_their_names(tmp_path):
    folder = save_classifier(tmp_path, "llama", templated("chatml"), vocab_size=400)
    weights = load_file(folder / "model.safetensors")
    save_file(weights | {"gating.0.weight": torch.ones(2, 2)}, folder / "model.safetensors", metadata={"format": "pt"})
    assert "got 1 other, such as gating.0.weight" in tried(folder).refusal


def of_steps(folder: Path, separator: str) -> Path:
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"step_separator": separator}))
    return folder


def test_a_scorer_with_steps_needs_a_process_reward_model(tmp_path):
    folder = save_classifier(tmp_path, "llama", templated("chatml"), vocab_size=400)
    assert "with steps: sum, got one that scores whole responses; remove steps" in tried(folder, steps="sum").refusal
    assert tried(of_steps(folder, "\n"), steps="sum").refusal is None


def test_a_process_reward_model_without_scores_of_tokens_is_refused(tmp_path):
    folder = of_steps(save_classifier(tmp_path, "bert", templated("chatml"), vocab_size=400), "\n")
    assert "which scores whole sequences only; take a decoder" in tried(folder).refusal


def test_another_separator_than_that_of_reward_path_is_refused_before_anything_is_trained(tmp_path):
    folder = of_steps(save_classifier(tmp_path / "model", "llama", templated("chatml"), vocab_size=400), "\n")
    tiny_tokenizer().save_pretrained(tmp_path / "tokenizer")
    params = tiny_params(reward__path=str(folder), rl__ppo__critic_init="sft")
    with pytest.raises(ValueError, match=r"reward\.step_separator: expected that of the model at reward\.path, '\\n', got None"):
        run_trials(params, tmp_path / "tokenizer", tmp_path / "trial")
