"""What a job brings to nodes that don't see the project's folder: code, inputs, and params with the inputs' paths on a node."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.config import EnvironmentConfig, HarnessConfig, ModelConfig, Params, ScorerConfig, Section, TeacherConfig, bytes_shown
from rlhf_core.data.places import locate
from rlhf_core.models.folder import locate_model
from rlhf_core.storage.files import below

CODE = ("rlhf_core", "tasks", "rewards")
MAX_CODE = 64 << 20  # bytes; Ray keeps the code in the memory of its head
OUTSIDE = "outside"  # folder of a node's workspace for what isn't below the project's folder
_FILE_FUNCTION = re.compile(r".*\.py:\w+")
_MODULE_FUNCTION = re.compile(r"(\w+)(\.\w+)*:\w+")

Value = TypeVar("Value")


@dataclass
class JobInputs:
    """Files that a job brings to its nodes. Paths below the project's folder are the same on a node.

    files: path here of every input by its path in a node's workspace.
    """

    root: Path = field(default_factory=Path.cwd)
    files: dict[str, Path] = field(default_factory=dict)

    def add(self, path: Path | str) -> str:
        """Add a file or folder, and return its path on a node."""
        here = Path(os.path.abspath(self.root / path))  # links stay: a node has them as folders
        there = (
            here.relative_to(self.root).as_posix()
            if here.is_relative_to(self.root)
            else f"{OUTSIDE}/{hashlib.sha256(str(here).encode()).hexdigest()[:8]}-{here.name}"
        )
        self.files |= {(Path(there) / name).as_posix(): file for name, file in below([here], here).items()}
        return there

    def add_function(self, name: str) -> str:
        """Add the file of a function `file.py:name`, and return its name on a node. A function in a module is part of the code."""
        file, _, function = name.rpartition(":")
        return f"{self.add(file)}:{function}" if _FILE_FUNCTION.fullmatch(name) else name

    def on_node(self, value: Value) -> Value:
        """Return a value with the paths that a node has, and add what they name: paths, models and scorers, at any depth."""
        if isinstance(value, Path):
            return Path(self.add(value))
        if isinstance(value, ScorerConfig) and value.path is not None:
            path = self.add(locate(value.path)) if value.kind == "reward_model" else self.add_function(value.path)
            return value.model_copy(update={"path": path})
        if isinstance(value, ScorerConfig) and value.template is not None:
            return value.model_copy(update={"template": self.add(locate(value.template))})
        if isinstance(value, HarnessConfig) and value.include_path is not None:
            return value.model_copy(update={"include_path": self.add(locate(value.include_path))})
        if isinstance(value, EnvironmentConfig):
            return value.on_files(self.add_function, self.add)
        if isinstance(value, TeacherConfig) and value.path is not None:
            folder = Path(locate_model(value.path))
            return value.model_copy(update={"path": self.add(folder)}) if folder.is_dir() else value
        if isinstance(value, ModelConfig) and value.path is not None:
            folder = Path(locate_model(value.path, value.revision))
            return value.model_copy(update={"path": self.add(folder)}) if folder.is_dir() else value
        if isinstance(value, Section):
            fields = {name: getattr(value, name) for name in type(value).model_fields}
            changed = {name: moved for name, of in fields.items() if (moved := self.on_node(of)) is not of and moved != of}
            return value.model_copy(update=changed) if changed else value
        if isinstance(value, list) and any(isinstance(item, Section | Path) for item in value):
            return [self.on_node(item) for item in value]
        if isinstance(value, dict) and any(isinstance(item, Path) for item in value.values()):
            return {name: self.on_node(item) for name, item in value.items()}
        return value

    def judges_on_node(self, judges: dict[str, str]) -> dict[str, str]:
        return {source: self.add_function(judge) for source, judge in judges.items()}


def pack_code(folder: Path, params: Params, root: Path) -> None:
    """Copy the project's code and these params into a folder, with the modules beside it that params name.

    Raises:
        ValueError: the code is too large for Ray.
    """
    named = {root / f"{name}{ending}" for name in _modules(params.model_dump()) for ending in ("", ".py")}
    parts = [root / name for name in CODE] + sorted(path for path in named if path.exists() and path.name not in CODE)
    for part in parts:
        if part.is_dir():
            shutil.copytree(part, folder / part.name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"))
        elif part.exists():
            shutil.copy(part, folder)
    (folder / "params.yaml").write_text(json.dumps(params.model_dump(mode="json")), encoding="utf-8")
    sizes = {part.name: sum(file.stat().st_size for file in below([folder / part.name], folder).values()) for part in parts}
    if (total := sum(sizes.values())) > MAX_CODE:
        largest = max(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"code: expected at most {bytes_shown(MAX_CODE)} for Ray to bring to every node, got {bytes_shown(total)}, of which {largest}/ "
            f"has {bytes_shown(sizes[largest])}; move data out of it"
        )


def _modules(node: Any) -> Iterator[str]:
    """Yield the top-level module of each function that params name by its module."""
    if isinstance(node, Mapping | list | tuple):
        for value in node.values() if isinstance(node, Mapping) else node:
            yield from _modules(value)
    elif isinstance(node, str) and (found := _MODULE_FUNCTION.fullmatch(node)):
        yield found[1]
