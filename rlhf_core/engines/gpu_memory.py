"""Size of a vLLM engine's KV cache on a shared GPU, computed in advance, since another process's allocations disturb a measurement."""

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
    """Bytes that this process has allocated and that torch has reserved for it, and those in use on the GPU by all processes; empty without
    one.
    """
    import torch

    if not torch.cuda.is_available():
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
) -> int:
    """Bytes of the KV cache: the engine's share less weights and a forward pass, limited to what all sequences can fill.

    Args:
        share: bytes of GPU memory for the engine.
        batched_tokens: of a forward pass.
        sequences: sampled concurrently.
    Raises:
        ValueError: a single sequence doesn't fit.
    """
    from transformers import AutoConfig

    from rlhf_core.models.attention import layer_kinds
    from rlhf_core.models.build import kv_cache_bytes
    from rlhf_core.models.folder import count_parameters

    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    weights = count_parameters(model_path) * dtype.itemsize
    working = pass_bytes(config, element_bytes=dtype.itemsize, tokens=batched_tokens, sequences=sequences)
    left = share - weights - working
    of_sequence = kv_cache_bytes(config, element_bytes=dtype.itemsize) * BLOCK * (math.ceil(max_length / BLOCK) + 1)
    if left < of_sequence:
        needed = weights + working + of_sequence
        raise ValueError(
            f"rollout.gpu_memory_fraction: expected a share of the GPU of at least {_gib(needed)}, for {_gib(weights)} of weights, "
            f"{_gib(working)} of a pass and a sequence of model.max_length={max_length} tokens, got {_gib(share)}; raise it or "
            "rollout.gpus_per_engine, or use fewer engines or a larger GPU"
        )
    # With several kinds of layers vLLM decides how to divide the blocks.
    return left if len(layer_kinds(config.get_text_config())) > 1 else min(left, sequences * of_sequence)


def pass_bytes(config: PretrainedConfig, *, element_bytes: int, tokens: int, sequences: int) -> int:
    """Bytes of a forward pass without gradients: hidden states, queries, keys and values (8 hidden sizes), the widest layer's gate, up and
    product (3 intermediate sizes for each expert of a token), logits; plus a constant for the process.
    """
    shape = config.get_text_config()
    experts = getattr(shape, "num_experts_per_tok", None) or 1
    inner = getattr(shape, "intermediate_size", None) or 4 * shape.hidden_size
    activations = tokens * (8 * shape.hidden_size + 3 * experts * inner) * element_bytes
    return OWN_BYTES + activations + sequences * shape.vocab_size * 4 * LOGIT_COPIES


def _gib(count: float) -> str:
    return f"{count / 2**30:.1f} GiB"
