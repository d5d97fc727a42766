"""Sampling with vLLM: the only file that imports it."""

from __future__ import annotations

import gc
import logging
import os
from functools import partial
from typing import TYPE_CHECKING

from rlhf_core.engines.weights import process_weights, replace_weights
from rlhf_core.quiet import overlook_what_is_imported
from rlhf_core.sampling import Sample, SamplingSettings

if TYPE_CHECKING:
    import torch


class VllmEngine:
    """A vLLM engine in this process.

    Args:
        model_path: Hugging Face folder to start from.
        max_length: tokens of prompt and response together.
        threads: cores for the CPU build; ignored on a GPU.
        gpu_memory_fraction: of the GPU's memory that weights and cache may take; ignored on the CPU.
        reads_text: whether responses may end with a stop string. It takes the model's tokenizer, and every token is decoded.
    """

    def __init__(
        self,
        model_path: str,
        *,
        max_length: int,
        dtype: str,
        kv_cache_gib: int,
        max_concurrent_sequences: int,
        threads: int,
        seed: int,
        trust_remote_code: bool,
        gpu_memory_fraction: float,
        reads_text: bool = False,
    ):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        logging.getLogger("vllm.triton_utils.importing").setLevel(logging.ERROR)  # on the CPU there is none, and it says so each time
        import torch
        from vllm import LLM
        from vllm.platforms import current_platform

        overlook_what_is_imported()  # vLLM looks for garbage five times while it starts
        self._set_num_threads = torch.set_num_threads  # on the CPU the engine replaces it by one that does nothing
        on_cpu = current_platform.is_cpu()
        if on_cpu:
            # Compiling took 3 s at the first generate, 13 on a machine that had never done so. PyTorch has read the variable by now.
            torch._dynamo.config.disable = os.environ.setdefault("TORCH_COMPILE_DISABLE", "1") == "1"
            _inspect_here(model_path, trust_remote_code)

        self.version = 0
        self._llm = LLM(
            model=model_path,
            skip_tokenizer_init=not reads_text,
            enforce_eager=on_cpu,
            dtype=dtype,
            enable_prefix_caching=False,
            generation_config="vllm",
            max_model_len=max_length,
            max_num_seqs=max_concurrent_sequences,
            max_num_batched_tokens=max(8192, max_length),
            logprobs_mode="processed_logprobs",
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=seed,
            trust_remote_code=trust_remote_code,
            load_format="safetensors",  # or it would unpickle what lies there instead
            gpu_memory_utilization=gpu_memory_fraction,
            **(_cpu_cache(model_path, max_length, max_concurrent_sequences, kv_cache_gib, trust_remote_code) if on_cpu else {}),
        )
        self._on_cpu = on_cpu
        self._packs_tied_head = on_cpu and self._llm.model_config.hf_config.tie_word_embeddings

    def generate(
        self, prompts: list[list[int]], seeds: list[int], settings: SamplingSettings, *, stop_ids: tuple[int, ...], group_size: int
    ) -> list[list[Sample]]:
        """`group_size` responses for each prompt, in order. `seeds[i]` decides what is drawn for prompt i.

        Args:
            stop_ids: tokens of which each ends a response.
        """
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                n=group_size,
                temperature=settings.temperature,
                top_p=settings.top_p,
                top_k=settings.top_k or 0,
                max_tokens=settings.max_new_tokens,
                min_tokens=settings.min_new_tokens,
                stop_token_ids=list(stop_ids),
                stop=list(settings.stop) or None,
                include_stop_str_in_output=True,
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(settings.stop),
                skip_clone=True,  # each is of one request; deep copies took 9% of generating short responses
            )
            for seed in seeds
        ]
        if not prompts:  # this engine's share where there are fewer prompts than engines
            return []
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        return [[_sample(o) for o in sorted(request.outputs, key=lambda o: o.index)] for request in outputs]

    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> int:
        """Replace the weights in place and forget what was cached under the old ones. Returns `version`."""
        if not (self._on_cpu and all(self._llm.apply_model(partial(replace_weights, state_dict=state_dict)))):
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state_dict.items())})
            if self._packs_tied_head:
                self._llm.apply_model(_pack_head)
        self._llm.reset_prefix_cache()
        self.version = version
        return version

    def close(self) -> None:
        """Give back weights, cache, process group and torch's threads, as far as a process can; the engine is of no use afterwards."""
        import torch

        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        torch.set_num_threads = self._set_num_threads


def _sample(output) -> Sample:
    return Sample(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason == "stop")


def _pack_head(model: torch.nn.Module) -> None:
    """Some CPUs multiply by a packed copy of a layer's weight. vLLM renews it where a layer is loaded, which a tied head never is."""
    process_weights(model.lm_head)


def _inspect_here(model_path: str, trust_remote_code: bool) -> None:
    """Have vLLM look at the model's class in this process. On a machine where it hasn't done so before, it would start another one for
    that, with all its imports (19 s of computing time), lest a GPU be touched; on the CPU there is none.
    """
    from transformers import AutoConfig
    from vllm import ModelRegistry

    known = ModelRegistry.models
    for name in AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code).architectures or []:
        if name in known:
            ModelRegistry.register_model(name, known[name].load_model_cls())


def _cpu_cache(model_path: str, max_length: int, sequences: int, kv_cache_gib: int, trust_remote_code: bool) -> dict[str, int]:
    """Settings for a cache no larger than all sequences can fill: it is zeroed at the start, which takes 3.6 s for 1 GiB."""
    from transformers import AutoConfig

    from rlhf_core.models.build import kv_cache_bytes

    block = 128
    config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    needed = sequences * -(-max_length // block) + 1
    affordable = (kv_cache_gib << 30) // (kv_cache_bytes(config, element_bytes=4) * block)
    return {"block_size": block, "num_gpu_blocks_override": needed} if needed < affordable else {}
