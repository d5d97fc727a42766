"""Compares the packages installed on a node with those of the stage that submits the job.

Imports nothing that a node may lack.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from collections.abc import Iterable, Mapping

SAME = ("torch", "transformers", "tokenizers", "safetensors", "deepspeed", "peft", "ray", "pydantic", "pyarrow", "pandas", "numpy")
ANY = ""  # version of a package of which any will do
PYTHON = "python"


def wanted(engines: Iterable[str] = ()) -> dict[str, str]:
    """Return the versions that nodes must have, which are those of this process.

    Args:
        engines: modules that the job imports besides, of which a node may have another build.
    """
    return found_here(SAME) | dict.fromkeys(engines, ANY)


def found_here(names: Iterable[str]) -> dict[str, str]:
    """Return the versions in this process without a build's suffix such as +cpu. Missing packages are left out."""
    found = {PYTHON: ".".join(platform.python_version_tuple()[:2])}
    for name in names:
        try:
            version = importlib.metadata.version(name)  # None for the remains of a removed package
        except importlib.metadata.PackageNotFoundError:
            version = None
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.origin is not None:
            found[name] = (version or ANY).partition("+")[0]
    return found


def differences(wanted: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return one line for each package that a node lacks or has in another version."""
    lines = []
    for name, version in wanted.items():
        there = found.get(name)
        if there is None:
            lines.append(f"{name} is missing")
        elif version not in (ANY, there):
            lines.append(f"{name} {there} instead of {version}")
    return lines


def refusal(node: str, lines: Iterable[str]) -> str:
    return (
        f"node {node}: expected the packages of the stage's machine, got other ones: {', '.join(lines)}; install those, "
        "or run the stage from the nodes' image (docs/cluster.md)"
    )
