"""Sampling with vLLM."""

from __future__ import annotations

import gc
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from rlhf_core.engines.memory.gpu_memory import memory_in_use
from rlhf_core.engines.memory.sleep import Awake
from rlhf_core.engines.rollout.requests import Request, Sample, SamplingSettings, end_with_due
from rlhf_core.engines.transfer.weights import pack_experts_at_next_load, pack_tied_weights, replace_weights
from rlhf_core.engines.vllm.parameters import at_stop, continued_parameters, sample_of, sampling_parameters
from rlhf_core.engines.vllm.pictures import NEVER, PictureInputs, use_processor
from rlhf_core.engines.vllm.refusals import fp8_method, refuse_without_reload, refuse_without_sleep, refusing_unsupported
from rlhf_core.engines.vllm.start import (
    BATCHED_TOKENS,
    COMMON,
    cpu_cache,
    division,
    prepare_cpu,
    set_environment,
    shared_gpu_cache,
    transfer_settings,
)
from rlhf_core.models.tokenizer import load_tokenizer
from rlhf_core.models.vision import Sight, sight
from rlhf_core.process import freeze_gc

if TYPE_CHECKING:
    import torch
    from vllm import CompletionOutput, SamplingParams

    from rlhf_core.data.pictures import Picture

P, Result = ParamSpec("P"), TypeVar("Result")
log = logging.getLogger("rlhf")

TRIAL_IDS = (0, 1, 0)  # which every vocabulary has


def _needs_all_workers(method: Callable[P, Result]) -> Callable[P, Result]:
    """Kill this process where a call fails because one of the engine's own processes has died, so that whoever waits sees a lost engine."""

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> Result:
        try:
            return method(*args, **kwargs)
        except Exception:  # vLLM has no type of its own for a dead worker
            if args[0].has_lost_a_process:
                log.exception("rollout engine: one of its processes has died")
                os.kill(os.getpid(), signal.SIGKILL)
            raise

    return call


