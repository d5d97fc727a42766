"""Files in a storage under the hash of their content: written once, and verified whenever they are read."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlhf_core.storage.address import Storage, StorageFailed
from rlhf_core.storage.hashing import FileHash, HashedFile, Hashing

Index = dict[str, FileHash]  # of files, by their names with slashes


def hash_files(files: Mapping[str, Path]) -> Index:
    """Return the size and hash of each file by its name.

    Raises:
        OSError: a file can't be read.
    """
    hashing, index = Hashing(HashedFile(path) for path in files.values()), {}
    for name, result in zip(files, hashing.results(), strict=True):
        if isinstance(result, OSError):
            raise result
        index[name] = result[0]
    return index


def intact(folder: Path, index: Index) -> set[str]:
    """Return the names of the files in a folder that match the index. Files of another size aren't read."""
    there = {name: found for name, found in index.items() if _has_size(folder / name, found.bytes)}
    hashing = Hashing(HashedFile.as_recorded(folder / name, found) for name, found in there.items())
    return {
        name
        for (name, found), result in zip(there.items(), hashing.results(), strict=True)
        if not isinstance(result, OSError) and result[0] == found
    }


def upload(storage: Storage, prefix: str, files: Mapping[str, Path], index: Index) -> int:
    """Write the contents that the storage doesn't have below the prefix, and return the number of bytes written."""
    there = storage.sizes(prefix)
    missing = {of.sha256: name for name, of in index.items() if there.get(of.sha256) != of.bytes}
    storage.put((files[name], f"{prefix}/{sha256}") for sha256, name in missing.items())
    return sum(index[name].bytes for name in missing.values())


def download(storage: Storage, prefix: str, index: Index, folder: Path) -> None:
    """Read files from the storage into a folder and verify them. A file appears as a whole and replaces one of its name.

    Raises:
        StorageFailed: a file is missing or has other content than the index says.
    """
    aside = {}
    try:
        for name in index:
            path = _inside(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            aside[name] = path.with_name(f".{secrets.token_hex(4)}.{path.name[:100]}")
        storage.get((f"{prefix}/{of.sha256}", of.bytes, aside[name]) for name, of in index.items())
        hashing = Hashing(HashedFile.as_recorded(aside[name], of) for name, of in index.items())
        for (name, of), result in zip(index.items(), hashing.results(), strict=True):
            if isinstance(result, OSError) or result[0] != of:
                raise StorageFailed(f"storage {storage.url}: expected {name} as it was written, got other content; remove {prefix}")
        for name, path in aside.items():
            os.replace(path, folder / name)
    finally:
        for path in aside.values():
            path.unlink(missing_ok=True)


def below(paths: Iterable[Path], root: Path) -> dict[str, Path]:
    """Return files by their names relative to a root: those of `paths`, and all that lie in folders of `paths`. Paths that don't exist are
    left out.
    """
    found = {}
    for path in paths:
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        found |= {file.relative_to(root).as_posix(): file for file in sorted(files)}
    return found


def index_bytes(index: Index) -> bytes:
    return json.dumps({name: of.as_json() for name, of in index.items()}, sort_keys=True).encode()


def read_index(content: bytes) -> Index:
    """Parse the JSON of an index.

    Raises:
        ValueError: it isn't an index.
    """
    try:
        return {name: FileHash.from_json(entry) for name, entry in json.loads(content).items()}
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"expected an index of files, got {type(error).__name__}") from error


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file in a folder; refuse a name from the storage that leads out of the folder."""
    if name.startswith("/") or ".." in Path(name).parts:
        raise StorageFailed(f"storage: expected a name below the folder, got {name!r}; remove it")
    return folder / name
