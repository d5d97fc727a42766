"""The backend for small Llamas on CPU cores (`can_pack`): packed forward passes, and two parts of work at a time."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache

import torch
from transformers import LlamaForCausalLM, PreTrainedModel

from rlhf_core.data.batching import neighbour_microbatches
from rlhf_core.models.backend import Backend, Part, Result
from rlhf_core.models.batch import TokenBatch
from rlhf_core.models.build import trunk
from rlhf_core.models.cpu.decoder import LlamaDecoder
from rlhf_core.models.cpu.packed import can_pack, packed_states
from rlhf_core.models.decoding import Decoder
from rlhf_core.models.lora import has_adapters

WORKERS = 2
THREADS = "cpu-backend"


class CpuBackend(Backend):
    """Packed forward passes, which keep nothing in a model and draw no random numbers, so that two can run at the same time.

    The operations of a small model are too short to gain from a second core. Two models, or two micro-batches, on one core each gain.
    """

    keeps_graphs = True

    @staticmethod
    def supports(model: PreTrainedModel) -> bool:
        """Return whether `packed_states` computes this model's trunk where and as it is now."""
        return can_pack(trunk(model))

    @property
    def workers(self) -> int:
        cores = torch.get_num_threads()
        if sys.platform == "linux":
            cores = min(cores, len(os.sched_getaffinity(0)))  # vLLM binds the thread that it is started in to one core
        return WORKERS if cores >= WORKERS else 1

    def hidden_states(
        self, model: PreTrainedModel, batch: TokenBatch, rows: torch.Tensor, positions: torch.Tensor, *, routed: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        assert routed is None  # a plain Llama has no experts
        arguments = {"position_ids": batch.position_ids, "visible": batch.visible, "segments": batch.segments}
        return packed_states(trunk(model), batch.input_ids, rows, positions, **arguments), None

    def microbatches(self, sequences: Sequence[list[int]], *, max_tokens: int) -> list[list[int]]:
        """Return sequences grouped so that those that begin alike are together: a pass computes a common beginning once, and no padding."""
        return neighbour_microbatches(sequences, max_tokens=max_tokens, multiple=self.workers)

    def map(self, function: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
        """Return the results of the parts, computed two at a time with half of the cores each; they have the same bits as one after the
        other.

        Raises:
            Exception: what a part raises. Parts that have started are awaited, no further one starts. An exception from a signal handler
                is raised without waiting for the running parts.
        """
        parts = list(parts)
        if self.workers == 1 or len(parts) < WORKERS or threading.current_thread().name.startswith(THREADS):
            return [function(part) for part in parts]
        threads, learns = torch.get_num_threads(), torch.is_grad_enabled()

        def run(part: Part) -> Result:
            torch.set_num_threads(threads // WORKERS)  # of this thread, and of threads that start later: reset below
            with torch.set_grad_enabled(learns):
                return function(part)

        futures = [_pool().submit(run, part) for part in parts]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            started = [future for future in futures if not future.cancel()]
            torch.set_num_threads(threads)
        wait(started)
        return [future.result() for future in started]

    def decoder(self, model: PreTrainedModel, *, probed: bool = False) -> Decoder:
        plain = type(model) is LlamaForCausalLM and not has_adapters(model)
        return LlamaDecoder(model) if plain else super().decoder(model, probed=probed)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(WORKERS, thread_name_prefix=THREADS)
