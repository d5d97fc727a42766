"""Models from elsewhere: taken without rounding, adapters merged as by PEFT, and refused where they would be compared wrongly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_models, tiny_params, tiny_tokenizer
from transformers import AutoModelForCausalLM

from rlhf_core.config import Params
from rlhf_core.model_check.check import check_external
from rlhf_core.models.build import save_model
from rlhf_core.models.given import (
    check_same_architecture,
    config_of,
    files_dtype,
    load_as_given,
    load_policy_from_elsewhere,
    teacher_folder,
    tokenizer_of_policy,
)
from rlhf_core.models.weights import read_state_dict

IDS = torch.tensor([[5, 9, 40, 41, 60, 7]])
MODEL = tiny_params().model


@pytest.fixture
def folder(tmp_path: Path, sft_folder: Path) -> Path:
    return Path(shutil.copytree(sft_folder, tmp_path / "policy"))


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [(("bfloat16",), "bfloat16"), (("float16",), "float16"), (("bfloat16", "float16"), "float32"), (("bfloat16", "float32"), "float32")],
)
def test_a_given_models_weights_are_kept_bit_by_bit(folder, tokenizer, tmp_path, dtypes, expected):
    """In the dtype of the files, or in one that has the numbers of all of them."""
    path = folder / "model.safetensors"
    weights = {name: tensor.to(getattr(torch, dtypes[i % len(dtypes)])) for i, (name, tensor) in enumerate(load_file(path).items())}
    save_file(weights, path, metadata={"format": "pt"})
    assert files_dtype(folder, default="float32") == expected
    model = load_as_given(folder, MODEL)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "taken")
    taken = read_state_dict(tmp_path / "taken")
    assert taken.keys() == weights.keys() and {str(t.dtype) for t in taken.values()} == {f"torch.{expected}"}
    assert all(torch.equal(taken[name].double(), weights[name].double()) for name in weights)


@pytest.fixture
def adapters(tmp_path: Path, sft_folder: Path) -> Path:
    """Adapters with random weights, saved by PEFT."""
    torch.manual_seed(6)
    base = AutoModelForCausalLM.from_pretrained(sft_folder)
    adapted = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    adapted.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"


@torch.no_grad()
def test_adapters_are_merged_into_the_base_that_they_name(adapters, sft_folder):
    from peft import PeftModel

    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sft_folder), adapters)(IDS).logits
    plain = AutoModelForCausalLM.from_pretrained(sft_folder)(IDS).logits
    merged = load_policy_from_elsewhere(str(adapters), MODEL)
    assert torch.allclose(merged(IDS).logits, theirs, atol=1e-5) and (theirs - plain).abs().max() > 0.1
    assert merged.state_dict().keys() == AutoModelForCausalLM.from_pretrained(sft_folder).state_dict().keys()
    rounded = load_policy_from_elsewhere(str(adapters), MODEL.model_copy(update={"dtype": "bfloat16"}))
    assert all(torch.equal(rounded.state_dict()[name], tensor.bfloat16()) for name, tensor in merged.state_dict().items() if "proj" in name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change(f / "adapter_config.json", peft_type="LOHA"), "expected adapters of type LORA in .*, got LOHA; merge them"),
        (
            lambda f: change(f / "adapter_config.json", base_model_name_or_path="./gone"),
            "base model of external.path: expected a folder",
        ),
        (lambda f: (f / "adapter_model.safetensors").unlink(), "expected adapter_model.safetensors in .*, got none; save the adapters"),
        (lambda f: drop_first(f / "adapter_model.safetensors"), "adapters that lack .*lora_"),
    ],
)
def test_adapters_that_would_be_another_policy_are_refused(adapters, sft_folder, tokenizer, damage, message):
    """By the check before a run too, but for what only merging them tells."""
    check_external(with_adapters(adapters, sft_folder), tokenizer)
    damage(adapters)
    with pytest.raises(ValueError, match=message):
        load_policy_from_elsewhere(str(adapters), MODEL)
    if "lack" not in message:
        with pytest.raises(ValueError, match=message):
            check_external(with_adapters(adapters, sft_folder), tokenizer)


def test_adapters_are_merged_into_the_revision_that_they_name(adapters, sft_folder, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    for commit, name in (("a" * 40, "main"), ("b" * 40, "v2")):
        snapshot = shutil.copytree(sft_folder, tmp_path / "hub/models--some--base/snapshots" / commit)
        reference = tmp_path / "hub/models--some--base/refs" / name
        reference.parent.mkdir(exist_ok=True)
        reference.write_text(commit)
    weights = {key: tensor * 2 for key, tensor in load_file(snapshot / "model.safetensors").items()}
    save_file(weights, snapshot / "model.safetensors", metadata={"format": "pt"})
    expected = {"v2": weights, "main": load_file(sft_folder / "model.safetensors")}
    for revision, of in (("v2", "v2"), (None, "main")):
        change(adapters / "adapter_config.json", base_model_name_or_path="some/base", revision=revision)
        merged = load_policy_from_elsewhere(str(adapters), MODEL).state_dict()
        assert torch.equal(merged["model.embed_tokens.weight"], expected[of]["model.embed_tokens.weight"])
    change(adapters / "adapter_config.json", revision="v9")
    with pytest.raises(ValueError, match=r"base model of external.path: expected revision v9 of some/base in the hub's cache, got none"):
        load_policy_from_elsewhere(str(adapters), MODEL)


def with_adapters(adapters: Path, model: Path) -> Params:
    given = {"external.path": str(adapters), "alignment.method": "external", "model.path": str(model)}
    return tiny_params(**{"model.architecture": None, **given})


def test_adapters_of_another_architecture_are_refused_before_a_run(adapters, folder, tokenizer):
    """Whose base isn't the model at model.path."""
    change(folder / "config.json", rope_theta=5e5, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    with pytest.raises(ValueError, match=r"expected a policy with the architecture .*rope_theta 10000.0 in place of 500000.0"):
        check_external(with_adapters(adapters, folder), tokenizer)


def change(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def drop_first(path: Path) -> None:
    weights = load_file(path)
    save_file(dict(list(weights.items())[1:]), path, metadata={"format": "pt"})


def test_another_architecture_is_refused_and_another_dtype_or_dropout_is_not(folder, sft_folder):
    own = config_of(sft_folder, MODEL)
    change(folder / "config.json", dtype="bfloat16", attention_dropout=0.1, use_cache=False, eos_token_id=7)
    check_same_architecture(config_of(folder, MODEL), own)
    change(folder / "config.json", rope_theta=5e5, rope_parameters={"rope_theta": 5e5, "rope_type": "default"})
    with pytest.raises(ValueError, match=r"expected a policy with the architecture .*rope_theta 500000.0 in place of 10000.0"):
        check_same_architecture(config_of(folder, MODEL), own)


def test_a_policys_tokenizer_may_be_missing_or_equal_and_nothing_else(folder, tokenizer):
    def taken(own_template: bool = False):
        return tokenizer_of_policy(str(folder), tokenizer, MODEL, own_template=own_template)

    assert taken() is tokenizer
    template = folder / "chat_template.jinja"
    template.write_text("{# another text that writes the same #}" + tokenizer.chat_template)
    assert taken() is tokenizer
    template.write_text(tokenizer.chat_template.replace("<|assistant|>", "<|assistant|>So "))
    with pytest.raises(ValueError, match=r"expected the chat template of models/sft, which writes .*got .*So .*own_template"):
        taken()
    assert "So " in taken(own_template=True).chat_template
    tiny_tokenizer(vocab_size=310).save_pretrained(folder)
    with pytest.raises(ValueError, match=r"expected the tokens of models/sft, by which the KL .*got another tokenizer"):
        taken()
    for path in folder.glob("*token*"):
        path.unlink()
    for own_template in (False, True):
        with pytest.raises(ValueError, match=r"expected a tokenizer beside the chat template in .*, got none; add the tokenizer files"):
            taken(own_template)
    template.unlink()
    assert taken() is tokenizer
    with pytest.raises(ValueError, match="own_template: expected a chat template in"):
        taken(own_template=True)


def test_a_teacher_has_the_policys_tokens_and_may_have_another_size(folder, tokenizer, tmp_path):
    key = "rl.distillation.teachers.0.path"

    def checked(path: Path) -> Path:
        return teacher_folder(str(path), tokenizer, MODEL, key=key)

    wider, _ = save_tiny_models(tmp_path / "wider", tokenizer, hidden_size=32)
    assert checked(wider) == wider
    with pytest.raises(ValueError, match=rf"{key}: expected a folder with a pretrained model, got .* with nothing there"):
        checked(tmp_path / "none")
    tiny_tokenizer(vocab_size=310).save_pretrained(folder)
    with pytest.raises(
        ValueError,
        match=rf"{key}: expected the tokens of models/sft, at which .*, got another tokenizer: .*; choose a teacher of the policy's",
    ):
        checked(folder)
    for path in folder.glob("*token*"):
        path.unlink()
    with pytest.raises(ValueError, match=rf"{key}: expected the teacher's tokenizer in .*, got none; add its files"):
        checked(folder)
    weights = load_file(wider / "model.safetensors")
    weights.pop(sorted(weights)[0])
    save_file(weights, wider / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="wider"):
        checked(wider)
