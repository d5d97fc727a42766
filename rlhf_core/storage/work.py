"""The part of a storage that belongs to the work of one stage: notes, which are small files, and sets of files with an index."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_core.files import ASIDE
from rlhf_core.storage.address import Storage, StorageFailed
from rlhf_core.storage.files import below, download, hash_files, index_bytes, intact, read_index, upload

INDEX = "index.json"
# Notes, each of which is also a file in the work's folder.
PULSE = "pulse"  # the driver's heartbeat
BEAT_SECONDS = 2.0  # between two of its changes
REFUSAL = "refusal.txt"  # why the driver refused the job
REFUSED = 65  # EX_DATAERR of sysexits.h: exit code of a driver that can't do the job as described; a rerun would fail again
OUTPUTS = "outputs"  # the set of what a job leaves: curves, figures, timings, and in training the model


@dataclass(frozen=True)
class JobStorage:
    """The files of one job in a storage. Names of local files are relative to `root`, which is another folder on each node.

    prefix: path of the work's files in the storage.
    outputs: folders whose files, without those in their subfolders, this process pushes as OUTPUTS with each checkpoint and at its end.
    """

    storage: Storage
    prefix: str
    root: Path
    outputs: list[Path] = field(default_factory=list)

    def put_note(self, name: str, content: bytes) -> None:
        self.storage.put_note(f"{self.prefix}/{name}", content)

    def note(self, name: str) -> bytes | None:
        return self.storage.note(f"{self.prefix}/{name}")

    def remove_notes(self, *names: str) -> None:
        self.storage.remove(f"{self.prefix}/{name}" for name in names)

    def push(self, name: str, paths: Iterable[Path]) -> None:
        """Write files and folders below `root` as the set of this name. The index is written last, which replaces an earlier set of the
        name.

        Raises:
            OSError: a file can't be read or written.
        """
        files = below((self.root / path for path in paths), self.root)
        index, prefix = hash_files(files), f"{self.prefix}/{name}"
        upload(self.storage, prefix, files, index)
        self.storage.put_note(f"{prefix}/{INDEX}", index_bytes(index))
        kept = {of.sha256 for of in index.values()} | {INDEX}
        self.storage.remove(f"{prefix}/{found}" for found in self.storage.sizes(prefix) if found not in kept)

    def push_outputs(self, *folders: Path) -> None:
        """Push the files of `outputs` as the set OUTPUTS; without `outputs` do nothing.

        Args:
            folders: further folders, pushed with all their subfolders.
        """
        if self.outputs:
            files = [path for folder in self.outputs for path in sorted((self.root / folder).glob("*")) if _is_output(path)]
            self.push(OUTPUTS, [*files, *folders])

    def pull(self, name: str) -> bool:
        """Download a set's files to their places below `root` and verify them. Return whether the set exists.

        Raises:
            StorageFailed: a file is missing or damaged.
        """
        prefix = f"{self.prefix}/{name}"
        if (content := self.storage.note(f"{prefix}/{INDEX}")) is None:
            return False
        try:
            index = read_index(content)
        except ValueError as error:
            raise StorageFailed(f"storage {self.storage.url}: {prefix}/{INDEX}: {error}; remove {prefix}") from error
        there = intact(self.root, index)
        download(self.storage, prefix, {file: of for file, of in index.items() if file not in there}, self.root)
        return True

    def remove_set(self, name: str) -> None:
        self.storage.remove_folder(f"{self.prefix}/{name}")

    def prefix_of(self, folder: Path) -> str:
        """Return the storage path of a folder below `root`."""
        path = folder.absolute().relative_to(self.root.absolute()).as_posix()
        return f"{self.prefix}/{path}"


def _is_output(path: Path) -> bool:
    """Return whether the job made a file: inputs are links, and notes don't count."""
    return path.is_file() and path.stat().st_nlink == 1 and path.name not in (PULSE, REFUSAL) and path.suffix != ASIDE


@dataclass
class RemoteNote:
    """A note with the methods of a file's path. The storage is read at most every `seconds`; in between, and while it fails, the last
    content stands.
    """

    work: JobStorage
    name: str
    seconds: float = 2.0
    _content: bytes | None = None
    _due: float = 0.0

    def exists(self) -> bool:
        try:
            self.read_bytes()
        except FileNotFoundError:
            return False
        return True

    def read_bytes(self) -> bytes:
        """Return the note's content.

        Raises:
            FileNotFoundError: there is none.
        """
        if time.monotonic() >= self._due:
            with contextlib.suppress(StorageFailed):
                self._content = self.work.note(self.name)
            self._due = time.monotonic() + self.seconds
        if self._content is None:
            raise FileNotFoundError(self.name)
        return self._content
