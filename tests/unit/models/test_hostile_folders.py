"""Model folders that are torn, wrong or hostile: refused by name, and nothing in them is ever run."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from hostile import is_clear, mangled

from rlhf_core.models.build import load_language_model, load_scalar_model, new_scalar_model
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.weights import read_state_dict

LOADERS = [load_language_model, load_scalar_model, lambda folder: load_tokenizer(str(folder), trust_remote_code=False)]


class Bomb:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path):
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.fixture
def folder(tmp_path: Path, sft_folder: Path) -> Path:
    shutil.copytree(sft_folder, tmp_path / "model")
    return tmp_path / "model"


def refusal(load, folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        load(folder)
    assert is_clear(str(error.value)) and str(folder) in str(error.value), str(error.value)[:600]
    return str(error.value)


def loaded_or_refused(load, folder: Path) -> None:
    try:
        load(folder)
    except ValueError as error:
        assert is_clear(str(error)) and str(folder) in str(error), str(error)[:600]


@settings(max_examples=25)
@given(data=st.data())
def test_torn_or_changed_weights_are_refused(tmp_path_factory, sft_folder, data):
    whole = (sft_folder / "model.safetensors").read_bytes()
    folder = tmp_path_factory.getbasetemp() / "torn"
    shutil.copytree(sft_folder, folder, dirs_exist_ok=True)
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    content = data.draw(st.integers(0, len(whole) - 1).map(lambda n: whole[:n]) | mangled(whole[:header]).map(lambda b: b + whole[header:]))
    (folder / "model.safetensors").write_bytes(content)
    loaded_or_refused(load_language_model, folder)
    loaded_or_refused(read_state_dict, folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@settings(max_examples=25)
@given(data=st.data())
def test_any_garbage_in_a_settings_file_is_refused_or_does_no_harm(tmp_path_factory, sft_folder, name, data):
    folder = tmp_path_factory.getbasetemp() / "garbage"
    shutil.copytree(sft_folder, folder, dirs_exist_ok=True)
    whole = (sft_folder / name).read_bytes()
    (folder / name).write_bytes(data.draw(st.binary(max_size=40) | mangled(whole)))
    for load in LOADERS[::2]:
        loaded_or_refused(load, folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "adapter_model.bin"])
def test_a_pickle_is_refused_and_never_opened(folder, tmp_path, name):
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    (folder / name).write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    if name.startswith("adapter"):
        (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(folder)}))
    for load in (load_language_model, load_scalar_model, read_state_dict):
        assert "safetensors" in refusal(load, folder)
    torch.save({"a": Bomb(tmp_path / "ran")}, folder / name)
    for load in (load_language_model, load_scalar_model, read_state_dict):
        assert "safetensors" in refusal(load, folder)
    assert not (tmp_path / "ran").exists()


def test_adapters_are_refused_for_the_model_that_they_name_could_be_anywhere(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "/elsewhere"}))
    for load in LOADERS[:2]:
        assert "got adapters of another one; merge and save them" in refusal(load, folder)


def test_code_in_a_model_folder_runs_only_if_trusted(folder, tmp_path):
    (folder / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass C: ...\n")
    for name, key in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        content = json.loads((folder / name).read_text())
        maps = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.C", "AutoModelForSequenceClassification": "evil.C"}
        content |= {"auto_map": maps if key == "AutoConfig" else {"AutoTokenizer": ["evil.C", "evil.C"]}, "model_type": "mine"}
        (folder / name).write_text(json.dumps(content))
    for load in LOADERS:
        loaded_or_refused(load, folder)
    assert not (tmp_path / "ran").exists()


def test_weights_that_are_missing_are_refused_and_not_made_up(folder):
    """transformers would fill them with random numbers and warn where nobody looks."""
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for load in (
        load_language_model,
        lambda f: new_scalar_model(f, load_tokenizer(str(f), trust_remote_code=False), trust_remote_code=False),
    ):
        assert "expected all of its weights, got none for model.layers.1.mlp.up_proj.weight" in refusal(load, folder)


def test_a_language_model_is_no_reward_model(sft_folder):
    assert "got none for score.weight" in refusal(load_scalar_model, sft_folder)


def test_weights_of_another_shape_are_refused(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    assert "mlp.down_proj.weight of shape (16, 48), as config.json says, got (16, 32)" in refusal(load_language_model, folder)


@pytest.mark.parametrize("place", ["../../elsewhere.safetensors", "/etc/passwd", "missing.safetensors", "pytorch_model.bin", 3, "a\x00b"])
def test_an_index_may_only_name_weights_that_are_there(folder, place):
    index = {"metadata": {}, "weight_map": {"lm_head.weight": place}}
    (folder / "model.safetensors").rename(folder.parent / "elsewhere.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model.safetensors.index.json" in refusal(load_language_model, folder)


@pytest.mark.parametrize("template", ["{% for %}", "{{ x.y.z }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ 1 / 0 }}", 3])
def test_a_chat_template_that_fails_is_refused_with_its_tokenizer(folder, template):
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    assert "chat template" in refusal(LOADERS[2], folder)
