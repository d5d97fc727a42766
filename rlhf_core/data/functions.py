"""User functions that params.yaml names, loaded and checked before anything expensive starts."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rlhf_core.environment import hint


def load_function(path: str, arguments: Sequence[str] | None, *, what: str) -> Callable[..., Any]:
    """Load the function named by `path/file.py:name` (relative to the working directory) or `package.module:name`.

    Args:
        arguments: names of the positional arguments that it will be called with; None: any.
        what: the function's role, for messages.
    Raises:
        ValueError: there is no such file, module or function, it can't be imported, or it doesn't take these arguments.
    """
    place, colon, name = path.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{what} {path}: expected path/file.py:name or package.module:name, got another form; name the function too")
    function = getattr(_module(f"{what} {path}", place), name, None)
    if not callable(function):
        raise ValueError(f"{what} {path}: expected a function {name} there, got {function!r}; correct the name")
    if arguments is None:
        return function
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{what} {path}: expected it to take ({', '.join(arguments)}), got {inspect.signature(function)} ({error}); change it"
        ) from error
    return function


def _module(subject: str, place: str) -> ModuleType:
    try:
        return _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # a user's module may raise anything when it is imported
        advice = hint(error) or "; correct it"
        raise ValueError(f"{subject}: expected an importable module, got {type(error).__name__} ({error}){advice}") from error


def _from_file(file: Path) -> ModuleType:
    """Load the file as a module with a unique name: it hides no other module, and pickle and dataclasses find it."""
    file = file.resolve()
    name = f"user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
