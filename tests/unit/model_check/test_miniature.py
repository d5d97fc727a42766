"""The small copy that stands for a model: every kind of layer, its own heads and ties, few ids."""

from __future__ import annotations

import pytest
import torch
from tiny_models import save_tiny_models, tiny_params, tiny_tokenizer
from transformers import DeepseekV3Config, Gemma3TextConfig, GPT2Config, GptOssConfig, JambaConfig, Qwen2Config

from rlhf_core.model_check.miniature import VOCABULARY, WIDTH, cut_config, random_model, smaller


def test_keeps_heads_width_and_ties_of_a_large_model():
    shape = {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2, "intermediate_size": 8960}
    cut = smaller(Qwen2Config(**shape, vocab_size=151_936, tie_word_embeddings=True, eos_token_id=151_645))
    assert (cut.hidden_size, cut.num_attention_heads, cut.num_key_value_heads) == (1536, 12, 2) and cut.tie_word_embeddings
    assert (cut.num_hidden_layers, cut.vocab_size, cut.intermediate_size) == (2, VOCABULARY, WIDTH)
    assert cut.eos_token_id == 151_645 % VOCABULARY


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (Gemma3TextConfig(), 6),  # five with a window, then one without
        (GptOssConfig(), 2),  # in turn
        (JambaConfig(), 5),  # attention in the fifth, experts in every other
        (DeepseekV3Config(), 4),  # three dense ones, then experts
        (GPT2Config(), 2),  # calls its layers n_layer
    ],
)
def test_has_every_kind_of_layer_and_no_more(config, layers):
    cut = smaller(config)
    assert cut.num_hidden_layers == layers
    assert len(getattr(cut, "layer_types", None) or range(layers)) == layers


def test_of_a_folder_is_of_its_class(tmp_path):
    tokenizer = tiny_tokenizer()
    sft, _ = save_tiny_models(tmp_path, tokenizer)
    model = tiny_params(model__path=str(sft)).model
    made = random_model(cut_config(model, tokenizer), seed=0)
    assert type(made).__name__ == "LlamaForCausalLM" and made.config.hidden_size == 16 and made.config.vocab_size == 300


def test_a_torn_folder_is_refused_by_name(tmp_path):
    tokenizer = tiny_tokenizer()
    sft, _ = save_tiny_models(tmp_path, tokenizer)
    (sft / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"model\.safetensors"):
        cut_config(tiny_params(model__path=str(sft)).model, tokenizer)


def test_weights_tell_tokens_apart_and_nothing_is_neutral():
    model = tiny_params().model
    made = random_model(cut_config(model, tiny_tokenizer()), seed=0)
    with torch.no_grad():
        logits = made(input_ids=torch.arange(8, 40)[None]).logits[0]
    assert 1.0 < float(logits.std()) < 10.0
    assert all(float((p - 1).detach().abs().max()) > 0.01 for name, p in made.named_parameters() if "norm" in name)
    again = random_model(cut_config(model, tiny_tokenizer()), seed=0)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


def test_more_tokens_than_the_model_has_positions_are_refused_with_their_number(tmp_path):
    tokenizer = tiny_tokenizer()
    sft, _ = save_tiny_models(tmp_path, tokenizer)
    with pytest.raises(ValueError, match=r"model.max_length: expected at most the 64 positions of .*, got 65; lower it"):
        cut_config(tiny_params(model__path=str(sft), model__max_length=65).model, tokenizer)
