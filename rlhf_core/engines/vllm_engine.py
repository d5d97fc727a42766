"""Sampling with vLLM: the only file that imports it. Token ids in, token ids and log-probabilities out."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class SamplingSettings:
    """max_new_tokens counts the end token. temperature 0 is greedy. Log-probabilities are those at that temperature."""

    max_new_tokens: int
    temperature: float


@dataclass(frozen=True)
class Sample:
    """One response: ids with the end token if it came, the log-probability of each, and whether the model ended it itself."""

    response_ids: list[int]
    logprobs: list[float]
    finished: bool


def request_seeds(seed: int, step: int, count: int) -> list[int]:
    """A sampling seed for each of `count` requests of a step, whatever engine serves it and whatever it drew before."""
    return [int(s) for s in np.random.SeedSequence([seed, step]).generate_state(count, dtype=np.uint32)]


class VllmEngine:
    """A vLLM engine in this process.

    Args:
        model_path: Hugging Face folder to start from.
        max_length: tokens of prompt and response together.
        threads: cores for the CPU build; ignored on a GPU.
        gpu_memory_fraction: of the GPU's memory that weights and cache may take; ignored on the CPU.
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
    ):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
        os.environ["OMP_NUM_THREADS"] = str(threads)
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu:
            os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # compiling took 13 s at the first generate

        self.version = 0
        self._llm = LLM(
            model=model_path,
            skip_tokenizer_init=True,
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
            gpu_memory_utilization=gpu_memory_fraction,
            **(_cpu_cache(model_path, max_length, max_concurrent_sequences, kv_cache_gib, trust_remote_code) if on_cpu else {}),
        )
        self._packs_tied_head = on_cpu and self._llm.model_config.hf_config.tie_word_embeddings

    def generate(
        self, prompts: list[list[int]], seeds: list[int], settings: SamplingSettings, *, eos_id: int, group_size: int
    ) -> list[list[Sample]]:
        """`group_size` responses for each prompt, in order. `seeds[i]` decides what is drawn for prompt i."""
        from vllm import SamplingParams

        parameters = [
            SamplingParams(
                n=group_size,
                temperature=settings.temperature,
                max_tokens=settings.max_new_tokens,
                stop_token_ids=[eos_id],
                seed=seed,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
            )
            for seed in seeds
        ]
        outputs = self._llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        return [[_sample(o) for o in sorted(request.outputs, key=lambda o: o.index)] for request in outputs]

    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> int:
        """Replace the weights in place and forget what was cached under the old ones. Returns `version`."""
        self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(state_dict.items())})
        if self._packs_tied_head:
            self._llm.apply_model(_pack_head)
        self._llm.reset_prefix_cache()
        self.version = version
        return version


class RolloutActor(VllmEngine):
    """A vLLM engine as one actor of a group."""

    def __init__(self, rank: int, **settings):
        super().__init__(**settings)
        self.rank = rank


def _sample(output) -> Sample:
    return Sample(list(output.token_ids), list(output.logprobs.logprobs), output.finish_reason == "stop")


def _pack_head(model: torch.nn.Module) -> None:
    """Some CPUs multiply by a packed copy of a layer's weight. vLLM renews it where a layer is loaded, which a tied head never is."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def _cpu_cache(model_path: str, max_length: int, sequences: int, kv_cache_gib: int, trust_remote_code: bool) -> dict[str, int]:
    """Settings for a cache no larger than all sequences can fill: it is zeroed at the start, which takes 3.6 s for 1 GiB."""
    from transformers import AutoConfig

    block = 128
    shape = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code).get_text_config()
    heads = getattr(shape, "num_key_value_heads", None) or shape.num_attention_heads
    width = getattr(shape, "head_dim", None) or shape.hidden_size // shape.num_attention_heads
    needed = sequences * -(-max_length // block) + 1
    affordable = (kv_cache_gib << 30) // (2 * 4 * shape.num_hidden_layers * heads * width * block)
    return {"block_size": block, "num_gpu_blocks_override": needed} if needed < affordable else {}
