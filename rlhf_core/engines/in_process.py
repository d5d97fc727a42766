"""A rollout engine in this process, of either backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlhf_core.config import RolloutBackend

if TYPE_CHECKING:
    from rlhf_core.engines.pytorch_engine import PytorchEngine
    from rlhf_core.engines.vllm_engine import VllmEngine


def open_engine(
    backend: RolloutBackend,
    model_path: str,
    *,
    max_length: int,
    dtype: str,
    max_concurrent_sequences: int,
    threads: int,
    seed: int,
    trust_remote_code: bool,
    gpu_memory_fraction: float,
    kv_cache_gib: int = 1,
    reads_text: bool = False,
) -> VllmEngine | PytorchEngine:
    """See the engines for the arguments; `seed` is vLLM's alone."""
    shared = {
        "max_length": max_length,
        "dtype": dtype,
        "kv_cache_gib": kv_cache_gib,
        "max_concurrent_sequences": max_concurrent_sequences,
        "threads": threads,
        "trust_remote_code": trust_remote_code,
        "gpu_memory_fraction": gpu_memory_fraction,
        "reads_text": reads_text,
    }
    if backend == "pytorch":
        from rlhf_core.engines.pytorch_engine import PytorchEngine

        return PytorchEngine(model_path, **shared)
    from rlhf_core.engines.vllm_engine import VllmEngine

    return VllmEngine(model_path, **shared, seed=seed)
