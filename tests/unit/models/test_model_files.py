"""A folder's weights: refused by name where they don't fit its settings, dequantized or refused where they are quantized."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, GptOssForCausalLM, Llama4Config, Llama4ForConditionalGeneration

from rlhf_core.models.build import check_weights, load_language_model, load_scalar_model, new_scalar_model, save_model
from rlhf_core.models.folder import check_model_folder, count_parameters, quantization
from tests.model_families import FAMILIES

FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # magnitudes of E2M1; a fourth bit is the sign


@pytest.fixture
def folder(tmp_path: Path, sft_folder: Path) -> Path:
    shutil.copytree(sft_folder, tmp_path / "model")
    return tmp_path / "model"


def settings(folder: Path, name: str = "config.json", **changes: object) -> None:
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def refusals(folder: Path) -> tuple[str, str]:
    """Of the check and of loading."""
    found = []
    for load in (check_weights, load_language_model):
        with pytest.raises(ValueError) as raised:
            load(folder)
        found.append(str(raised.value))
    return found[0], found[1]


def test_layers_beyond_the_settings_are_refused_before_and_at_loading(folder: Path):
    settings(folder, num_hidden_layers=1)
    for message in refusals(folder):
        assert f"model {folder}: expected only weights that LlamaForCausalLM reads" in message
        assert "got 9 others, such as model.layers.1.input_layernorm.weight" in message and message.endswith("or remove these weights")


def test_biases_that_the_settings_turn_off_are_refused(folder: Path):
    weights(folder, lambda w: w | {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)})
    for message in refusals(folder):
        assert "got 1 other, such as model.layers.0.self_attn.q_proj.bias" in message


def test_weights_under_other_names_are_named_beside_the_missing_ones(folder: Path):
    weights(folder, lambda w: {f"module.{name}": tensor for name, tensor in w.items()})
    for message in refusals(folder):
        assert "got none for lm_head.weight, " in message and "and module.lm_head.weight, " in message


def test_a_head_that_disagrees_with_its_tie_is_refused_and_an_equal_one_is_read(folder: Path):
    settings(folder, tie_word_embeddings=True)
    for message in refusals(folder):
        assert "expected lm_head.weight to equal model.embed_tokens.weight" in message and "set tie_word_embeddings to false if" in message
    weights(folder, lambda w: w | {"lm_head.weight": w["model.embed_tokens.weight"].clone()})
    check_weights(folder)
    assert load_language_model(folder).lm_head.weight.shape == (300, 16)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.1.attn.masked_bias",
        "model.layers.1.attention.bias",
        "model.embeddings.position_ids",
        "transformer.h.0.attn.causal_mask",
        "mtp.layers.0.mlp.up_proj.weight",
        "model.mtp_block.0.mlp.up_proj.weight",
        "v_head.summary.weight",
    ],
)
def test_buffers_of_older_versions_and_heads_of_further_tokens_do_no_harm(folder: Path, name: str):
    weights(folder, lambda w: w | {name: torch.ones(1, 4)})
    check_weights(folder)
    load_language_model(folder)


def test_the_language_model_of_a_folder_with_a_vision_tower_is_read_alone(tmp_path: Path):
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    text = {**shape, "vocab_size": 300, "num_key_value_heads": 1, "head_dim": 32, "intermediate_size_mlp": 64, "num_local_experts": 2}
    sees = {**shape, "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64}
    both = Llama4ForConditionalGeneration(Llama4Config(text_config=text, vision_config=sees)).eval()
    both.save_pretrained(tmp_path)
    check_weights(tmp_path)
    loaded, ids = load_language_model(tmp_path), torch.tensor([[5, 6, 7, 8]])
    assert type(loaded).__name__ == "Llama4ForCausalLM"
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, both(input_ids=ids).logits)


def test_a_reward_model_may_keep_a_language_models_head_but_no_other_weights(reward_folder: Path, tmp_path: Path):
    folder = tmp_path / "reward"
    shutil.copytree(reward_folder, folder)
    weights(folder, lambda w: w | {"lm_head.weight": torch.ones(300, 16)})
    check_weights(folder, scalar=True)
    load_scalar_model(folder)
    weights(folder, lambda w: w | {"gating.0.weight": torch.ones(4, 16)})
    with pytest.raises(ValueError, match=r"got 1 other, such as gating\.0\.weight"):
        check_weights(folder, scalar=True)


def test_a_reward_model_starts_from_every_language_model_that_was_saved(folder: Path, tokenizer):
    assert not new_scalar_model(folder, tokenizer, trust_remote_code=False).score.weight.any()


@pytest.mark.parametrize(
    "given",
    [
        {"do_sample": False, "temperature": 0.9, "top_p": 0.6, "eos_token_id": [1, 7]},
        {"pad_token_id": -1, "eos_token_id": [1, 7]},
        {"num_beams": 1, "length_penalty": 0.5, "eos_token_id": [1, 7]},
    ],
)
def test_a_generation_config_that_cannot_be_written_keeps_its_token_ids(folder: Path, tokenizer, tmp_path: Path, given: dict):
    (folder / "generation_config.json").write_text(json.dumps(given))
    model = load_language_model(folder)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "saved")
    saved = GenerationConfig.from_pretrained(tmp_path / "saved")
    saved.validate(strict=True)
    assert saved.eos_token_id == [1, 7] and saved.temperature in (None, 1.0)
    valid = {"do_sample": True, "temperature": 0.9, "eos_token_id": 1}
    (folder / "generation_config.json").write_text(json.dumps(valid))
    assert load_language_model(folder).generation_config.temperature == 0.9


@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "compressed-tensors", "hqq"])
def test_a_quantized_folder_is_refused_by_its_methods_name(folder: Path, method: str):
    settings(folder, quantization_config={"quant_method": method})
    with pytest.raises(ValueError, match=f"got some quantized by {method}; choose the model that they were made from .*dequantize"):
        check_model_folder(folder)


def test_the_quantization_of_a_text_model_inside_another_counts_and_bitsandbytes_needs_no_name():
    assert quantization({"text_config": {"quantization_config": {"quant_method": "awq"}}}) == "awq"
    assert quantization({"quantization_config": {"load_in_4bit": True}}) == "bitsandbytes"
    assert quantization({"quantization_config": {}, "compression_config": None}) is None


def test_an_fp8_folder_is_loaded_and_saved_in_full_precision(folder: Path, tokenizer, tmp_path: Path):
    plain, rounded = load_file(folder / "model.safetensors"), {}
    for name, tensor in plain.items():
        if name.endswith("proj.weight"):
            scale = tensor.abs().max() / 448  # one block, of at most 128 x 128
            rounded |= {name: (tensor / scale).to(torch.float8_e4m3fn), f"{name}_scale_inv": scale.reshape(1, 1)}
    weights(folder, lambda w: w | rounded)
    settings(folder, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]})
    check_weights(folder)
    model = load_language_model(folder)
    save_model(model, model.state_dict(), tokenizer, tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert saved.keys() == plain.keys() and "quantization_config" not in json.loads((tmp_path / "saved/config.json").read_text())
    for name, tensor in saved.items():
        given = rounded[name].float() * rounded[f"{name}_scale_inv"] if name in rounded else plain[name]
        torch.testing.assert_close(tensor, given, rtol=2**-7, atol=0)  # transformers dequantizes in bfloat16


def test_an_mxfp4_folder_is_loaded_and_saved_in_full_precision(tokenizer, tmp_path: Path):
    model: GptOssForCausalLM = FAMILIES["gpt_oss"]()
    save_model(model, model.state_dict(), tokenizer, tmp_path / "model")
    generator, expected, packed = torch.Generator().manual_seed(0), {}, {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, inputs, outputs], packed by outputs
            experts, inputs, outputs = parameter.shape
            codes = torch.randint(0, 16, (experts, outputs, inputs // 32, 32), generator=generator, dtype=torch.uint8)
            scales = torch.randint(122, 127, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
            numbers = FP4[(codes & 7).long()] * torch.where(codes > 7, -1.0, 1.0) * 2.0 ** (scales.float() - 127)[..., None]
            expected[name] = numbers.reshape(experts, outputs, inputs).transpose(1, 2)
            packed |= {f"{name}_blocks": codes[..., 0::2] | (codes[..., 1::2] << 4), f"{name}_scales": scales}
    weights(tmp_path / "model", lambda w: {n: t for n, t in w.items() if n not in expected} | packed)
    settings(tmp_path / "model", quantization_config={"quant_method": "mxfp4"})
    check_weights(tmp_path / "model")
    loaded = load_language_model(tmp_path / "model")
    save_model(loaded, loaded.state_dict(), tokenizer, tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert expected and all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    assert count_parameters(tmp_path / "model") == count_parameters(tmp_path / "saved")
