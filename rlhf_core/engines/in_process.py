"""Open a rollout engine of either backend: in this process, in another one, or as an actor of a group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.engines.gpu_memory import memory_in_use
from rlhf_core.engines.weights import PackedTensor, unpack

if TYPE_CHECKING:
    from rlhf_core.config import RolloutBackend
    from rlhf_core.engines.apart import EngineApart
    from rlhf_core.engines.pytorch_engine import PytorchEngine
    from rlhf_core.engines.vllm_engine import VllmEngine
    from rlhf_core.sampling.requests import Sample


def open_engine(backend: RolloutBackend, model_path: str, **settings: Any) -> VllmEngine | PytorchEngine | EngineApart:
    """An engine for a stage with other models. Arguments as for `open_here`.

    vLLM gets a separate process on a GPU, and on one of several ranks, whose process group it would take for its own.
    """
    import torch

    from rlhf_core.engines.ranks import world_size

    if backend == "vllm" and (torch.cuda.is_available() or world_size() > 1):
        from rlhf_core.engines.apart import EngineApart

        return EngineApart(open_here, backend=backend, model_path=model_path, **settings)
    return open_here(backend, model_path, **settings)


def open_here(
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
    shares_gpu: bool = False,
    reads_text: bool = False,
    sleeps: bool = False,
) -> VllmEngine | PytorchEngine:
    """An engine in this process. See the engines for the arguments; only vLLM uses `seed`."""
    shared = {
        "max_length": max_length,
        "dtype": dtype,
        "kv_cache_gib": kv_cache_gib,
        "max_concurrent_sequences": max_concurrent_sequences,
        "threads": threads,
        "trust_remote_code": trust_remote_code,
        "gpu_memory_fraction": gpu_memory_fraction,
        "shares_gpu": shares_gpu,
        "reads_text": reads_text,
    }
    if backend == "pytorch":
        from rlhf_core.engines.pytorch_engine import PytorchEngine

        return PytorchEngine(model_path, **shared)
    from rlhf_core.engines.vllm_engine import VllmEngine

    return VllmEngine(model_path, **shared, seed=seed, sleeps=sleeps)


class RolloutActor:
    """An engine as one actor of a group. Args: settings: of `open_here`."""

    def __init__(self, rank: int, **settings: Any):
        self.rank = rank
        self._engine = open_here(**settings)

    def sleep(self, level: int) -> dict[str, int]:
        """As the engine does. Returns the memory in use on its GPU afterwards."""
        self._engine.sleep(level)
        return memory_in_use()

    def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, int]:
        """As the engine does. Returns the memory in use on its GPU afterwards."""
        self._engine.wake_up(tags)
        return memory_in_use()

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Sample]]:
        """As the engine does."""
        return self._engine.generate(*args, **kwargs)

    def serve(self, *args: Any, **kwargs: Any) -> dict[int, list[Sample]]:
        """As the engine does."""
        return self._engine.serve(*args, **kwargs)

    def probe(self, ids: Sequence[int]) -> list[float]:
        """As the engine does."""
        return self._engine.probe(ids)

    def load_weights(self, weights: dict[str, PackedTensor], version: int, ids: Sequence[int] = ()) -> tuple[int, list[float]]:
        """As the engine does, with packed weights from another process; returns the version and log-probabilities of the ids, if any."""
        return self._engine.load_weights(unpack(weights), version), self._engine.probe(ids) if ids else []
