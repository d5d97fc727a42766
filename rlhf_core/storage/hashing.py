"""Hashes of files, computed in threads: every byte is read once and hashed once.

A file may be cut into pieces, such as the tensors in it. The hash of a piece is its sha256; of a piece longer than BLOCK it is the sha256
of the sha256s of its blocks. The hash of a file that is cut is the sha256 of the hashes of its pieces.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

BLOCK = 64 << 20  # bytes; part of the definition of a hash
BATCH = 32 << 20  # bytes that a thread takes at a time
CHUNK = 1 << 20  # bytes of a read
THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)

Span = tuple[int, int]  # first byte, and the byte after the last


@dataclass(frozen=True)
class FileHash:
    """Size and hash of a file.

    ends: byte after the last of each piece; None: the file isn't cut, and the hash is its plain sha256.
    """

    bytes: int
    sha256: str
    ends: tuple[int, ...] | None = None

    def as_json(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "sha256": self.sha256} | ({} if self.ends is None else {"ends": " ".join(map(str, self.ends))})

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> FileHash:
        ends = entry.get("ends")
        return cls(entry["bytes"], entry["sha256"], None if ends is None else tuple(map(int, ends.split())))


class HashedFile:
    """A file to be hashed by `Hashing`.

    Args:
        pieces: spans of bytes whose hashes are wanted too. They may overlap; the bytes between them become pieces as well.
    """

    def __init__(self, path: Path, pieces: Collection[Span] = ()):
        self.path, self.size = path, path.stat().st_size
        wanted = sorted({(start, end) for start, end in pieces if start < end}, key=lambda span: (span[0], -span[1]))
        self._cover, self._extra = _cover(wanted, self.size)
        self._is_cut = len(self._cover) > 1 or self.size > BLOCK

    @classmethod
    def as_recorded(cls, path: Path, recorded: FileHash) -> HashedFile:
        """Return the file, cut into the pieces of a recorded hash."""
        made = cls(path)
        made._is_cut, ends = recorded.ends is not None, recorded.ends or (made.size,)
        made._cover = list(zip((0, *ends[:-1]), ends, strict=True))
        return made

    def blocks(self) -> list[Span]:
        """Return the spans to be hashed, in the order in which `hashes` takes their digests."""
        return [block for span in (*self._cover, *self._extra) for block in self._blocks(span)]

    def hashes(self, digests: Iterable[bytes]) -> tuple[FileHash, dict[Span, bytes]]:
        """Return the hash of the file, and the hash of each piece by its span.

        Args:
            digests: sha256 of each span of `blocks`.
        """
        remaining, of_piece = iter(digests), {}
        for span in (*self._cover, *self._extra):
            parts = [next(remaining) for _ in self._blocks(span)]
            of_piece[span] = parts[0] if len(parts) == 1 else hashlib.sha256(b"".join(parts)).digest()
        if not self._is_cut:
            return FileHash(self.size, of_piece[self._cover[0]].hex()), of_piece
        whole = hashlib.sha256(b"".join(of_piece[span] for span in self._cover)).hexdigest()
        return FileHash(self.size, whole, tuple(end for _, end in self._cover)), of_piece

    def _blocks(self, span: Span) -> list[Span]:
        start, end = span
        if not self._is_cut or end - start <= BLOCK:
            return [span]
        return [(first, min(first + BLOCK, end)) for first in range(start, end, BLOCK)]


class Hashing:
    """Hashes files in threads, which start when the object is made.

    The threads are daemons: a process can end although a file system doesn't answer.
    """

    def __init__(self, files: Iterable[HashedFile]):
        self._files = list(files)
        self._batches: list[list[Future[list[bytes]]]] = []
        waiting: SimpleQueue[tuple[Future[list[bytes]], Path, list[Span]]] = SimpleQueue()
        for file in self._files:
            made = [(Future(), file.path, batch) for batch in _batches(file.blocks())]
            self._batches.append([future for future, _, _ in made])
            for entry in made:
                waiting.put(entry)
        for _ in range(min(THREADS, waiting.qsize())):
            threading.Thread(target=_work, args=(waiting,), name="hashing", daemon=True).start()

    def results(self) -> Iterator[tuple[FileHash, dict[Span, bytes]] | OSError]:
        """Yield for each file its hash and the hashes of its pieces, or the error that kept it from being read."""
        for file, futures in zip(self._files, self._batches, strict=True):
            try:
                yield file.hashes(digest for future in futures for digest in future.result())
            except OSError as error:
                yield error


def rank_of(name: str) -> int | None:
    """Return the rank that writes a file of this name; None if the name has no rank."""
    found = re.search(r"zero_pp_rank_(\d+)_|-(\d+)\.\w+$", name)
    return None if found is None else int(found[1] or found[2])


def _work(waiting: SimpleQueue[tuple[Future[list[bytes]], Path, list[Span]]]) -> None:
    buffer = memoryview(bytearray(CHUNK))
    while True:
        try:
            future, path, blocks = waiting.get_nowait()
        except Empty:
            return
        try:
            future.set_result(_hash(path, blocks, buffer))
        except BaseException as error:  # raised again in the thread that waits for the result
            future.set_exception(error)


def _hash(path: Path, blocks: list[Span], buffer: memoryview) -> list[bytes]:
    """Return the sha256 of each block. The file is read and not mapped, so that a disk error is an OSError and not a signal."""
    digests = []
    with path.open("rb", buffering=0) as file:
        for start, end in blocks:
            file.seek(start)
            digest = hashlib.sha256()
            while start < end:
                count = file.readinto(buffer[: min(CHUNK, end - start)])
                if not count:
                    raise OSError(f"{path}: expected {end} bytes, got {start}")
                digest.update(buffer[:count])
                start += count
            digests.append(digest.digest())
    return digests


def _cover(wanted: list[Span], size: int) -> tuple[list[Span], list[Span]]:
    """Return adjacent pieces that cover a file, and the wanted pieces that aren't among them because they overlap others."""
    cover, extra, position = [], [], 0
    for start, end in wanted:
        if start < position:
            extra.append((start, end))
            continue
        cover += [(position, start)] * (position < start) + [(start, end)]
        position = end
    if position < size or not cover:
        cover.append((position, size))
    return cover, extra


def _batches(blocks: list[Span]) -> Iterator[list[Span]]:
    batch, size = [], 0
    for start, end in blocks:
        batch.append((start, end))
        size += end - start
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
