"""Files of the user's own code that a Python file imports, found without running it.

Statements in the code are read (ast), also inside functions, and `importlib.import_module` and `__import__` of a literal name. A name that
is computed, files that code opens, and installed packages aren't seen.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

OWN_PACKAGES = ("rlhf_core", "tasks", "flows", "tools", "tests")  # the project's own code is a dependency of the stages that import it
_INSTALLED = ("site-packages", "dist-packages")
_CALLS = ("import_module", "__import__")


def imported_files(file: Path, workspace: Path, *, module: str | None = None) -> list[Path]:
    """Files that `file` imports, and that these import, in the workspace, in folders of PYTHONPATH or beside `file`; sorted.

    Args:
        module: the dotted name by which `file` itself is imported. The __init__.py of every package around it or around an imported
            module is one of the files.
    """
    listed = [Path(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    roots = list(dict.fromkeys(root.resolve() for root in (workspace, *listed, file.parent)))
    first = file.resolve()
    todo = [first, *(_files_of(module, roots) if module else ())]
    found = set(todo)
    while todo:
        here = todo.pop()
        for name, base in _names(here) if here.suffix == ".py" else ():
            new = {path for path in _files_of(name, roots if base is None else [base]) if path not in found}
            found |= new
            todo += new
    return sorted(found - {first})


def _names(file: Path) -> Iterator[tuple[str, Path | None]]:
    """Each imported module's dotted name, and the folder in which it lies if the import is relative."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # its import fails too, and stage check_model shows why
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if not _is_own(alias.name))
        elif isinstance(node, ast.ImportFrom):
            base = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else None
            stem = f"{node.module}." if node.module else ""
            yield from ((stem + alias.name, base) for alias in node.names if base is not None or not _is_own(stem))
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str):
            called = node.func
            if getattr(called, "attr", None) in _CALLS or getattr(called, "id", None) in _CALLS:
                yield node.args[0].value, None


def _is_own(name: str) -> bool:
    return name.partition(".")[0] in OWN_PACKAGES


def _files_of(name: str, roots: list[Path]) -> Iterator[Path]:
    """Files of a module and of the packages around it, in the first root that has one. The last part may be a name in a module."""
    parts = name.split(".")
    if not all(part.isidentifier() or part == "*" for part in parts):
        return
    for root in roots:
        files = []
        for k in range(1, len(parts) + 1):
            place = root.joinpath(*parts[:k])
            candidates = (place / "__init__.py", *(place.with_name(place.name + suffix) for suffix in (".py", *EXTENSION_SUFFIXES)))
            files += [path for path in candidates if path.is_file()][:1]
        if files:
            yield from (path.resolve() for path in files if not set(_INSTALLED) & set(path.resolve().parts))
            return
