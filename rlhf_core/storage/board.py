"""What the ranks of a job tell its driver: short texts by name, and the output of rank 0. In a folder, or, without one that all see, in the
job's storage.
"""

from __future__ import annotations

import contextlib
import io
import queue
import shutil
import threading
from pathlib import Path
from typing import IO, Protocol

from rlhf_core.storage.node import job_storage
from rlhf_core.storage.work import JobStorage

OUTPUT = "rank-0.log"
FLUSH_SECONDS = 1.0


class Board(Protocol):
    def clear(self) -> None: ...

    def write(self, name: str, text: str) -> None: ...

    def read(self, name: str) -> str | None:
        """None: nothing was written."""
        ...

    def open_output(self) -> IO[str]:
        """A file whose text `new_output` returns elsewhere."""
        ...

    def new_output(self) -> str:
        """What came since the last call."""
        ...


def open_board(folder: Path) -> Board:
    work = job_storage()
    return _FolderBoard(folder) if work is None else _StorageBoard(work, folder)


class _FolderBoard:
    def __init__(self, folder: Path):
        self._folder, self._seen = folder, 0

    def clear(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir(parents=True)

    def write(self, name: str, text: str) -> None:
        (self._folder / name).write_text(text, encoding="utf-8")

    def read(self, name: str) -> str | None:
        path = self._folder / name
        return path.read_text(encoding="utf-8") if path.exists() else None

    def open_output(self) -> IO[str]:
        return (self._folder / OUTPUT).open("a", buffering=1, encoding="utf-8")

    def new_output(self) -> str:
        path = self._folder / OUTPUT
        if not path.exists():
            return ""
        with path.open(encoding="utf-8", errors="replace") as file:
            file.seek(self._seen)
            text = file.read()
            self._seen = file.tell()
        return text


class _StorageBoard:
    """An object can't be appended to: the output is a series of notes."""

    def __init__(self, work: JobStorage, folder: Path):
        self._work, self._name, self._seen = work, folder.name, 0

    def clear(self) -> None:
        self._work.remove_set(self._name)

    def write(self, name: str, text: str) -> None:
        self._work.put_note(f"{self._name}/{name}", text.encode())

    def read(self, name: str) -> str | None:
        content = self._work.note(f"{self._name}/{name}")
        return None if content is None else content.decode()

    def open_output(self) -> IO[str]:
        return _NoteOutput(self._work, f"{self._name}/{OUTPUT}")

    def new_output(self) -> str:
        found = []
        while (text := self.read(f"{OUTPUT}-{self._seen}")) is not None:
            found.append(text)
            self._seen += 1
        return "".join(found)


class _NoteOutput(io.TextIOBase):
    """Writes what it is given as the next note of a series, once a second."""

    def __init__(self, work: JobStorage, name: str):
        self._work, self._name, self._count = work, name, 0
        self._waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._waiting.put(text)
        return len(text)

    def close(self) -> None:
        if not self.closed:
            self._done.set()
            self._thread.join()
            super().close()

    def _run(self) -> None:
        text, ended = "", False
        while not ended:
            ended = self._done.wait(FLUSH_SECONDS)
            while not self._waiting.empty():
                text += self._waiting.get()
            if text:
                with contextlib.suppress(OSError):  # again with the next text
                    self._work.put_note(f"{self._name}-{self._count}", text.encode())
                    text, self._count = "", self._count + 1
