"""The part of each rank in a checkpoint: a rank hashes the files that it has written and syncs them to disk while training continues.

Ranks may be on other machines than the process that publishes the checkpoint. They leave their results as files in the checkpoint's folder,
and `gather` removes these. Ranks that share no disk write both results and files to the folder's counterpart in the job's storage.
"""

from __future__ import annotations

import errno
import json
import logging
import re
import threading
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import fsync
from rlhf_core.checkpoint.saved_state import SavedFile, SavedFiles
from rlhf_core.checkpoint.stored import StoredCheckpoint, remove_old_copies
from rlhf_core.files import ASIDE, replace_text
from rlhf_core.storage.hashing import rank_of

POLL_SECONDS = 0.02
STORAGE_POLL_SECONDS = 0.5
_PART = re.compile(rf"part-\d+\.json(\.\w+\{ASIDE})?")

log = logging.getLogger("rlhf")


class PartsOverdue(OSError):
    """Ranks haven't delivered their parts by the deadline; the message names them."""


class PartLost(OSError):
    """A rank was lost without delivering its part; the message names it."""


def save_part(folder: Path, rank: int, names: Iterable[str], *, part: int | None = None) -> threading.Thread:
    """Hash and sync this rank's files in a thread, and return the thread, which must end before the process does.

    Args:
        folder: folder of the checkpoint that is being written.
        part: the number by which `gather` knows this part; None: the rank.
        names: files, and folders, whose files with this rank in their names are taken (rank 0 takes those without a rank). Missing ones are
            skipped.
    """
    found = [path for name in names for path in _files(folder / name, rank)]
    own, number = [path.relative_to(folder).as_posix() for path in found], rank if part is None else part
    if StoredCheckpoint.of(folder) is not None:
        remove_old_copies(folder)
    _write(folder, number, {"names": own})
    thread = threading.Thread(target=_save_part, args=(folder, number, own), name=f"checkpoint part {number}")
    thread.start()
    return thread


def _save_part(folder: Path, rank: int, names: list[str]) -> None:
    try:
        saved = describe(folder, names)
        if (stored := StoredCheckpoint.of(folder)) is not None:
            stored.upload(folder, {name: found.hash for name, found in saved.items()})
        content: dict[str, Any] = {"saved": {name: found.as_json() for name, found in saved.items()}}
    except (OSError, ValueError) as error:
        content = {"error": str(error), "errno": getattr(error, "errno", None)}
    try:
        _write(folder, rank, {"names": names} | content)
    except OSError as error:
        log.error("checkpoint part of rank %d: %s", rank, error)  # the save was abandoned, or its deadline will pass


def describe(folder: Path, names: Collection[str]) -> dict[str, SavedFile]:
    """Sync files of a checkpoint to disk, and return their hashes and items.

    Raises:
        OSError: a file can't be read or synced.
    """
    saved = SavedFiles(folder, sorted(names))
    for name in names:  # while threads hash
        fsync(folder / name)
    return saved.result()


def gather(folder: Path, ranks: Collection[int], *, deadline: float, lost: Collection[int] = ()) -> dict[str, SavedFile]:
    """Return the hashes and items of all files of a checkpoint. Files that no rank has announced are hashed here.

    Args:
        ranks: ranks that have written their files and called `save_part`.
        deadline: time of `time.monotonic` at which to give up.
        lost: ranks that died or hang, which aren't waited for; the collection may grow meanwhile.
    Raises:
        PartsOverdue: a rank is late.
        PartLost: a lost rank hasn't delivered its part.
        OSError: a file can't be read or synced.
    """
    announced = _wait(folder, ranks, "names", deadline=deadline, lost=lost)
    claimed = {name for part in announced.values() for name in part["names"]}
    rest = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not _PART.fullmatch(path.name)}
    saved = describe(folder, rest - claimed)
    for part in _wait(folder, ranks, "saved", deadline=deadline, lost=lost).values():
        saved |= {name: SavedFile.from_json(entry) for name, entry in part["saved"].items()}
    if StoredCheckpoint.of(folder) is None:  # publishing removes those in a storage
        for rank in ranks:
            _place(folder, rank).unlink()
    return saved


def _wait(folder: Path, ranks: Collection[int], key: str, *, deadline: float, lost: Collection[int]) -> dict[int, dict[str, Any]]:
    """Wait until each rank's part has this key, and return the parts."""
    found: dict[int, dict[str, Any]] = {}
    while missing := [rank for rank in ranks if rank not in found]:
        ended = set(lost)  # before the parts are read: the last one may have come just before the end
        for rank in missing:
            part = _read(folder, rank)
            if "error" in part:
                raise OSError(part["errno"] or errno.EIO, f"rank {rank}: {part['error']}")
            if key in part:
                found[rank] = part
        if len(found) < len(ranks):
            if without := sorted((ended - found.keys()) & set(ranks)):
                raise PartLost(f"rank {without[0]}: lost before its files were hashed")
            if time.monotonic() > deadline:
                raise PartsOverdue(f"rank {', '.join(str(rank) for rank in ranks if rank not in found)}: no hashes of its files")
            time.sleep(POLL_SECONDS if StoredCheckpoint.of(folder) is None else STORAGE_POLL_SECONDS)
    return found


def _files(path: Path, rank: int) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.rglob("*") if p.is_file() and (rank_of(p.name) or 0) == rank)
    return [path] if path.exists() else []


def _place(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank}.json"


def _read(folder: Path, rank: int) -> dict[str, Any]:
    if (stored := StoredCheckpoint.of(folder)) is not None:
        return json.loads(stored.note(_place(folder, rank).name) or b"{}")
    try:
        return json.loads(_place(folder, rank).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}


def _write(folder: Path, rank: int, content: dict[str, Any]) -> None:
    """Write a rank's part atomically, since `gather` may be reading."""
    path = _place(folder, rank)
    if (stored := StoredCheckpoint.of(folder)) is not None:
        return stored.put_note(path.name, json.dumps(content).encode())
    replace_text(path, json.dumps(content))
