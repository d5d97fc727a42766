"""Opens a rollout engine of either backend: in this process, in another one, or as an actor of a group."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_core.config import RolloutBackend
    from rlhf_core.engines.rollout.process import EngineOfOtherRank, EngineProcess
    from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine
    from rlhf_core.engines.rollout.requests import Sample
    from rlhf_core.engines.vllm.engine import VllmEngine


ONLY_VLLM = frozenset(
    ("seed", "sleeps", "tensor_parallel_size", "prefix_caching", "enforce_eager", "weight_transfer", "quantization"),
)


def open_engine(
    backend: RolloutBackend, model_path: str, *, ranks_per_model: int = 1, apart: bool = False, **settings: Any
) -> VllmEngine | PytorchEngine | EngineProcess | EngineOfOtherRank:
    """Open an engine for a stage with other models. Other arguments as for `open_here`.

    vLLM gets a separate process on a GPU, on one of several ranks, whose process group it would take for its own, and where asked for.

    Args:
        ranks_per_model: so many consecutive ranks have one engine over all their GPUs, which the first of them opens.
        apart: another engine was in this process, which vLLM doesn't leave whole.
    Raises:
        ValueError: such ranks are on several nodes.
    """
    import torch

    from rlhf_core.engines.deepspeed.ranks import rank, world_size

    if ranks_per_model > 1:
        from rlhf_core.engines.rollout.process import EngineOfOtherRank, EngineProcess

        if (there := int(os.environ["LOCAL_WORLD_SIZE"])) % ranks_per_model:
            raise ValueError(
                f"cluster.inference_ranks_per_model: expected a divisor of each node's ranks, got {ranks_per_model} with {there} ranks on "
                "one; change it or cluster.inference_ranks"
            )
        if rank() % ranks_per_model:
            return EngineOfOtherRank()
        divided = {"gpus": ranks_per_model, "tensor_parallel_size": ranks_per_model}
        return EngineProcess(open_here, backend=backend, model_path=model_path, **divided, **settings)
    if backend == "vllm" and (apart or torch.cuda.is_available() or world_size() > 1):
        from rlhf_core.engines.rollout.process import EngineProcess

        return EngineProcess(open_here, backend=backend, model_path=model_path, **settings)
    return open_here(backend, model_path, **settings)


def open_here(backend: RolloutBackend, model_path: str, **settings: Any) -> VllmEngine | PytorchEngine:
    """Open an engine in this process. See the engines for the settings; ONLY_VLLM are ignored by PyTorch's."""
    settings = {"kv_cache_gib": 1} | settings
    if backend == "pytorch":
        from rlhf_core.engines.rollout.pytorch_engine import PytorchEngine

        return PytorchEngine(model_path, **{name: value for name, value in settings.items() if name not in ONLY_VLLM})
    from rlhf_core.engines.vllm.engine import VllmEngine

    return VllmEngine(model_path, **settings)


class RolloutActor:
    """An engine as one actor of a group.

    Args:
        weight_transfer: how each engine of the group gets the trainer's weights.
        settings: of `open_here`.
    """

    def __init__(self, rank: int, *, weight_transfer: Sequence[str] | None = None, **settings: Any):
        self.rank = rank
        self._whole, self._told = 0, 0  # calls of `advance` whose due responses have ended, and that are to end; by the last's number
        self._engine: Any = open_here(**settings, weight_transfer=weight_transfer and weight_transfer[rank])
        self._transfer = self._engine
        if settings["backend"] == "pytorch":
            from rlhf_core.engines.transfer.pytorch import PytorchTransfer

            self._transfer = PytorchTransfer(self._engine)

    def sleep(self, level: int) -> dict[str, int]:
        """As the engine does. Returns the memory in use on its GPU afterwards."""
        self._engine.sleep(level)
        return self._engine.memory_in_use()

    def wake_up(self, tags: Sequence[str] | None = None) -> dict[str, int]:
        """As the engine does. Returns the memory in use on its GPU afterwards."""
        self._engine.wake_up(tags)
        return self._engine.memory_in_use()

    def generate(self, *args: Any, **kwargs: Any) -> list[list[Sample]]:
        """As the engine does."""
        return self._engine.generate(*args, **kwargs)

    def serve(self, *args: Any, **kwargs: Any) -> dict[int, list[Sample]]:
        """As the engine does."""
        return self._engine.serve(*args, **kwargs)

    def advance(self, *args: Any, call: int | None = None, **kwargs: Any) -> list[Sample]:
        """As the engine does.

        Args:
            call: a number, larger than those before: goes on until `look` tells this call to end.
        """
        if call is None:
            return self._engine.advance(*args, **kwargs)

        def more(awaited: bool) -> bool:
            if not awaited:
                self._whole = call
            return awaited or self._told < call

        samples = self._engine.advance(*args, **kwargs, more=more)
        self._whole = call
        return samples

    def look(self, call: int, end: bool) -> bool:
        """Return whether the due responses of a call of `advance` have ended. In another thread than that call.

        Args:
            end: tell the call to end with them.
        """
        if end:
            self._told = call
        return self._whole >= call

    def probe(self, ids: Sequence[int]) -> list[float]:
        """As the engine does."""
        return self._engine.probe(ids)

    def connect_weights(self, info: dict[str, Any]) -> None:
        """As the engine does."""
        self._transfer.connect_weights(info)

    def receive_weights(self, updates: Sequence[dict[str, Any]], version: int, ids: Sequence[int]) -> tuple[int, list[float]]:
        """As the engine does. Returns the version and log-probabilities of the ids, if any."""
        return self._transfer.receive_weights(updates, version), self._engine.probe(ids) if ids else []

    def start_weight_update(self) -> None:
        """As the engine does."""
        self._transfer.start_weight_update()

    def update_weights(self, update: dict[str, Any]) -> None:
        """As the engine does."""
        self._transfer.update_weights(update)

    def finish_weights(self, version: int, ids: Sequence[int]) -> tuple[int, list[float]]:
        """As the engine does. Returns the version and log-probabilities of the ids, if any."""
        return self._transfer.finish_weights(version), self._engine.probe(ids) if ids else []
