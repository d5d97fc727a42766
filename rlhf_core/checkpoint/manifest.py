"""The manifest of a checkpoint: what is in it and of what work it is, with the size and hash of every file, and a hash of itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 2


def write_manifest(folder: Path, content: dict[str, Any]) -> None:
    """Write the manifest of a folder. Files are synced to disk before the folders that name them, and folders before the manifest.

    Args:
        content: what else the manifest says, step among it.
    """
    inside = sorted(folder.rglob("*"), reverse=True)
    files = {str(p.relative_to(folder)): _describe(p, sync=True) for p in inside if p.is_file()}
    for below in (p for p in inside if p.is_dir()):
        fsync(below)
    manifest = {"format": FORMAT, "complete": True, **content, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest | {"sha256": _hash(manifest)}, indent=1, sort_keys=True), encoding="utf-8")
    fsync(path)
    fsync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """
    Raises:
        ValueError: there is none, it is torn, or its content isn't what was written.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written = manifest.pop("sha256")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a readable {MANIFEST}, got {type(error).__name__}") from error
    if written != _hash(manifest) or manifest["format"] != FORMAT or manifest["complete"] is not True:
        raise ValueError(f"expected {MANIFEST} as it was written, got other content")
    return manifest


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if folder.name != f"step-{manifest['step']}":
        return f"expected the manifest of {folder.name}, got that of step-{manifest['step']}"
    for name, described in manifest["files"].items():
        if problem := _file_damage(folder / name, name, described):
            return problem
    unknown = sorted(set(_files(folder)) - {MANIFEST, *manifest["files"]})
    return f"expected only what {MANIFEST} lists, got {unknown[0]} too" if unknown else None


def _file_damage(path: Path, name: str, described: dict[str, int | str]) -> str | None:
    if not path.is_file():
        return f"expected the file {name}, got none"
    if path.stat().st_size != described["bytes"]:
        return f"expected {name} as it was written, {described['bytes']} bytes, got {path.stat().st_size}"
    if _describe(path, sync=False) != described:
        return f"expected {name} as it was written, got other content"
    return None


def _describe(path: Path, *, sync: bool) -> dict[str, str | int]:
    if sync:
        fsync(path)
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _files(folder: Path) -> Iterator[str]:
    return (str(p.relative_to(folder)) for p in folder.rglob("*") if not p.is_dir())


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fsync(path: Path) -> None:
    """Of a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
