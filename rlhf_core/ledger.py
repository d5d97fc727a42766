"""Ledgers: files of JSON lines that all worktrees of a repository share. Lines are only ever appended."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Generic, TypeVar

from pydantic import ValidationError

from rlhf_core.config import ConfigError, Section, shown
from rlhf_core.files import lock_file
from rlhf_core.process import without_git_places

LOCK_DEADLINE = 60.0  # seconds
Line = TypeVar("Line", bound=Section)


@dataclass(frozen=True)
class Ledger(Generic[Line]):
    """name: of the file. writer: who writes it, for messages. form: of a line."""

    name: str
    writer: str
    form: type[Line]

    def path(self, root: Path) -> Path:
        """Return the file in git's common folder, which all worktrees share; without git, in `root`.

        Raises:
            ConfigError: git fails.
        """
        done = git(root, "rev-parse", "--path-format=absolute", "--git-common-dir")
        if done is None:
            return root / self.name
        if done.returncode == 0:
            return Path(done.stdout.strip()) / self.name
        if "not a git repository" in done.stderr:
            return root / self.name
        got = " ".join(done.stderr.split())
        raise ConfigError(f"{self.name}: expected git to name the repository's common folder, got: {got}; repair the repository first")

    @contextlib.contextmanager
    def opened(self, root: Path) -> Iterator[IO[bytes]]:
        """The file, exclusively locked.

        Raises:
            ConfigError: it can't be written, or stays locked.
        """
        path = self.path(root)
        try:
            file = path.open("a+b")
        except OSError as error:
            raise ConfigError(
                f"{path}: expected {self.writer} to be able to write there, got: {error.strerror}; change its rights"
            ) from error
        with file:
            try:
                lock_file(file, LOCK_DEADLINE)
            except TimeoutError as error:
                raise ConfigError(f"{path}: {error}; wait for it") from error
            yield file

    def read(self, file: IO[bytes]) -> list[Line]:
        """Return all lines of the opened file.

        Raises:
            ConfigError: a line has another form.
        """
        file.seek(0)
        found = []
        for number, text in enumerate(file.read().splitlines(), start=1):
            try:
                found.append(self.form.model_validate_json(text))
            except ValidationError as error:
                got = shown(text.decode(errors="replace"))
                raise ConfigError(
                    f"{file.name}, line {number}: expected one that {self.writer} wrote, got {got!r}; correct or remove that line"
                ) from error
        return found

    def append(self, file: IO[bytes], *lines: Line) -> None:
        """Append lines to the opened file durably, or nothing.

        Raises:
            ConfigError: the disk is full or fails.
        """
        end = file.seek(0, os.SEEK_END)
        try:
            file.write(b"".join(line.model_dump_json(exclude_none=True).encode() + b"\n" for line in lines))
            file.flush()
            os.fsync(file.fileno())
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(file.fileno(), end)
            raise ConfigError(f"{file.name}: expected {self.writer} to write there, got: {error.strerror}; make room") from error


def git(root: Path, *arguments: str) -> subprocess.CompletedProcess[str] | None:
    """Return the finished command. None: git is not installed."""
    environment = without_git_places() | {"LC_ALL": "C"}
    try:
        options = {"encoding": sys.getfilesystemencoding(), "errors": "surrogateescape"}  # a path has any bytes, as for os.fsdecode
        return subprocess.run(["git", *arguments], cwd=root, env=environment, capture_output=True, check=False, **options)
    except FileNotFoundError:
        return None


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
