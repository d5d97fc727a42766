"""Checkpoints that are whole or not there: written aside, fsynced, renamed, with a manifest of sizes and hashes."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

log = logging.getLogger("rlhf")

MANIFEST = "manifest.json"


class CheckpointStore:
    """The step checkpoints of one piece of work, `<folder>/step-<n>`, newest kept.

    Args:
        folder: made if it isn't there; left-overs of an interrupted save are removed.
        keep_last: how many complete checkpoints stay; at least 2, so that a torn newest one has a predecessor.
    """

    def __init__(self, folder: Path, *, keep_last: int = 2):
        self.folder = folder
        self.keep_last = max(2, keep_last)
        folder.mkdir(parents=True, exist_ok=True)
        for left_over in folder.glob("writing-*"):
            shutil.rmtree(left_over)

    def save(self, step: int, write: Callable[[Path], None]) -> Path:
        """Call `write(folder)` on an empty folder, then publish it as the checkpoint of `step`.

        A failure of `write` (a full disk, say) leaves every earlier checkpoint as it was.
        """
        aside = self.folder / f"writing-{step}"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        write(aside)
        files = {str(p.relative_to(aside)): _describe(p) for p in sorted(aside.rglob("*")) if p.is_file()}
        manifest = aside / MANIFEST
        manifest.write_text(json.dumps({"step": step, "files": files}, indent=1, sort_keys=True))
        _fsync(manifest)
        final = self.folder / f"step-{step}"
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _fsync(self.folder)
        # Later ones are damaged ones that `latest` passed over: they must not take the place of whole ones.
        later = [s for s in self._steps() if s > step]
        for superseded in later + self._steps()[len(later) + self.keep_last :]:
            shutil.rmtree(self.folder / f"step-{superseded}")
        return final

    def latest(self) -> tuple[int, Path] | None:
        """The newest checkpoint whose files are all as its manifest says; a damaged one is named in the log and passed over."""
        for step in self._steps():
            folder = self.folder / f"step-{step}"
            problem = damage(folder)
            if problem is None:
                return step, folder
            log.warning("checkpoint of step %d: %s; going back to the one before", step, problem)
        return None

    def _steps(self) -> list[int]:
        return sorted((int(p.name.removeprefix("step-")) for p in self.folder.glob("step-*")), reverse=True)


def damage(folder: Path) -> str | None:
    """What is wrong with a checkpoint folder, or None."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"expected a readable {MANIFEST}, got {type(error).__name__}"
    for name, described in files.items():
        path = folder / name
        if not path.is_file():
            return f"expected the file {name}, got none"
        if _describe(path, sync=False) != described:
            return f"expected {name} as it was written, got other content"
    return None


def _describe(path: Path, sync: bool = True) -> dict[str, str | int]:
    if sync:
        _fsync(path)
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
