"""A frozen module computes what the training engine's does, in half precision too."""

from __future__ import annotations

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rlhf_core.engines.deepspeed.engine import TrainEngine
from rlhf_core.models.batch import collate_tokens
from rlhf_core.models.forward import PolicyModule
from rlhf_core.models.weights import frozen
from tests.tiny_models import settings

LENGTH = 300


def test_in_bfloat16_a_policy_and_its_reference_are_the_same_at_every_position(world):
    """With the rotary frequencies rounded, as a cast of the whole module rounds them, they were 0.1 apart after 100 tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        max_position_embeddings=LENGTH, initializer_range=0.2, dtype="float32",
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    reference = frozen(PolicyModule(copy.deepcopy(model)), device=torch.device("cpu"), dtype=torch.bfloat16)
    rounded = PolicyModule(copy.deepcopy(model)).to(torch.bfloat16).eval()
    policy = TrainEngine(PolicyModule(model), settings(dtype="bfloat16"))
    tokens = collate_tokens([torch.randint(5, 300, (LENGTH,)).tolist() for _ in range(2)], [1, 1], pad_id=0)
    with torch.no_grad():
        expected, found, wrong = (module(tokens).logprobs.float() for module in (policy, reference, rounded))
    assert torch.equal(found, expected)
    assert float((wrong - expected).abs().max()) > 0.02  # the comparison can tell
