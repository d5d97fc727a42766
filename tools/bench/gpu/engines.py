"""Rollout engines in their own processes, which run requests and report seconds: bare vLLM, and VllmEngine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.process import end_with_parent

if TYPE_CHECKING:
    import torch

GPU = Path("/dev/nvidiactl")  # there where NVIDIA's driver is
Side = Literal["vLLM", "ours"]
ANSWER_SECONDS = 240.0  # for an answer, an engine's start included
COMPARED_TOKENS = 256  # tokens whose logits are computed at a time
BLOCK = 128  # tokens of a block of the CPU's cache


@dataclass(frozen=True)
class EngineSettings:
    """max_length: tokens of prompt and response. sequences: at most at a time. memory: fraction of the GPU's."""

    model: str
    dtype: Literal["bfloat16", "float32"]
    max_length: int
    sequences: int
    memory: float
    threads: int


@dataclass(frozen=True)
class Batch:
    """Prompts as token ids, and the length of every response; no token ends one.

    plain: bare vLLM returns tokens only; otherwise each prompt has a seed and each token a log-probability, as in RL.
    """

    prompts: list[list[int]]
    response: int
    plain: bool = False


class Engine:
    """The process of one engine.

    Raises:
        RuntimeError: the process ended, or gave no answer in time.
    """

    def __init__(self, side: Side, settings: EngineSettings):
        self.side = side
        processes = multiprocessing.get_context("spawn")  # a forked process can't use a GPU that its parent has touched
        self._connection, theirs = processes.Pipe()
        self._process = processes.Process(target=serve, args=(theirs, os.getpid(), side, settings), daemon=True)
        self._process.start()
        theirs.close()

    @cached_property
    def start_seconds(self) -> float:
        """Wait until the engine has started."""
        return self._answer("start")

    def generate(self, batch: Batch) -> tuple[float, int]:
        """Seconds and number of generated tokens."""
        return self._ask("generate", batch)

    def reload(self, prompts: list[list[int]], response: int) -> dict[str, Any]:
        """For a VllmEngine: see `_Ours.reload`."""
        return self._ask("reload", prompts, response)

    def close(self) -> None:
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _ask(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        return self._answer(method)

    def _answer(self, what: str) -> Any:
        subject = f"engine ({self.side})"
        if not self._connection.poll(ANSWER_SECONDS):
            raise RuntimeError(f"{subject}: expected {what} within {ANSWER_SECONDS:.0f} s, got no answer")
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join(5)
            raise RuntimeError(
                f"{subject}: expected {what}, got the end of its process with exit code {self._process.exitcode}; its reason is above"
            ) from None


@contextlib.contextmanager
def engines(sides: tuple[Side, ...], settings: EngineSettings) -> Iterator[list[Engine]]:
    """Start one engine of each kind. On a GPU in sequence, because vLLM measures free memory while it starts."""
    with contextlib.ExitStack() as stack:
        started = []
        for side in sides:
            started.append(stack.enter_context(contextlib.closing(Engine(side, settings))))
            if GPU.exists():
                _ = started[-1].start_seconds
        _ = [engine.start_seconds for engine in started]
        yield started


def serve(connection: Connection, parent: int, side: Side, settings: EngineSettings) -> None:
    """An engine's process."""
    end_with_parent(parent, signal.SIGKILL)
    os.environ["OMP_NUM_THREADS"] = str(settings.threads)
    from rlhf_core.process import collect_rarely, configure_process

    configure_process()
    collect_rarely()
    began = time.perf_counter()
    engine = {"vLLM": _Bare, "ours": _Ours}[side](settings)
    connection.send(time.perf_counter() - began)
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(engine, method)(*arguments))


