"""Computes the size of a vLLM engine's KV cache on a shared GPU in advance, since another process's allocations would disturb a
measurement.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

OWN_BYTES = 3 << 29  # CUDA's context, libraries' workspaces, captured graphs: 1.5 GiB
LOGIT_COPIES = 4  # in float32: logits, the sampler's copy, log-probabilities, and sampling noise
BLOCK = 128  # tokens; no backend of vLLM has larger blocks


def memory_in_use() -> dict[str, int]:
    """Return bytes of the GPU: allocated by this process, reserved by torch for it, and used by all processes; empty if this process uses
    no GPU.
    """
    import torch

    if not torch.cuda.is_initialized():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved(), "used": total - free}


def cache_bytes(
    model_path: str,
    *,
    share: int,
    dtype: torch.dtype,
    max_length: int,
    sequences: int,
    batched_tokens: int,
    trust_remote_code: bool,
    tensor_parallel_size: int = 1,
) -> int:
    """Return the bytes of the KV cache on each GPU: the engine's share less weights and a forward pass, limited to what all sequences can
    fill.

    Args:
        share: bytes of each GPU's memory for the engine.
        tensor_parallel_size: GPUs over which weights, layers' inner activations, and heads of keys and values are divided.
        batched_tokens: tokens of a forward pass.
        sequences: number of sequences that are sampled concurrently.
    Raises:
        ValueError: a single sequence doesn't fit.
    """
    from transformers import AutoConfig

    from rlhf_core.models.attention import layer_kinds
    from rlhf_core.models.build import kv_cache_bytes
    from rlhf_core.models.folder import count_parameters

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    weights = count_parameters(model_path) * dtype.itemsize // tensor_parallel_size
    working = pass_bytes(
        config, element_bytes=dtype.itemsize, tokens=batched_tokens, sequences=sequences, tensor_parallel_size=tensor_parallel_size
    )
    left = share - weights - working
    per_token = math.ceil(kv_cache_bytes(config, element_bytes=dtype.itemsize) / min(tensor_parallel_size, kv_heads(config)))
    of_sequence = per_token * BLOCK * (math.ceil(max_length / BLOCK) + 1)
    if left < of_sequence:
        needed = weights + working + of_sequence
        raise ValueError(
            f"rollout.gpu_memory_fraction: expected a share of the GPU of at least {_gib(needed)}, for {_gib(weights)} of weights, "
            f"{_gib(working)} of a pass and a sequence of model.max_length={max_length} tokens, got {_gib(share)}; raise it or "
            "rollout.gpus_per_engine, or use fewer engines or a larger GPU"
        )
    # With several kinds of layers vLLM decides how to divide the blocks.
    return left if len(layer_kinds(config.get_text_config())) > 1 else min(left, sequences * of_sequence)


def kv_heads(config: PretrainedConfig) -> int:
    shape = config.get_text_config()
    return getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads


def pass_bytes(config: PretrainedConfig, *, element_bytes: int, tokens: int, sequences: int, tensor_parallel_size: int = 1) -> int:
    """Return the bytes of a forward pass without gradients on each GPU.

    They are hidden states, queries, keys and values (8 hidden sizes), the widest layer's gate, up and product (3 intermediate sizes for
    each expert of a token), logits, and a constant for the process. Several GPUs divide only the intermediate sizes.
    """
    shape = config.get_text_config()
    experts = getattr(shape, "num_experts_per_tok", None) or 1
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    activations = tokens * (8 * shape.hidden_size + 3 * experts * inner // tensor_parallel_size) * element_bytes
    return OWN_BYTES + activations + sequences * shape.vocab_size * 4 * LOGIT_COPIES


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
