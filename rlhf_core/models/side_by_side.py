"""Work that doesn't depend on each other, two at a time in threads of this process, each with half of its cores.

Two threads of one operation after the other wait for each other at the end of each, some thousand times in a step of a small model: an
operation that takes 0.1 ms gains little from a second core. Two models on a core each hardly wait.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import TypeVar

import torch

from rlhf_core.models.build import trunk
from rlhf_core.models.packed import can_pack
from rlhf_core.models.wrappers import PolicyModule, ScalarModule

Result = TypeVar("Result")

AT_A_TIME = 2


def can_run_side_by_side(*modules: PolicyModule | ScalarModule) -> bool:
    """Whether PyTorch has cores to share out, and these are computed by `packed_states`, which keeps nothing in a model and draws no random
    numbers. What other models do in their forward, such as to set the frequencies of a rotary embedding, may not be done twice at a time.
    """
    return torch.get_num_threads() >= AT_A_TIME and all(can_pack(trunk(module.model)) for module in modules)


def side_by_side(*work: Callable[[], Result], at_once: bool = True) -> list[Result]:
    """What each piece of work returns, in order; whatever runs beside it, each computes the same bits.

    Args:
        at_once: False: one after the other, each on all cores.
    Raises:
        Exception: what the first one in order raises, after all have ended.
    """
    if not at_once or len(work) < AT_A_TIME:
        return [one() for one in work]
    threads, learns = torch.get_num_threads(), torch.is_grad_enabled()

    def on_its_cores(one: Callable[[], Result]) -> Result:
        torch.set_num_threads(threads // AT_A_TIME)  # of this thread; and of threads to come, see below
        with torch.set_grad_enabled(learns):
            return one()

    started = [_pool().submit(on_its_cores, one) for one in work]
    wait(started)
    torch.set_num_threads(threads)
    return [one.result() for one in started]


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="side-by-side")