class _Bare:
    """vLLM's documented offline use: default settings, token ids in and out."""

    def __init__(self, settings: EngineSettings):
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        import torch
        from vllm import LLM

        on_cpu = {}
        if not torch.cuda.is_available():  # as in VllmEngine, which has the reason
            torch._dynamo.config.disable = True
            inspect_here(settings.model)
            on_cpu = {"enforce_eager": True, "enable_chunked_prefill": False, "block_size": BLOCK}
            on_cpu["num_gpu_blocks_override"] = settings.sequences * -(-settings.max_length // BLOCK) + 1
        self._llm = LLM(
            model=settings.model,
            dtype=settings.dtype,
            max_model_len=settings.max_length,
            max_num_seqs=settings.sequences,
            gpu_memory_utilization=settings.memory,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,  # no prompt is repeated
            logprobs_mode="processed_logprobs",
            use_tqdm_on_load=False,
            seed=0,
            **on_cpu,
        )

    def generate(self, batch: Batch) -> tuple[float, int]:
        from vllm import SamplingParams

        how = {} if batch.plain else {"logprobs": 0}
        parameters = [
            SamplingParams(max_tokens=batch.response, ignore_eos=True, detokenize=False, seed=None if batch.plain else i, **how)
            for i in range(len(batch.prompts))
        ]
        began = time.perf_counter()
        outputs = self._llm.generate([{"prompt_token_ids": ids} for ids in batch.prompts], parameters, use_tqdm=False)
        return time.perf_counter() - began, sum(len(request.outputs[0].token_ids) for request in outputs)


class _Ours:
    def __init__(self, settings: EngineSettings):
        from rlhf_core.engines.vllm.engine import VllmEngine

        self._settings = settings
        self._engine = VllmEngine(
            settings.model,
            max_length=settings.max_length,
            dtype=settings.dtype,
            kv_cache_gib=1,
            max_concurrent_sequences=settings.sequences,
            threads=settings.threads,
            seed=0,
            trust_remote_code=False,
            gpu_memory_fraction=settings.memory,
        )

    def generate(self, batch: Batch) -> tuple[float, int]:
        began = time.perf_counter()
        groups = self._sample(batch.prompts, batch.response)
        return time.perf_counter() - began, sum(len(sample.response_ids) for (sample,) in groups)

    def _sample(self, prompts: list[list[int]], response: int):
        from rlhf_core.sampling.requests import SamplingSettings

        return self._engine.generate(prompts, list(range(len(prompts))), SamplingSettings(response, 1.0), stop_ids=(), group_size=1)

    def reload(self, prompts: list[list[int]], response: int) -> dict[str, Any]:
        """Load other weights from CPU memory, twice, and compare log-probabilities of new responses with transformers'.

        The weights are the old ones with rows permuted, so stale weights give other probabilities.

        Returns: seconds (of each load), bytes, and apart: statistics of the differences in nats (tools.bench.gpu.job.sizes).
        """
        import torch

        from rlhf_core.engines.deepspeed_engine import device
        from rlhf_core.models.build import checkpoint_names, frozen, load_language_model
        from tools.bench.gpu.job import sizes

        where = {"device": torch.device("cpu"), "dtype": getattr(torch, self._settings.dtype)}
        model = frozen(load_language_model(self._settings.model), **where)
        seconds = []
        for version in (1, 2):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.copy_(parameter.roll(version, 0))
            state = checkpoint_names(model, model.state_dict())
            began = time.perf_counter()
            self._engine.load_weights(state, version)
            _synchronize()
            seconds.append(time.perf_counter() - began)
        loaded = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
        samples = [sample for (sample,) in self._sample(prompts, response)]
        model.to(device())
        reported = torch.tensor([x for sample in samples for x in sample.logprobs])
        expected = torch.cat([_logprobs(model, ids, sample.response_ids) for ids, sample in zip(prompts, samples, strict=True)])
        return {"seconds": seconds, "bytes": loaded, "apart": sizes(reported - expected)}


def inspect_here(model: str) -> None:
    """Inspect the model's class in this process; vLLM would start another one to keep a GPU untouched."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    for name in AutoConfig.from_pretrained(model).architectures:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _logprobs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> torch.Tensor:
    """Log-probabilities of a response's tokens [R] by transformers' forward pass."""
    import torch

    ids = torch.tensor([prompt + response], device=model.device)
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    chosen = torch.tensor(response, device=model.device)[:, None]
    rows = zip(logits.split(COMPARED_TOKENS), chosen.split(COMPARED_TOKENS), strict=True)
    return torch.cat([part.float().log_softmax(-1).gather(1, at)[:, 0].cpu() for part, at in rows])


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
