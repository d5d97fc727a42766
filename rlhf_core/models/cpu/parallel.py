"""Work that doesn't depend on each other, two at a time in threads of this process, each with half of its cores.

Operations as short as a small model's gain little from a second thread: score, forward and update of PPO on the default 1.09. The same with
two models, or two micro-batches, on a core each take 0.74 to 0.85 of the time of one after the other on two (docs/performance.md).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

from rlhf_core.models.build import trunk
from rlhf_core.models.cpu.packed import can_pack
from rlhf_core.models.wrappers import PolicyModule, ScalarModule

Result = TypeVar("Result")

AT_A_TIME = 2
THREADS = "side-by-side"


def can_run_side_by_side(*modules: PolicyModule | ScalarModule) -> bool:
    """Whether there are cores to share out, and these are computed by `packed_states`, which keeps nothing in a model and draws no random
    numbers. What other models do in their forward, such as to set the frequencies of a rotary embedding, may not be done twice at a time.
    """
    cores = torch.get_num_threads()
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))  # vLLM binds the thread that it is started in to one
    return cores >= AT_A_TIME and all(can_pack(trunk(module.model)) for module in modules)


def side_by_side(*work: Callable[[], Result], at_once: bool = True) -> list[Result]:
    """What each piece of work returns, in order; whatever runs beside it, each computes the same bits.

    Args:
        at_once: False: one after the other, each on all cores.
    Raises:
        Exception: what one of them raises, after those that had begun have ended; no further one is begun. Where a signal's handler raises
            it, it doesn't wait for them.
    """
    if not at_once or len(work) < AT_A_TIME or threading.current_thread().name.startswith(THREADS):
        return [one() for one in work]
    threads, learns = torch.get_num_threads(), torch.is_grad_enabled()

    def on_its_cores(one: Callable[[], Result]) -> Result:
        torch.set_num_threads(threads // AT_A_TIME)  # of this thread; and of threads to come, see below
        with torch.set_grad_enabled(learns):
            return one()

    futures = [_pool().submit(on_its_cores, one) for one in work]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        begun = [future for future in futures if not future.cancel()]
        torch.set_num_threads(threads)
    wait(begun)
    return [future.result() for future in begun]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_A_TIME, thread_name_prefix=THREADS)
