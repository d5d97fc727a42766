"""Hashes of files that the project doesn't own, each computed once: a file that looks as it did keeps the hash that it had.

Size, times and inode say whether it looks so. A file that was written within the last two seconds is hashed again the next time: a
second change may leave its times as they are.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.data.places import main_checkout

RACY_NS = 2 * 10**9  # the coarsest times of a file system in use
TRIES = 3  # of hashing a file that changes meanwhile
THREADS = 4  # hashing leaves Python's lock alone
LARGE = 2**31  # bytes; some seconds
LISTS = 64  # of folders, the newest; they are for messages only
_NOT_DATA = (".git", "__pycache__")
_FETCH_NOTES = os.path.join(".cache", "huggingface")  # where the hub's client notes when it fetched a file

log = logging.getLogger("rlhf.inputs")


@dataclass(frozen=True)
class FileHash:
    """size: bytes. sha256: of the content."""

    size: int
    sha256: str


class FileHashes:
    """Hashes, with what .dvc/tmp of the main checkout remembers of them, for all runs; without .dvc nothing is remembered."""

    def __init__(self, workspace: Path):
        main = main_checkout(workspace)
        self._folder = (main if main is not None and (main / ".dvc").is_dir() else workspace) / ".dvc" / "tmp"
        self._memory = self._folder / "input_hashes.json"
        self._known = self._read()
        self._new: dict[str, list] = {}

    def of(self, path: Path) -> FileHash:
        """Of a file or folder. Raises what `of_file` does."""
        return of_listing(self.of_folder(path)) if path.is_dir() else self.of_file(path)

    def of_file(self, path: Path) -> FileHash:
        """Raises:
        OSError: it can't be read.
        ValueError: it is being written.
        """
        key, looks = str(path.resolve()), _looks(path)
        found = self._new.get(key) or self._known.get(key)
        if found is not None and found[:-1] == looks:
            return FileHash(looks[0], found[-1])
        if looks[0] > LARGE:
            log.info("%s: %.1f GB are read for their hash, once", path, looks[0] / 1e9)
        for _ in range(TRIES):
            now, looks = time.time_ns(), _looks(path)
            with path.open("rb") as file:
                sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            if _looks(path) == looks:
                if max(looks[1:3]) < now - RACY_NS:
                    self._new[key] = [*looks, sha256]
                return FileHash(looks[0], sha256)
        raise ValueError(f"{path}: expected a file that stays as it is while it is read, got one that changes; wait until it is written")

    def of_folder(self, folder: Path) -> dict[str, FileHash]:
        """Of each file below it, by its path in it, sorted."""
        names = sorted(path.relative_to(folder).as_posix() for path in files_below(folder))
        with ThreadPoolExecutor(THREADS) as pool:
            return dict(zip(names, pool.map(lambda name: self.of_file(folder / name), names), strict=True))

    def keep(self) -> None:
        """Write down what is new, for the next time. A run beside this one that does the same costs at most some hashes."""
        if self._new and self._folder.parent.is_dir():
            _write(self._memory, {key: entry for key, entry in (self._read() | self._new).items() if os.path.exists(key)})

    def keep_list(self, sha256: str, listing: dict[str, FileHash]) -> None:
        """What a folder's hash stands for, for a message when it is another one."""
        path = self._list(sha256)
        if self._folder.parent.is_dir() and not path.exists():
            _write(path, {name: [found.size, found.sha256] for name, found in listing.items()})
            for old in sorted(path.parent.iterdir(), key=lambda p: p.stat().st_mtime)[:-LISTS]:
                old.unlink(missing_ok=True)

    def list_of(self, sha256: str) -> dict[str, FileHash] | None:
        """What `keep_list` has written; None: nothing any more."""
        with suppress(OSError, ValueError):
            return {name: FileHash(*found) for name, found in json.loads(self._list(sha256).read_text(encoding="utf-8")).items()}
        return None

    def _list(self, sha256: str) -> Path:
        return self._folder / "input_lists" / f"{sha256}.json"

    def _read(self) -> dict[str, list]:
        with suppress(OSError, ValueError):
            found = json.loads(self._memory.read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}


def folder_sha256(files: Mapping[str, str]) -> str:
    """One sha256 of a folder: of what `sha256sum` prints for its files, in the order of their names' bytes.

    Args:
        files: the sha256 of each file, by its name with slashes.
    """
    lines = (f"{files[name]}  {name}\n" for name in sorted(files, key=os.fsencode))
    return hashlib.sha256(os.fsencode("".join(lines))).hexdigest()


def of_listing(listing: Mapping[str, FileHash]) -> FileHash:
    """Of a folder, by those of its files."""
    sha256 = folder_sha256({name: found.sha256 for name, found in listing.items()})
    return FileHash(sum(found.size for found in listing.values()), sha256)


def files_below(folder: Path) -> Iterator[Path]:
    """The files of `entries_below`."""
    return (path for path in entries_below(folder) if path.is_file())


def entries_below(folder: Path) -> Iterator[Path]:
    """What can be data in a folder, be it a pipe or a link to nothing: not what git, Python or the hub's client keeps there.

    Linked folders are not entered. What isn't here is neither hashed nor read.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = [f for f in folders if f not in _NOT_DATA and not os.path.join(place, f).endswith(os.sep + _FETCH_NOTES)]
        yield from (Path(place, name) for name in names)


def _looks(path: Path) -> list[int]:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _write(path: Path, content: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    aside.write_text(json.dumps(content), encoding="utf-8")
    aside.replace(path)


def dvc_md5(path: Path) -> str:
    """The md5 of a file, or of the list of a folder's files, as dvc.lock has it."""
    if path.is_file():
        return _md5(path)
    files = sorted(p.relative_to(path).parts for p in path.rglob("*") if p.is_file())
    listing = [{"md5": _md5(path.joinpath(*parts)), "relpath": "/".join(parts)} for parts in files]
    return hashlib.md5(json.dumps(listing, sort_keys=True).encode()).hexdigest() + ".dir"


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()
