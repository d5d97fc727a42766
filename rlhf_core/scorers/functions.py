"""A user's own scorer: a Python function, found and checked before anything expensive starts."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

ARGUMENTS = ("prompts", "responses", "labels", "metadata")


def load_function(path: str) -> Callable[..., Any]:
    """The function that `path/file.py:name` (relative to the working directory) or `package.module:name` means.

    Raises:
        ValueError: there is no such file, module or function, it can't be imported, or it doesn't take four arguments.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(
            f"scorer function {path}: expected path/file.py:name or package.module:name, got no such form; name the function too"
        )
    function = getattr(_module(path, place), name, None)
    if not callable(function):
        raise ValueError(f"scorer function {path}: expected a function {name} there, got {function!r}; correct the name")
    try:
        inspect.signature(function).bind(*ARGUMENTS)
    except TypeError as error:
        raise ValueError(
            f"scorer function {path}: expected it to take ({', '.join(ARGUMENTS)}), got {inspect.signature(function)} ({error}); change it"
        ) from error
    return function


def _module(path: str, place: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # a user's module may raise anything when it is imported
        raise ValueError(
            f"scorer function {path}: expected an importable module, got {type(error).__name__} ({error}); correct it"
        ) from error


def _from_file(file: Path) -> ModuleType:
    """The file as a module under a name of its own, so that it hides no other and pickle and dataclasses find it."""
    file = file.resolve()
    name = f"scorer_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
