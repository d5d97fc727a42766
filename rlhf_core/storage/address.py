"""A storage address: a folder of files in an object store or a file system, named by its URL. Every call has a deadline.

pyarrow reads s3://, gs://, abfs:// and file://, fsspec the rest. Credentials come from their usual environment variables.
"""

from __future__ import annotations

import contextlib
import os
import platform
import queue
import secrets
import shutil
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rlhf_core.files import ASIDE, replacing

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem

BLOCK = 64 << 20  # bytes of a read from the storage
CHUNK = 4 << 20  # bytes of a write to it
THREADS = 8  # transfers at the same time
NOTE_SECONDS = 60.0  # for a small file, or a listing
CHECK_SECONDS = 20.0  # for the first file of all

NOT_AGAIN = (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, ValueError, ImportError)

Value = TypeVar("Value")


class StorageFailed(OSError):
    """The storage refused, failed or didn't answer in time. The message names the address and no credentials."""


class StorageLate(StorageFailed):
    """The storage didn't answer in time."""


class StorageRefused(StorageFailed, ValueError):
    """The storage can't be opened or written as it is configured: another try would fail too."""


class Storage:
    """Read, write and list files below an address, which are named by paths with slashes.

    Args:
        url: the address, such as s3://bucket/prefix or file:///mnt/shared.
        timeout: deadline of a transfer of files, in seconds.
    Raises:
        StorageRefused: no library reads such an address, or it is a folder that this machine doesn't have.
        StorageFailed: the storage refuses, or doesn't answer.
    """

    def __init__(self, url: str, *, timeout: float):
        self.url, self._timeout = url.partition("?")[0], timeout
        self.filesystem, self.folder = self._within(NOTE_SECONDS, lambda: _opened(url), "to open it")

    def check(self) -> None:
        """Write, read and remove a small file.

        Raises:
            StorageRefused: the storage denies it, has no such bucket, or returns other content.
            StorageFailed: it fails otherwise.
            StorageLate: no answer within CHECK_SECONDS.
        """
        name, content = f"check-{secrets.token_hex(4)}", b"written to check the storage"
        expected = f"cluster.storage: expected to write, read and remove a file in {self.url}, got"
        todo = "correct it, or name the variables of its credentials in flow.environment (docs/security.md)"

        def call() -> bytes | None:
            try:
                self._write(name, content)
                found = self._content(name)
                self.filesystem.delete_file(self._at(name))
                return found
            except Exception as error:  # a library of fsspec raises anything
                kind = StorageRefused if isinstance(error, NOT_AGAIN) else StorageFailed
                raise kind(f"{expected} {type(error).__name__}: {' '.join(str(error).split())}; {todo}") from error

        if (found := self._within(CHECK_SECONDS, call, "a file written, read and removed")) != content:
            raise StorageRefused(f"{expected} {found!r} back for {content!r}; {todo}")

    def put(self, files: Iterable[tuple[Path, str]]) -> None:
        """Write local files under the given paths. Each appears as a whole or not at all.

        Raises:
            StorageFailed: not all of them are written within the timeout.
        """
        self._all([lambda local=local, path=path: self._write(path, local) for local, path in files], "files written")

    def get(self, files: Iterable[tuple[str, int, Path]]) -> None:
        """Read files whose sizes in bytes are known into local files.

        Raises:
            StorageFailed: one is missing or has another size, or not all are read within the timeout.
        """
        calls = []
        for path, size, local in files:
            with local.open("wb") as file:
                file.truncate(size)
            calls += [
                lambda path=path, size=size, local=local, start=start: self._read(path, size, local, start)
                for start in range(0, max(size, 1), BLOCK)
            ]
        self._all(calls, "files read")

    def put_note(self, path: str, content: bytes) -> None:
        """Write a small file within NOTE_SECONDS."""
        self._within(NOTE_SECONDS, lambda: self._write(path, content), f"{path} written")

    def note(self, path: str) -> bytes | None:
        """Return the content of a small file, or None if there is no such file."""

        return self._within(NOTE_SECONDS, lambda: self._content(path), f"{path} read")

    def sizes(self, folder: str) -> dict[str, int]:
        """Return the size in bytes of every file below a folder by its path relative to the folder; "" is the whole storage."""
        from pyarrow.fs import FileSelector, FileType

        start = self._at(folder)

        def look() -> dict[str, int]:
            found = self.filesystem.get_file_info(FileSelector(start, allow_not_found=True, recursive=True))
            below = {os.path.relpath(info.path, start): info.size for info in found if info.type == FileType.File}
            return {path: size for path, size in below.items() if not path.endswith(ASIDE)}

        return self._within(NOTE_SECONDS, look, f"{folder} listed")

    def remove(self, paths: Iterable[str]) -> None:
        """Remove files; one that isn't there is no error."""

        def remove(path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem.delete_file(self._at(path))

        self._all([lambda path=path: remove(path) for path in paths], "files removed")

    def copy(self, paths: Iterable[tuple[str, str]]) -> None:
        """Copy files within the storage."""

        def copy(source: str, target: str) -> None:
            if self._is_local:
                Path(self._at(target)).parent.mkdir(parents=True, exist_ok=True)
            self.filesystem.copy_file(self._at(source), self._at(target))

        self._all([lambda source=source, target=target: copy(source, target) for source, target in paths], "files copied")

    def remove_folder(self, folder: str) -> None:
        """Remove a folder with everything in it; one that isn't there is no error."""

        from pyarrow.fs import FileType

        def remove() -> None:
            if self.filesystem.get_file_info(self._at(folder)).type == FileType.Directory:
                self.filesystem.delete_dir(self._at(folder))

        self._within(self._timeout, remove, f"{folder} removed")

    @property
    def _is_local(self) -> bool:
        from pyarrow.fs import LocalFileSystem

        return isinstance(self.filesystem, LocalFileSystem)

    def _at(self, path: str) -> str:
        return f"{self.folder}/{path}".removesuffix("/")

    def _write(self, path: str, source: Path | bytes) -> None:
        target = self._at(path)
        if self._is_local:
            _write_local(Path(target), source)
            return
        with self.filesystem.open_output_stream(target) as out:  # an object exists once it is closed
            if isinstance(source, bytes):
                out.write(source)
                return
            with source.open("rb") as file:
                while chunk := file.read(CHUNK):
                    out.write(chunk)

    def _content(self, path: str) -> bytes | None:
        try:
            with self.filesystem.open_input_stream(self._at(path)) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def _read(self, path: str, size: int, local: Path, start: int) -> None:
        """Copy one block of a file, which begins at byte `start`, into a local file of the same size."""
        with self.filesystem.open_input_file(self._at(path)) as source:
            if source.size() != size:
                raise OSError(f"{path}: expected {size} bytes, got {source.size()}")
            content = source.read_at(min(BLOCK, size - start), start)
        with local.open("r+b") as file:
            file.seek(start)
            file.write(content)

    def _all(self, calls: list[Callable[[], None]], what: str) -> None:
        """Run calls in threads and raise the first error without waiting for calls that hang. No call begins after an error or after the
        deadline.

        The threads are daemons, because a process waits at its end for the threads of a `ThreadPoolExecutor`.
        """
        left, ended = deque(calls), queue.SimpleQueue[BaseException | None]()

        def take() -> Callable[[], None] | None:
            with contextlib.suppress(IndexError):
                return left.popleft()
            return None

        def work() -> None:
            try:
                while (call := take()) is not None:
                    call()
            except BaseException as error:  # raised in the waiting thread
                left.clear()
                ended.put(error)
            else:
                ended.put(None)

        def run() -> None:
            count = min(THREADS, len(calls))
            for _ in range(count):
                threading.Thread(target=work, name="storage", daemon=True).start()
            for _ in range(count):
                if (error := ended.get()) is not None:
                    raise error

        if calls:
            try:
                self._within(self._timeout, run, f"{len(calls)} {what}")
            finally:
                left.clear()

    def _within(self, seconds: float, call: Callable[[], Value], what: str) -> Value:
        """Return the result of a call that runs in a daemon thread, so that a process can end although the storage doesn't answer."""
        answers: queue.SimpleQueue[tuple[Value | None, BaseException | None]] = queue.SimpleQueue()

        def run() -> None:
            try:
                answers.put((call(), None))
            except BaseException as error:  # raised in the waiting thread
                answers.put((None, error))

        threading.Thread(target=run, name="storage", daemon=True).start()
        try:
            answer, error = answers.get(timeout=seconds)
        except queue.Empty:
            todo = "raise cluster.storage_timeout or check it" if seconds == self._timeout else "check it"
            raise StorageLate(f"storage {self.url}: expected {what} within {seconds:.0f} s, got no answer; {todo}") from None
        if isinstance(error, OSError) and not isinstance(error, StorageFailed):
            raise StorageFailed(f"storage {self.url}: expected {what}, got {type(error).__name__}: {error}; check it") from error
        if error is not None:
            raise error
        return answer


def _opened(url: str) -> tuple[FileSystem, str]:
    import pyarrow
    from pyarrow.fs import FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

    subject = f"cluster.storage: expected an address that pyarrow or fsspec reads, got {url.partition('?')[0]}"
    try:
        filesystem, folder = FileSystem.from_uri(url)
    except pyarrow.ArrowInvalid:
        pass
    except OSError as error:
        raise StorageFailed(f"{subject}, which fails: {error}; correct it") from error
    else:
        if isinstance(filesystem, LocalFileSystem) and not Path(folder).is_dir():
            raise StorageRefused(
                f"cluster.storage: expected the folder {folder} on every node, got none on {platform.node()}; create it, or mount its disk"
            )
        return filesystem, folder.rstrip("/")
    import fsspec

    try:
        opened, folder = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise StorageRefused(f"{subject}, which fails: {error}; correct it, or install what reads it here and on every node") from error
    return PyFileSystem(FSSpecHandler(opened)), folder.rstrip("/")


def _write_local(target: Path, source: Path | bytes) -> None:
    """Write a file aside, sync it and rename it: in a file system a name can exist before the content does."""
    with replacing(target) as aside, aside.open("wb") as out:
        if isinstance(source, bytes):
            out.write(source)
        else:
            with source.open("rb") as file:
                shutil.copyfileobj(file, out, CHUNK)
        out.flush()
        os.fsync(out.fileno())
