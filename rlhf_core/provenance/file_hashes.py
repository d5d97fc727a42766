"""Hashes of a run's input files, cached by size, times and inode, so that an unchanged file is read once for all stages and runs.

The hash of a file that was written within the last two seconds isn't cached, since a second change may leave its times unchanged.

Anyone who can write to the project can change the cache. It may decide what runs again. It must never decide which model is trusted:
the registry, the gate's check for rolled back models and the pins of rounds read the files (`dvc_md5`, dvc_cache.py).
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rlhf_core.data.places import main_checkout
from rlhf_core.files import replace_text

RACY_NS = 2 * 10**9  # coarsest timestamp resolution of common file systems
TRIES = 3  # of hashing a file that changes during reading
THREADS = 4  # hashing releases the GIL
LARGE = 2**31  # bytes; some seconds
Item, Result = TypeVar("Item"), TypeVar("Result")
SMALL = 2**20  # bytes; a smaller input of a stage is hashed as fast as it is looked up
LISTS = 64  # newest folder listings, used in messages only
_NOT_DATA = (".git", "__pycache__")
_FETCH_NOTES = os.path.join(".cache", "huggingface")  # where the hub's client records its downloads

Entry = dict[str, Any]  # looks: size, times and inode; and hashes by algorithm

log = logging.getLogger("rlhf.inputs")


@dataclass(frozen=True)
class FileHash:
    """Size in bytes and sha256 of a file or folder."""

    size: int
    sha256: str


class FileHashes:
    """Hashes with a cache in .dvc/tmp of the main checkout, shared by all runs; without .dvc nothing is cached."""

    def __init__(self, workspace: Path):
        main = main_checkout(workspace)
        self._folder = (main if main is not None and (main / ".dvc").is_dir() else workspace) / ".dvc" / "tmp"
        self._memory = self._folder / "input_hashes.json"
        self._known = self._read()
        self._new: dict[str, Entry] = {}

    def of(self, path: Path) -> FileHash:
        """Return the hash of a file or folder. Raises the errors of `of_file`."""
        return of_listing(self.of_folder(path)) if path.is_dir() else self.of_file(path)

    def of_file(self, path: Path) -> FileHash:
        """Return the hash of a file.

        Raises:
        OSError: the file can't be read.
        ValueError: the file changes during reading.
        """
        return FileHash(*self._hash(path, "sha256"))

    def md5s(self, paths: Collection[Path]) -> list[str]:
        """Return the md5 of each file that is a stage's input. Raises the errors of `of_file`."""
        large = {path for path in paths if path.stat().st_size >= SMALL}
        found = dict(zip(large, _in_threads(lambda path: self._hash(path, "md5")[1], large), strict=True))
        return [found[path] if path in large else _md5(path) for path in paths]

    def _hash(self, path: Path, algorithm: str) -> tuple[int, str]:
        """Size and hash of a file."""
        key, looks = str(path.resolve()), _looks(path)
        known = self._new.get(key) or self._known.get(key, {})
        if known.get("looks") == looks and algorithm in known:
            return looks[0], known[algorithm]
        if looks[0] > LARGE:
            log.info("%s: reading %.1f GB to compute the hash, which is then cached", path, looks[0] / 1e9)
        for _ in range(TRIES):
            now, looks = time.time_ns(), _looks(path)
            with path.open("rb") as file:
                found = hashlib.file_digest(file, algorithm).hexdigest()
            if _looks(path) == looks:
                if max(looks[1:3]) < now - RACY_NS:
                    self._new[key] = _merged(known, {"looks": looks, algorithm: found})
                return looks[0], found
        raise ValueError(f"{path}: expected a file that doesn't change during reading, got one that does; wait until it is written")

    def of_folder(self, folder: Path) -> dict[str, FileHash]:
        """Return the hash of each file in a folder by its relative path, sorted."""
        names = sorted(path.relative_to(folder).as_posix() for path in files_below(folder))
        return dict(zip(names, _in_threads(lambda name: self.of_file(folder / name), names), strict=True))

    def keep(self) -> None:
        """Save new hashes for later runs. If two runs save at once, some hashes may be lost and are computed again."""
        if self._new and self._folder.parent.is_dir():
            kept = self._read()
            kept |= {key: _merged(kept.get(key, {}), entry) for key, entry in self._new.items()}
            replace_text(self._memory, json.dumps({key: entry for key, entry in kept.items() if os.path.exists(key)}))

    def keep_list(self, sha256: str, listing: dict[str, FileHash]) -> None:
        """Save the list of files behind a folder's hash, so that a message can name what changed."""
        path = self._list(sha256)
        if self._folder.parent.is_dir() and not path.exists():
            replace_text(path, json.dumps({name: [found.size, found.sha256] for name, found in listing.items()}))
            for old in sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)[:-LISTS]:
                old.unlink(missing_ok=True)

    def list_of(self, sha256: str) -> dict[str, FileHash] | None:
        """Return the files saved by `keep_list`; None if they are no longer saved."""
        with suppress(OSError, ValueError):
            return {name: FileHash(*found) for name, found in json.loads(self._list(sha256).read_text(encoding="utf-8")).items()}
        return None

    def _list(self, sha256: str) -> Path:
        return self._folder / "input_lists" / f"{sha256}.json"

    def _read(self) -> dict[str, Entry]:
        with suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._memory.read_text(encoding="utf-8"))
            return {key: entry for key, entry in found.items() if isinstance(entry, dict)}
        return {}


