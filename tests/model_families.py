"""Small random models of many families: width 64, heads of width 32, 300 tokens, every kind of layer that the family has.

Windows and chunks have 16 tokens, fewer than the sequences of 60. Weights are large enough for clearly different outputs; biases, norms,
sinks and routers' corrections aren't at their neutral values.

    model = FAMILIES["gemma3"]()          # the families of docs/models.md
    model = OTHERS["llama_dynamic"]()     # models with something that those lack

Each call makes a new model, with the same weights. It is in evaluation mode, its weights are float32.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

VOCABULARY, WIDTH, HEAD, WINDOW = 300, 64, 32, 16
POSITIONS = 128
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
    "short_factor": [1.0 + k / 16 for k in range(HEAD // 2)], "long_factor": [1.0 + k / 2 for k in range(HEAD // 2)],
}  # fmt: skip
_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": HEAD, "mamba_d_state": 16, "mamba_chunk_size": 8}


def _built(kind: str, config: str | None = None, head: str = "ForCausalLM", **shape: Any) -> PreTrainedModel:
    """Args: kind: the class without its head. config: its configuration; None: the class's name and Config."""
    common = {
        "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": POSITIONS, "initializer_range": 0.2,
        "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1, "dtype": "float32",
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        settings = getattr(transformers, config or f"{kind}Config")(**{**common, **shape})
        return lively(getattr(transformers, kind + head)(settings)).eval()


@torch.no_grad()
def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Add noise to vectors and to the buffers that correct the choice of experts, which start at neutral values."""
    named = [*model.named_parameters(), *((name, b) for name, b in model.named_buffers() if name.endswith("correction_bias"))]
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        if tensor.ndim == 1 and not name.endswith("A_log"):
            tensor.add_(0.1 * torch.randn(tensor.shape))
    return model


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: _built("Llama", num_key_value_heads=2),
    "llama_tied": lambda: _built("Llama", tie_word_embeddings=True),
    "qwen2": lambda: _built("Qwen2"),
    "qwen3": lambda: _built("Qwen3", head_dim=HEAD, tie_word_embeddings=True),
    "gemma2": lambda: _built(
        "Gemma2", head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=WINDOW, final_logit_softcapping=5.0, attn_logit_softcapping=5.0
    ),
    "gemma3": lambda: _built(
        "Gemma3", "Gemma3TextConfig", head_dim=HEAD, query_pre_attn_scalar=HEAD, sliding_window=WINDOW, num_hidden_layers=6,
        num_key_value_heads=2,
    ),
    "mistral": lambda: _built("Mistral", sliding_window=WINDOW),
    "phi3": lambda: _built("Phi3", num_key_value_heads=2),
    "olmo2": lambda: _built("Olmo2", num_key_value_heads=2),
    "granite": lambda: _built(
        "Granite", tie_word_embeddings=True, logits_scaling=3.0, embedding_multiplier=2.0, residual_multiplier=0.5, attention_multiplier=0.2
    ),
    "cohere": lambda: _built("Cohere", logit_scale=0.25),
    "gpt_neox": lambda: _built(
        "GPTNeoX",
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    "gpt2": lambda: _built("GPT2", head="LMHeadModel", n_inner=2 * WIDTH),
    "gpt_oss": lambda: _built(
        "GptOss", head_dim=HEAD, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2, intermediate_size=WIDTH,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0,
            "beta_slow": 1.0, "truncate": False,
        },
    ),
    "mixtral": lambda: _built("Mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": lambda: _built("Qwen3Moe", head_dim=HEAD, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH),
    "deepseek_v3": lambda: _built(
        "DeepseekV3", num_key_value_heads=2, qk_nope_head_dim=HEAD, qk_rope_head_dim=HEAD, v_head_dim=HEAD, kv_lora_rank=32, q_lora_rank=32,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, n_group=2, topk_group=1, moe_intermediate_size=WIDTH,
        first_k_dense_replace=1, num_mtp_layers=0,
    ),
    "falcon_h1": lambda: _built(
        "FalconH1", **_MAMBA2, mamba_d_ssm=2 * WIDTH, lm_head_multiplier=0.5, embedding_multiplier=2.0, key_multiplier=0.5
    ),
}  # fmt: skip

OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2_window": lambda: _built("Qwen2", use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1),
    "phi3_window": lambda: _built("Phi3", num_key_value_heads=2, sliding_window=WINDOW),
    "phi3_longrope": lambda: _built("Phi3", num_key_value_heads=2, original_max_position_embeddings=32, rope_parameters=deepcopy(LONGROPE)),
    "llama_dynamic": lambda: _built(
        "Llama", max_position_embeddings=32, rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    ),
    "llama_llama3": lambda: _built(
        "Llama",
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "cohere2": lambda: _built("Cohere2", sliding_window=WINDOW, num_hidden_layers=4, logit_scale=0.25),
    "llama4": lambda: _built(
        "Llama4", "Llama4TextConfig", head_dim=HEAD, intermediate_size=WIDTH, intermediate_size_mlp=2 * WIDTH, num_hidden_layers=4,
        attention_chunk_size=WINDOW, num_local_experts=4, interleave_moe_layer_step=2,
    ),
    "jamba": lambda: _built(
        "Jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, num_experts=4
    ),
    "bamba": lambda: _built("Bamba", **_MAMBA2, num_hidden_layers=3, attn_layer_indices=[1]),
    "recurrent_gemma": lambda: _built(
        "RecurrentGemma", num_hidden_layers=3, lru_width=WIDTH, attention_window_size=WINDOW, logits_soft_cap=5.0
    ),
    "modernbert_decoder": lambda: _built(
        "ModernBertDecoder", num_hidden_layers=4, local_attention=2 * WINDOW, bos_token_id=2, cls_token_id=2, sep_token_id=1
    ),
    "falcon_7b": lambda: _built("Falcon", multi_query=True, parallel_attn=True, new_decoder_architecture=False, bias=False),
    "falcon_40b": lambda: _built("Falcon", new_decoder_architecture=True, num_kv_heads=1, bias=False),
    "falcon_rw": lambda: _built("Falcon", alibi=True, multi_query=False, parallel_attn=False, new_decoder_architecture=False, bias=True),
    "gpt_neo": lambda: _built("GPTNeo", num_layers=2, num_heads=2, attention_types=[[["global", "local"], 1]], window_size=WINDOW),
    "biogpt": lambda: _built("BioGpt"),
    "gpt_bigcode": lambda: _built("GPTBigCode", n_inner=2 * WIDTH),
    "mamba2": lambda: _built("Mamba2", num_heads=4, head_dim=HEAD, state_size=16, n_groups=1, chunk_size=8, expand=2),
    "qwen3_next": lambda: _built(
        "Qwen3Next", head_dim=HEAD, num_hidden_layers=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=WIDTH,
        shared_expert_intermediate_size=WIDTH, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
        linear_value_head_dim=16,
    ),
    "qwen3_5": lambda: _built(
        "Qwen3_5", "Qwen3_5TextConfig", head_dim=HEAD, num_hidden_layers=4, linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16,
    ),
}  # fmt: skip
