"""What a module imports, read from its source: nothing is executed, and imports inside functions count too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("flows", "tasks", "rlhf_core")
_MODULE = re.compile(r"^(?:flows|tasks|rlhf_core)(?:\.\w+)+$")


@cache
def imported_names(path: Path, *, started: bool = True, typing: bool = True) -> frozenset[str]:
    """Dotted names that a file imports; `from a import b` gives both a and a.b, one of which is the module.

    Args:
        started: a string that is the dotted name of a module of the project counts as an import: it names a job for `python -m`.
        typing: imports under `if TYPE_CHECKING:` count.
    """
    names: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not typing:
        tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif started and isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {word for word in node.value.split() if _MODULE.match(word)}
    return frozenset(names)


def module_file(name: str) -> Path | None:
    """The file of a module of ours; of a package the `__init__.py` that gathers its modules.

    None for a package without such a one, for a name inside a module and for what isn't ours.
    """
    if name.split(".")[0] not in OWN:
        return None
    path = ROOT.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file():
        return path.with_suffix(".py")
    package = path / "__init__.py"
    return package if package.is_file() and imported_names(package) else None


def own_imports(path: Path) -> set[Path]:
    return {file for name in imported_names(path) if (file := module_file(name))}


def runtime_imports(path: Path) -> set[Path]:
    """Files of the project that a file imports when it runs, at module level or inside a function."""
    return {file for name in imported_names(path, started=False, typing=False) if (file := module_file(name))}


def foreign_imports(path: Path) -> set[str]:
    """Top-level names that aren't ours."""
    return {name.split(".")[0] for name in imported_names(path)} - set(OWN)


def closure(start: Path, exempt: set[Path]) -> set[Path]:
    """All files of ours that a file needs, directly or not; exempt ones (a folder: all in it) are neither listed nor looked into."""
    seen: set[Path] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        if path not in seen and not exempt & {path, *path.parents}:
            seen.add(path)
            todo += own_imports(path)
    return seen


def sources(folder: str) -> Iterator[Path]:
    return (p for p in sorted((ROOT / folder).rglob("*.py")))