def folder_sha256(files: Mapping[str, str]) -> str:
    """Return the sha256 of a folder: the sha256 of `sha256sum`'s output for its files, sorted by the bytes of their names.

    Args:
        files: the sha256 of each file, by its name with slashes.
    """
    lines = (f"{files[name]}  {name}\n" for name in sorted(files, key=os.fsencode))
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def of_listing(listing: Mapping[str, FileHash]) -> FileHash:
    """Return the hash of a folder, computed from those of its files."""
    sha256 = folder_sha256({name: found.sha256 for name, found in listing.items()})
    return FileHash(sum(found.size for found in listing.values()), sha256)


def files_below(folder: Path) -> Iterator[Path]:
    """Return the files among `entries_below`."""
    return (path for path in entries_below(folder) if path.is_file())


def entries_below(folder: Path) -> Iterator[Path]:
    """Entries of a folder that may be data, including pipes and broken links; excludes files of git, Python and the hub's client.

    Linked folders aren't entered. Excluded entries are neither hashed nor read.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in _NOT_DATA and not os.path.join(place, f).endswith(os.sep + _FETCH_NOTES)]
        yield from (Path(place, name) for name in names)


def _looks(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _merged(known: Entry, found: Entry) -> Entry:
    """Return the known hashes of a file, with new ones added if the file looks as when the known ones were computed."""
    return known | found if known.get("looks") == found["looks"] else found


def dvc_md5(path: Path) -> str:
    """Return the md5 of a file, or of the listing of a folder, as in dvc.lock. Every file is read."""
    return _md5(path) if path.is_file() else dvc_folder_md5(dvc_md5_of_files(path))


def dvc_md5_of_files(folder: Path) -> dict[str, str]:
    """Return the md5 of each file in a folder, by its name with slashes."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return dict(zip((path.relative_to(folder).as_posix() for path in files), _in_threads(_md5, files), strict=True))


def _in_threads(function: Callable[[Item], Result], items: Collection[Item]) -> list[Result]:
    """Return the function applied to each item, in threads; in this thread alone while the interpreter ends and allows no new ones."""
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            return list(pool.map(function, items))
    except RuntimeError:
        return list(map(function, items))


def dvc_folder_md5(files: Mapping[str, str]) -> str:
    """Return the md5 of a folder as in dvc.lock.

    Args:
        files: the md5 of each file, by its name with slashes.
    """
    listing = [{"md5": files[name], "relpath": name} for name in sorted(files, key=lambda name: name.split("/"))]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
