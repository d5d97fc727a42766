"""The trial agrees with a model that is computed rightly, and names what isn't."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import MAX_LENGTH, tiny_params, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from whole_matrix import cells

from rlhf_core.config import LoraConfig
from rlhf_core.model_check.miniature import random_model
from rlhf_core.model_check.trial import LIMIT, ON, Trial, TrialSettings, largest
from rlhf_core.models import lora
from tests.model_families import FAMILIES, OTHERS

LORA = LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules="all-linear")


class CrowdedConfig(LlamaConfig):
    model_type = "crowded_llama"


class CrowdedLlama(LlamaForCausalLM):
    """A model whose logits depend on how many sequences are looked at together, as no trainer expects."""

    config_class = CrowdedConfig

    def forward(self, input_ids=None, **how):
        output = super().forward(input_ids=input_ids, **how)
        output.logits = output.logits * (1 + 0.01 * len(input_ids))
        return output


pytestmark = pytest.mark.usefixtures("world")


def trial(folder: Path, family: str) -> Trial:
    return _trial({**FAMILIES, **OTHERS}[family](), folder)


def _trial(model, folder: Path) -> Trial:
    params = tiny_params()
    settings = TrialSettings(max_length=MAX_LENGTH, dpo=params.dpo, loras=(LORA,), threads=1)
    return Trial(model, lambda: random_model(model.config, seed=1, labels=1), tiny_tokenizer(), settings, folder)


@pytest.mark.parametrize("family", cells(["llama", "llama_tied", "qwen3", "gemma3", "mixtral"], ["llama_tied", "mixtral"]))
def test_a_family_agrees_with_transformers_after_two_updates(family, tmp_path):
    tried = trial(tmp_path, family)
    for column in ("sft", "dpo", "lora", "reward", "shared_prefix", "pytorch"):
        found = tried.run(column)
        assert found.refusal is None, found
        assert found.difference < LIMIT, found


@pytest.mark.parametrize("family", ["phi3_longrope", "granite"])
def test_a_limit_beyond_the_original_length_and_a_family_without_classifiers_are_right_too(family, tmp_path):
    tried = trial(tmp_path, family)
    for column in ("sft", "reward", "shared_prefix"):
        found = tried.run(column)
        assert found.refusal is None and found.difference < LIMIT, found


def test_a_difference_that_float64_doesnt_have_is_rounding(tmp_path):
    """Qwen 3.5's adapted and merged weights: 4e-4 apart in float32."""
    found = trial(tmp_path, "qwen3_5").run("lora")
    assert found.refusal is None and found.difference < 10 * LIMIT, found


def test_a_mistake_is_one_in_float64_too(tmp_path, monkeypatch):
    """Adapters merged with a scale that is wrong by a thousandth."""
    exact = lora.corrected
    monkeypatch.setattr(
        lora, "corrected", lambda weight, a, b, *, scale, transposed: exact(weight, a, b, scale=1.001 * scale, transposed=transposed)
    )
    found = trial(tmp_path, "qwen3_5").run("lora")
    assert found.refusal.startswith("differs by") and found.difference > LIMIT, found


def test_windows_are_met_by_sequences_that_share_their_beginning(tmp_path):
    """Gemma 3 with windows of 16: off by some 3 nats where the window is lost."""
    found = trial(tmp_path, "gemma3").run("shared_prefix")
    assert found.note == ON and found.difference < LIMIT


def test_a_model_that_depends_on_its_neighbours_is_found_out(tmp_path):
    AutoConfig.register("crowded_llama", CrowdedConfig, exist_ok=True)
    AutoModelForCausalLM.register(CrowdedConfig, CrowdedLlama, exist_ok=True)
    torch.manual_seed(0)
    shape = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    tried = _trial(CrowdedLlama(CrowdedConfig(**shape, initializer_range=0.5)).eval(), tmp_path)
    found = tried.run("sft")
    assert found.difference > LIMIT and found.refusal.startswith("differs by"), found


def test_what_a_library_raises_is_a_refusal_in_words(tmp_path):
    settings = LoraConfig(rank=4, alpha=8.0, dropout=0.0, target_modules=["q_prog"])
    params = tiny_params()
    model = FAMILIES["llama"]()
    how = TrialSettings(max_length=MAX_LENGTH, dpo=params.dpo, loras=(settings,), threads=1)
    found = Trial(model, lambda: model, tiny_tokenizer(), how, tmp_path).run("lora")
    assert found.refusal.startswith("lora.target_modules: expected linear layers") and found.difference is None


def test_a_missing_number_is_an_infinite_difference():
    assert largest(torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0])) == float("inf")
    assert largest(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == 0.5
