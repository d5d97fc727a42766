"""Functions of tensors whose operations follow each other without Python in between, so that two threads don't wait for its lock.

Where both of two threads (side_by_side.py) are between two operations, one waits, and is woken up some 50 microseconds late. It was so 900
times in a PPO step of the default; half as often with these, and score, forward and update took 0.91 of the time (docs/decisions.md).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def outside_python(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function by TorchScript's interpreter, which holds no lock and computes the same bits. It must be in TorchScript's part of
    Python, and is compiled when it is defined, in some milliseconds.

    TorchScript is deprecated; the day it goes, this can return the function as it is.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        script = torch.jit.script(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        with torch.jit.optimized_execution(False):  # or its first calls look for what could be fused, a tenth of a second each
            return script(*arguments)

    return call
