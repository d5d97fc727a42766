"""What vLLM's engine needs at its start: environment, settings, and the size of its cache."""

from __future__ import annotations

import logging
import os
from typing import Any

from rlhf_core.engines.memory.gpu_memory import cache_bytes
from rlhf_core.engines.vllm.refusals import refusing_unsupported

# Environment of vLLM and Triton on a GPU; a user's settings take precedence. By default Triton, which computes vLLM's float32 attention,
# uses TF32 with 10 bits of mantissa. FlashInfer's sampler returns no log-probabilities, which every request here needs, and requires a
# CUDA compiler.
ON_A_GPU = {"TRITON_F32_DEFAULT": "ieee", "VLLM_FLOAT32_MATMUL_PRECISION": "highest", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
BATCHED_TOKENS = 8192  # of a forward pass, or those of the longest sequence
COMMON = {
    "generation_config": "vllm",
    "logprobs_mode": "processed_logprobs",
    "disable_log_stats": True,
    "use_tqdm_on_load": False,
    "load_format": "safetensors",  # or it would unpickle other files of the folder
}


def set_environment(*, kv_cache_gib: int, threads: int, tensor_parallel_size: int) -> None:
    """Set the environment variables that vLLM reads when it is imported, for the processes of one engine."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if tensor_parallel_size > 1:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # its processes are this one's
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(max(1, kv_cache_gib // tensor_parallel_size)))  # of each of its processes
    os.environ["OMP_NUM_THREADS"] = str(max(1, threads // tensor_parallel_size))
    for name, value in ON_A_GPU.items():
        os.environ.setdefault(name, value)
    logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # avoids a warning on CPUs, which have no Triton


def prepare_cpu(model_path: str, trust_remote_code: bool) -> None:
    """Prepare this process for vLLM's CPU build, before it loads the model.

    Raises:
        ValueError: the build can't run the model.
    """
    import torch

    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()  # Linux kills a process that uses AMX without asking; vLLM's attention in bfloat16 leaves it to oneDNN
    # Avoids compilation at the first generate. Set here since PyTorch has already read the environment variable.
    torch._dynamo.config.disable = os.environ.setdefault("TORCH_COMPILE_DISABLE", "1") == "1"
    with refusing_unsupported(model_path, trust_remote_code):  # some models' modules import packages that vLLM doesn't
        inspect_here(model_path, trust_remote_code)
    _spare_transformers_classes()


def shared_gpu_cache(
    model_path: str, *, fraction: float, dtype: str, max_length: int, sequences: int, tensor_parallel_size: int, trust_remote_code: bool
) -> dict[str, int]:
    """Return vLLM's setting for a cache on a GPU that another process uses too, computed from the engine's fraction of its memory."""
    import torch
    from vllm.platforms import current_platform

    size = cache_bytes(
        model_path,
        share=int(fraction * current_platform.get_device_total_memory()),
        dtype=getattr(torch, dtype),
        max_length=max_length,
        sequences=sequences,
        batched_tokens=max(BATCHED_TOKENS, max_length),
        trust_remote_code=trust_remote_code,
        tensor_parallel_size=tensor_parallel_size,
    )
    return {"kv_cache_memory_bytes": size}


def division(size: int) -> dict[str, Any]:
    """Return vLLM's settings for an engine on several GPUs of this node. Its workers are started anew (a process that has used CUDA can't
    be forked), and as processes: inside a Ray placement group vLLM would choose Ray's.
    """
    if size == 1:
        return {}
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # there may be fewer cores than processes
    extension = "rlhf_core.engines.vllm.worker.WorkerExtension"
    return {"tensor_parallel_size": size, "distributed_executor_backend": "mp", "worker_extension_cls": extension}


def transfer_settings(backend: str | None) -> dict[str, Any]:
    """Return arguments of `LLM` for weight transfer by this backend."""
    if backend is None:
        return {}
    from vllm.config import WeightTransferConfig

    own = {"worker_extension_cls": "rlhf_core.engines.vllm.transfer.WorkerExtension"} if backend == "gloo" else {}
    return {"weight_transfer_config": WeightTransferConfig(backend=backend), **own}


def _spare_transformers_classes() -> None:
    """Prevent vLLM from marking transformers' classes, which it uses for models without own code, for compilation: other instances in this
    process would fail. Nothing is compiled on the CPU.
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_cls_for_torch_compile = lambda *_, **__: None


def inspect_here(model_path: str, trust_remote_code: bool) -> None:
    """Let vLLM inspect the model's class in this process. By default it starts another process for that, with all imports, to avoid
    initializing a GPU; on the CPU that isn't needed.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    known = ModelRegistry.models
    for name in AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code).architectures or []:
        if name in known:
            ModelRegistry.register_model(name, known[name].load_model_cls())


def cpu_cache(model_path: str, *, max_length: int, sequences: int, kv_cache_gib: int, trust_remote_code: bool) -> dict[str, int]:
    """Return settings for a cache no larger than all sequences can fill, since vLLM zeroes the whole cache at its start.

    Empty for a model with several kinds of layers, whose blocks vLLM divides itself.
    """
    from transformers import AutoConfig

    from rlhf_core.models.attention import layer_kinds
    from rlhf_core.models.build import kv_cache_bytes

    block = 128
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    if len(layer_kinds(config.get_text_config())) > 1:
        return {}
    needed = sequences * -(-max_length // block) + 1
    affordable = (kv_cache_gib << 30) // (kv_cache_bytes(config, element_bytes=4) * block)
    return {"block_size": block, "num_gpu_blocks_override": needed} if needed < affordable else {}
