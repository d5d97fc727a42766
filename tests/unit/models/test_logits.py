"""What is done to a head's output: as the configuration says and the model's own forward confirms, or as that forward alone knows."""

from __future__ import annotations

import logging

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, PhiConfig, PhiForCausalLM

from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.build import trunk
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.head import PLAIN, LogitRule
from rlhf_core.models.weights import frozen
from tests.model_families import FAMILIES, OTHERS

IDS = [[5, 9, 33, 60, 7, 12], [90, 3, 14]]
BATCH = collate_tokens(IDS, [1, 1], pad_id=0)
SHAPE = {
    "vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("llama", PLAIN),
        ("gemma2", LogitRule(cap=5.0)),
        ("recurrent_gemma", LogitRule(cap=5.0)),
        ("granite", LogitRule(1 / 3)),
        ("cohere", LogitRule(0.25)),
        ("falcon_h1", LogitRule(0.5)),
        ("modernbert_decoder", None),
    ],
)
def test_the_rule_is_the_one_that_the_models_own_logits_follow(name: str, rule: LogitRule | None):
    assert PolicyModule((FAMILIES | OTHERS)[name]())._rule == rule


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cap_is_found_in_a_fresh_model_whose_logits_are_far_below_it(dtype: torch.dtype):
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(Gemma2Config(head_dim=16, **SHAPE))
    policy = PolicyModule(frozen(model, device=torch.device("cpu"), dtype=dtype))
    assert policy._rule == LogitRule(cap=30.0)


def test_a_configuration_that_says_otherwise_than_the_model_does_is_not_believed():
    model = FAMILIES["qwen2"]()
    model.config.logit_scale, model.config.final_logit_softcapping = 0.5, 5.0
    assert PolicyModule(model)._rule == PLAIN


def test_an_unknown_models_own_head_is_used_and_logged_once(caplog: pytest.LogCaptureFixture):
    model = OTHERS["modernbert_decoder"]()
    with caplog.at_level(logging.INFO, logger="rlhf_core"):
        policy = PolicyModule(model)
        found = policy(BATCH, with_entropy=True)
        policy(BATCH)
    assert [r.message for r in caplog.records if "ModernBertDecoderForCausalLM come from its whole forward" in r.message] != []
    assert len(caplog.records) == 1
    logits = [model(torch.tensor([ids])).logits[0, :-1] for ids in IDS]
    expected = torch.cat(
        [each.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])] for ids, each in zip(IDS, logits, strict=True)]
    )
    torch.testing.assert_close(found.logprobs, expected, rtol=0, atol=1e-5)
    ours = torch.autograd.grad(found.logprobs.sum(), list(model.parameters()))
    theirs = torch.autograd.grad(expected.sum(), list(model.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-4 * float(other.abs().max()))


def test_a_model_without_logits_is_refused_by_name():
    with pytest.raises(ValueError, match="model: expected a causal language model, got LlamaModel, whose forward ends in AttributeError"):
        PolicyModule(trunk(FAMILIES["llama"]()))


def test_a_heads_bias_counts():
    torch.manual_seed(0)
    model = PhiForCausalLM(PhiConfig(initializer_range=0.2, **SHAPE)).eval()
    torch.nn.init.normal_(model.lm_head.bias)
    expected = [model(torch.tensor([ids])).logits[0].log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])] for ids in IDS]
    torch.testing.assert_close(PolicyModule(model)(BATCH).logprobs, torch.cat(expected), rtol=0, atol=1e-5)


def test_trying_a_model_out_leaves_it_and_random_numbers_as_they_were():
    model = FAMILIES["gpt2"]().train()
    model.transformer.h[0].eval()
    modes, state = [part.training for part in model.modules()], torch.get_rng_state()
    PolicyModule(model)
    assert [part.training for part in model.modules()] == modes and torch.equal(torch.get_rng_state(), state)


def test_attention_that_can_not_compute_here_is_replaced_while_a_model_is_tried_out():
    """As for a model that is loaded on a CPU and will be trained with FlashAttention on a GPU."""
    model = FAMILIES["gemma2"]()
    model.config._attn_implementation = "flash_attention_2"
    assert PolicyModule(model)._rule == LogitRule(cap=5.0)
    assert model.config._attn_implementation == "flash_attention_2"
