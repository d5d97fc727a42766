"""A user's own scorer: a Python function, found and checked before anything expensive starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlhf_core.data import functions

ARGUMENTS = ("prompts", "responses", "labels", "metadata")


def load_function(path: str) -> Callable[..., Any]:
    """The function that a scorer's path means. Raises what `functions.load_function` does."""
    return functions.load_function(path, ARGUMENTS, what="scorer function")
