"""Shapes of folders agree with the modelling class, or the folder is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from clerk_params import CLERK_PARAMS
from seeing_models import save_seeing_model
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_core.planning.__main__ import main
from rlhf_core.planning.models import read_model
from rlhf_core.planning.structure import from_class

PARAMS = CLERK_PARAMS
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
DECODERS = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "mistral": {},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32},
    "gemma": {"head_dim": 32},  # ties its head by default
    "gemma2": {"head_dim": 32},
    "gemma3_text": {"head_dim": 32},
    "phi3": {},
    "cohere": {},
    "gpt_oss": {"num_local_experts": 4},
}
OTHERS = {
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
    "starcoder2": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4},
    "gpt_neox": {},
    "deepseek_v3": {},
}


def saved(folder: Path, family: str, more: dict) -> int:
    """Write the family's config.json, and return the number of parameters of a real model of it."""
    settings = {**SIZES, "vocab_size": 5000, "pad_token_id": 0, **more}
    if family == "gpt2":
        settings = {name: value for name, value in settings.items() if name not in SIZES}
    config = AutoConfig.for_model(family, **settings)
    config.save_pretrained(folder)
    return sum(parameter.numel() for parameter in AutoModelForCausalLM.from_config(config).parameters())


@pytest.mark.parametrize("family", DECODERS)
def test_a_decoders_parameters_are_those_of_its_class(tmp_path, family):
    real = saved(tmp_path, family, DECODERS[family])
    shape = from_class(tmp_path, trust_remote_code=False)
    assert shape.parameters == real
    with torch.device("meta"):
        scored = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    head = 0 if shape.tied else 5000 * 64
    assert shape.scalar_parameters == sum(p.numel() for p in scored.parameters()) - head + 64


@pytest.mark.parametrize("family", OTHERS)
def test_another_structure_is_refused_and_not_counted_as_a_decoder(monkeypatch, capsys, tmp_path, family):
    real = saved(tmp_path, family, OTHERS[family])
    for mode in (["--stages"], []):
        monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), "--model", str(tmp_path), *mode])
        assert main() == 2
        printed = capsys.readouterr()
        assert printed.out == "" and str(tmp_path) in printed.err and "decoder" in printed.err
        assert f"{real:,} parameters in all" in printed.err or family == "gpt2"


def test_stages_of_a_folder_are_those_of_its_parameters(monkeypatch, capsys, tmp_path):
    real = saved(tmp_path, "gemma2", {"head_dim": 32})
    arguments = ["--stages", "--json", "--gpus", "1", "--model", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *arguments])
    assert main() == 0
    rank = json.loads(capsys.readouterr().out)["train_sft"]["processes"][0]
    assert rank["parts"]["model: weights"] == 4 * real


CODE = """
import transformers

class MineConfig(transformers.LlamaConfig):
    model_type = "mine"

class Mine(transformers.LlamaForCausalLM):
    config_class = MineConfig
"""


def test_a_class_of_the_folders_own_is_built_only_if_trusted(monkeypatch, capsys, tmp_path):
    folder = tmp_path / "model"
    real = saved(folder, "llama", {})
    (folder / "mine.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    maps = {"AutoConfig": "mine.MineConfig", "AutoModelForCausalLM": "mine.Mine"}
    (folder / "config.json").write_text(json.dumps(config | {"auto_map": maps, "model_type": "mine"}))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for trusted, code in (("false", 2), ("true", 0)):
        given = ["--stages", "--json", "--gpus", "1", "--model", str(folder), "--set", f"model.trust_remote_code={trusted}"]
        monkeypatch.setattr(sys, "argv", ["planning", "--params-file", str(PARAMS), *given])
        assert main() == code
        printed = capsys.readouterr()
        assert ((tmp_path / "modules").exists(), "contains custom code" in printed.err) == (trusted == "true", trusted == "false")
    assert json.loads(printed.out)["train_sft"]["processes"][0]["parts"]["model: weights"] == 4 * real


def test_memory_of_a_model_that_sees_isn_t_predicted(tmp_path):
    found = read_model(save_seeing_model(tmp_path / "model"))
    assert found.shape is None and found.parameters > 0
