"""The manifest of a checkpoint: its origin and content, the size and hash of every file, and a hash of itself."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_core.storage.hashing import FileHash, HashedFile, Hashing, rank_of

MANIFEST = "manifest.json"
FORMAT = 2


def write_manifest(folder: Path, content: dict[str, Any], hashes: Mapping[str, FileHash]) -> None:
    """Write the manifest of a folder. This syncs the folder and its subfolders; the files must have been synced before.

    Args:
        content: further keys of the manifest, including step.
        hashes: hash of every file in the folder by its name with slashes.
    """
    for below in sorted((p for p in folder.rglob("*") if p.is_dir()), reverse=True):
        fsync(below)
    manifest = {"format": FORMAT, "complete": True, **content, "files": {name: found.as_json() for name, found in hashes.items()}}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest | {"sha256": _hash(manifest)}, indent=1, sort_keys=True), encoding="utf-8")
    fsync(path)
    fsync(folder)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a checkpoint folder.

    Raises:
        ValueError: there is no manifest, it is cut short, or its content isn't what was written.
    """
    try:
        content = (folder / MANIFEST).read_bytes()
    except OSError as error:
        raise ValueError(f"expected a readable {MANIFEST}, got {type(error).__name__}") from error
    return parse_manifest(content)


def parse_manifest(content: bytes) -> dict[str, Any]:
    """Return the manifest of this JSON.

    Raises:
        ValueError: see `read_manifest`.
    """
    try:
        manifest = json.loads(content.decode("utf-8"))
        written = manifest.pop("sha256")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected a readable {MANIFEST}, got {type(error).__name__}") from error
    if written != _hash(manifest) or manifest["format"] != FORMAT or manifest["complete"] is not True:
        raise ValueError(f"expected {MANIFEST} as it was written, got other content")
    return manifest


def damage(folder: Path, *, rank: int = 0, ranks: int = 1) -> str | None:
    """Return the first problem of a checkpoint folder, or None if it is intact. The files are read and hashed.

    Args:
        rank, ranks: this rank, and the number of ranks that check the folder together. Files with a rank in their name are spread over the
            ranks; rank 0 reads the others.
    """
    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return str(error)
    if folder.name != f"step-{manifest['step']}":
        return f"expected the manifest of {folder.name}, got that of step-{manifest['step']}"
    recorded = {name: FileHash.from_json(entry) for name, entry in manifest["files"].items() if (rank_of(name) or 0) % ranks == rank}
    if problem := next(filter(None, (_missing(folder / name, name, found) for name, found in recorded.items())), None):
        return problem
    hashing = Hashing(HashedFile.as_recorded(folder / name, found) for name, found in recorded.items())
    for (name, found), result in zip(recorded.items(), hashing.results(), strict=True):
        if isinstance(result, OSError):
            return f"expected to read {name}, got {result}"
        if result[0] != found:
            return f"expected {name} as it was written, got other content"
    unknown = sorted(set(_files(folder)) - {MANIFEST, *manifest["files"]})
    return f"expected only what {MANIFEST} lists, got {unknown[0]} too" if unknown else None


def _missing(path: Path, name: str, recorded: FileHash) -> str | None:
    if not path.is_file():
        return f"expected the file {name}, got none"
    if path.stat().st_size != recorded.bytes:
        return f"expected {name} as it was written, {recorded.bytes} bytes, got {path.stat().st_size}"
    return None


def _files(folder: Path) -> Iterator[str]:
    return (p.relative_to(folder).as_posix() for p in folder.rglob("*") if not p.is_dir())


def _hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fsync(path: Path) -> None:
    """Sync a file or a folder to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