class VllmEngine:
    """A vLLM engine in this process.

    Args:
        model_path: Hugging Face folder to start from.
        max_length: tokens of prompt and response together.
        threads: cores for the CPU build; ignored on a GPU.
        gpu_memory_fraction: upper limit of the engine's GPU memory; ignored on the CPU.
        shares_gpu: another process uses the GPU too. The cache's size is then computed from the fraction (gpu_memory.py), since vLLM's own
            measurement would include the other process's allocations.
        reads_text: responses may end with a stop string, for which every token is decoded.
        sleeps: `sleep` and `wake_up` are called.
        tensor_parallel_size: GPUs over which layers and cache are divided; those that this process sees, or processes of the CPU build.
            Each has a process of its own, which ends with this one. If one of them dies, this process is killed, at once or at the next
            call, since the engine can't go on; so it must be one that only serves the engine.
        prefix_caching: keep the keys and values of prompts, until the weights change, for others with the same beginning.
        enforce_eager: neither compile the model nor capture CUDA graphs.
        weight_transfer: how a trainer's weights arrive: gloo, ipc or nccl; None: by `load_weights` only.
        prepared: of a model that sees, the folder with the pictures of prompts; None: it gets text alone.
        quantization: fp8: linear layers have weights of 8 bits, which vLLM rounds anew, with new scales, whenever it loads some.
    Raises:
        ValueError: vLLM's CPU build can't run the model or can't sleep, or vLLM can't update its weights; or the GPU has no FP8.
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
        shares_gpu: bool = False,
        reads_text: bool = False,
        sleeps: bool = False,
        tensor_parallel_size: int = 1,
        prefix_caching: bool = False,
        enforce_eager: bool = False,
        weight_transfer: str | None = None,
        quantization: str | None = None,
        prepared: str | None = None,
    ):
        refuse_without_reload(model_path, trust_remote_code)
        set_environment(kv_cache_gib=kv_cache_gib, threads=threads, tensor_parallel_size=tensor_parallel_size)
        import torch
        from vllm import LLM
        from vllm.platforms import current_platform

        freeze_gc()  # vLLM collects garbage five times during its start
        self._set_num_threads = torch.set_num_threads  # on the CPU the engine replaces it by one that does nothing
        self._on_cpu, self._is_divided, self._is_connected = current_platform.is_cpu(), tensor_parallel_size > 1, False
        if sleeps:
            refuse_without_sleep()
        if self._on_cpu:
            prepare_cpu(model_path, trust_remote_code)
        self.version = 0
        self._sight: Sight | None = None
        if prepared is not None:
            self._sight = sight(load_tokenizer(model_path, trust_remote_code=trust_remote_code, vision="frozen"), Path(prepared))
        self._unfinished: dict[str, int] = {}  # vLLM's id of a request -> the caller's number
        self._awake = Awake()
        sizes = {"max_length": max_length, "sequences": max_concurrent_sequences, "trust_remote_code": trust_remote_code}
        settings = COMMON | dict(
            model=model_path,
            skip_tokenizer_init=not reads_text,
            enforce_eager=self._on_cpu or enforce_eager,
            dtype=dtype,
            enable_prefix_caching=prefix_caching,
            max_model_len=max_length,
            max_num_seqs=max_concurrent_sequences,
            max_num_batched_tokens=max(BATCHED_TOKENS, max_length),
            seed=seed,
            trust_remote_code=trust_remote_code,
            gpu_memory_utilization=gpu_memory_fraction,
            **(division(tensor_parallel_size) | transfer_settings(weight_transfer)),
            quantization=None if quantization is None else fp8_method(),
        )
        settings |= {} if self._sight is None else use_processor(self._sight)
        if not self._on_cpu:
            cache = (
                shared_gpu_cache(model_path, fraction=gpu_memory_fraction, dtype=dtype, tensor_parallel_size=tensor_parallel_size, **sizes)
                if shares_gpu
                else {}
            )
            self._llm = LLM(**settings, **cache, enable_sleep_mode=sleeps)
            return
        with refusing_unsupported(model_path, trust_remote_code):
            # A seeded request with a chunked prompt rewinds its generator, which PyTorch's CPU generator can't.
            self._llm = LLM(**settings, **cpu_cache(model_path, kv_cache_gib=kv_cache_gib, **sizes), enable_chunked_prefill=False)
            self.probe(TRIAL_IDS)  # only the first forward pass refuses some shapes

    @cached_property
    def _pictures(self) -> PictureInputs | None:
        """What makes inputs of prompts; None: the model gets text alone."""
        return None if self._sight is None else PictureInputs(self._llm, self._sight)

    @property
    def _undrawn(self) -> dict[str, Any]:
        """Sampling parameters by which tokens that stand for a picture aren't drawn."""
        return {} if self._pictures is None else {"logit_bias": {self._pictures.token_id: NEVER}}

    @property
    def has_lost_a_process(self) -> bool:
        return self._is_divided and self._llm.llm_engine.model_executor.is_failed

    @_needs_all_workers
    def sleep(self, level: int = 1) -> None:
        """Free the memory of the cache and of the weights, which level 1 copies to the host and level 2 forgets."""
        if self._awake.is_half_awake:  # vLLM puts both to sleep or none
            self.wake_up()
        if self._awake.falls_asleep(level):
            assert not self._unfinished, "sleep would abort requests"
            self._llm.sleep(level=level)

    @_needs_all_workers
    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take memory for weights and cache, or for these tags."""
        if woken := self._awake.wakes_up(tags):
            self._llm.wake_up(tags=list(woken))

    @_needs_all_workers
    def memory_in_use(self) -> dict[str, int]:
        """Return `gpu_memory.memory_in_use`; for an engine on several GPUs, the largest figures of any."""
        if not self._is_divided:
            return memory_in_use()
        of_workers = self._llm.collective_rpc("memory_in_use")
        return {name: max(of_worker[name] for of_worker in of_workers) for name in of_workers[0]}

    def generate(
        self,
        prompts: list[list[int]],
        seeds: list[int],
        settings: SamplingSettings,
        pictures: Sequence[tuple[Picture, ...]] = (),
        *,
        stop_ids: tuple[int, ...],
        group_size: int,
    ) -> list[list[Sample]]:
        """Sample `group_size` responses for each prompt, in order. `seeds[i]` is the random seed of prompt i.

        Args:
            stop_ids: tokens of which each ends a response.
            pictures: of each prompt; empty: none has any.
        """
        numbers = range(len(prompts))
        options = {"stop_ids": stop_ids, "group_size": group_size, "pictures": pictures}
        found = self.serve(list(numbers), prompts, seeds, settings, **options, leave=0)
        return [found[number] for number in numbers]

    @_needs_all_workers
    def serve(
        self,
        numbers: list[int],
        prompts: list[list[int]],
        seeds: list[int],
        settings: SamplingSettings,
        *,
        stop_ids: tuple[int, ...],
        group_size: int,
        leave: int,
        pictures: Sequence[tuple[Picture, ...]] = (),
    ) -> dict[int, list[Sample]]:
        """Take further prompts, and generate until at most `leave` of all the taken ones are unfinished; those stay for the next call.

        Args:
            numbers: by which the caller knows the prompts.
            pictures: as for `generate`.
        Returns:
            Number of each prompt that finished in this call -> its responses.
        Raises:
            RuntimeError: the engine is asleep.
        """
        self._awake.need("generate")
        parameters = [sampling_parameters(settings, seed, stop_ids=stop_ids, n=group_size, **self._undrawn) for seed in seeds]
        if prompts:  # there may be fewer than engines
            ids = self._enqueue(prompts, parameters, pictures or [()] * len(prompts))
            # An output has the id's number without the suffix that vLLM adds.
            self._unfinished.update(zip((i.partition("-")[0] for i in ids), numbers, strict=True))
        finished = {}
        while len(self._unfinished) > leave:
            for request in self._llm.llm_engine.step():
                if request.finished:
                    samples = [sample_of(o, self.version) for o in sorted(request.outputs, key=lambda o: o.index)]
                    finished[self._unfinished.pop(request.request_id)] = samples
        return finished

    def _enqueue(self, prompts: list[list[int]], parameters: list[SamplingParams], pictures: Sequence[tuple[Picture, ...]]) -> list[str]:
        if self._pictures is None:
            return self._llm.enqueue([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
        inputs = [self._pictures(*of_one) for of_one in zip(prompts, pictures, strict=True)]
        return [self._llm._add_request(*of_one) for of_one in zip(inputs, parameters, strict=True)]

    @_needs_all_workers
    def advance(
        self,
        requests: list[Request],
        settings: SamplingSettings,
        due: int,
        *,
        stop_ids: tuple[int, ...],
        least: int,
        more: Callable[[bool], bool] = end_with_due,
    ) -> list[Sample]:
        """Continue responses as PyTorch's engine does; `least` counts the engine's steps, of which each samples a token of every response
        that has begun.
        """
        self._awake.need("advance")
        engine, ids = self._llm.llm_engine, [f"advance-{number}" for number in range(len(requests))]
        for name, request in zip(ids, requests, strict=True):
            parameters = continued_parameters(request, settings, stop_ids=stop_ids, **self._undrawn)
            prompt = {"prompt_token_ids": request.ids} if self._pictures is None else self._pictures(request.ids, request.pictures)
            engine.add_request(name, prompt, parameters)
        last: dict[str, CompletionOutput] = {}  # of each response that has begun, with all of its tokens
        growing, awaited, steps = set(ids), set(ids[:due]), 0
        while growing and (more(bool(awaited)) or steps < least):
            for output in engine.step():
                (last[output.request_id],) = output.outputs
                if output.finished:
                    growing.discard(output.request_id)
                    awaited.discard(output.request_id)
            steps += 1
        engine.abort_request(sorted(growing))
        samples = [sample_of(last.get(name), self.version) for name in ids]
        if not settings.stop:
            return samples
        return [at_stop(request, sample, settings, self._llm.get_tokenizer()) for request, sample in zip(requests, samples, strict=True)]

    @_needs_all_workers
    def probe(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token but the first given those before it, at temperature 1. [len(ids) - 1]"""
        self._awake.need("probe")
        from vllm import SamplingParams

        parameters = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        (output,) = self._llm.generate([{"prompt_token_ids": list(ids)}], parameters, use_tqdm=False)
        return [seen[token].logprob for token, seen in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]

    @_needs_all_workers
    def load_weights(self, state_dict: dict[str, torch.Tensor], version: int) -> int:
        """Replace the weights, named as in the model's Hugging Face folder, in place and drop the prefix cache of the old ones.

        Returns `version`.
        """
        self._awake.loads_weights()
        if not self._on_cpu or self._is_divided or not all(self._llm.apply_model(partial(replace_weights, state_dict=state_dict))):
            self._reload(weights_iterator=iter(state_dict.items()))
        return self._has_weights(version)

    @_needs_all_workers
    def load_folder(self, folder: str | Path, version: int) -> int:
        """Load the weights of a Hugging Face folder as `load_weights` does; each process of an engine on several GPUs reads the folder
        itself.
        """
        from rlhf_core.models.weights import read_state_dict

        if not self._is_divided:
            return self.load_weights(read_state_dict(Path(folder)), version)
        self._awake.loads_weights()
        self._reload(weights_path=str(folder))
        return self._has_weights(version)

    def _has_weights(self, version: int) -> int:
        if self._sight is not None:
            self._llm.llm_engine.reset_encoder_cache()
        if self._awake.is_awake and not self._llm.reset_prefix_cache():  # sleep has emptied the cache
            raise RuntimeError("rollout engine: expected no request while weights are loaded, got some; what is cached of them is stale")
        self.version = version
        return version

    @_needs_all_workers
    def connect_weights(self, info: dict[str, Any]) -> None:
        """Connect every worker to the sender of weights.

        Args:
            info: of the sender's link to this engine.
        """
        if self._is_connected and hasattr(self._llm, "shutdown_weight_transfer_engine"):  # vLLM 0.32
            self._llm.shutdown_weight_transfer_engine()
        self._llm.init_weight_transfer_engine({"init_info": info})
        self._is_connected = True

    @_needs_all_workers
    def receive_weights(self, updates: Sequence[dict[str, Any]], version: int) -> int:
        """Replace the weights by those that the sender sends, one part for each update. Returns the version that vLLM has then."""
        self.start_weight_update()
        for update in updates:
            self.update_weights(update)
        return self.finish_weights(version)

    @_needs_all_workers
    def start_weight_update(self) -> None:
        self._awake.loads_weights()
        self._llm.start_weight_update()

    @_needs_all_workers
    def update_weights(self, update: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": update})

    @_needs_all_workers
    def finish_weights(self, version: int) -> int:
        """Drop the prefix cache of the old weights, since the new ones are complete. Returns the version that vLLM has then."""
        if hasattr(self._llm, "get_weight_version"):
            self._llm.finish_weight_update(str(version))
            version = int(self._llm.get_weight_version())
        else:  # vLLM 0.26
            self._llm.finish_weight_update()
        return self._has_weights(version)

    def _reload(self, **source: Any) -> None:
        if self._on_cpu:
            self._llm.apply_model(pack_experts_at_next_load)
        self._llm.collective_rpc("reload_weights", kwargs=source)
        if self._on_cpu:
            self._llm.apply_model(pack_tied_weights)

    def close(self) -> None:
        """Free weights, cache, process group and torch's threads as far as possible; the engine can't be used afterwards."""
        import torch

        with _without_collections():
            self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        gc.collect()
        torch.set_num_threads = self._set_num_threads


@contextmanager
def _without_collections() -> Iterator[None]:
    """Skip the garbage collections of vLLM's shutdown, which would traverse all imported objects."""
    collect, gc.collect = gc.collect, lambda *_: 0
    try:
        yield
    finally:
        gc.collect = collect
