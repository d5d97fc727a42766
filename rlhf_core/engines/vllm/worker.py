"""What vLLM loads into each process of an engine on several GPUs, before the process has a model (`worker_extension_cls`)."""

from __future__ import annotations

import multiprocessing
import signal

from rlhf_core.engines.memory.gpu_memory import memory_in_use
from rlhf_core.process import end_with_parent

# The process ends with its engine's. vLLM notices that end too, but not while it loads a model or waits for another process of the engine.
if (engine := multiprocessing.parent_process()) is not None:
    end_with_parent(engine.pid, signal.SIGKILL)


class WorkerExtension:
    """Base class that vLLM gives to its workers."""

    def memory_in_use(self) -> dict[str, int]:
        """See `gpu_memory.memory_in_use`."""
        return memory_in_use()
