"""Compares files with their hashes in dvc.lock.

DVC trusts its cache and its notes about files: after a model was replaced in the cache or the remote, `dvc checkout` restores the wrong
bytes and `dvc status` calls them up to date.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rlhf_core.config import ConfigError, read_yaml
from rlhf_core.paths import ROUNDS_PIPELINE
from rlhf_core.provenance.dvc_cache import cache_folder, listing
from rlhf_core.provenance.file_hashes import dvc_md5, dvc_md5_of_files

LOCKS = (Path("dvc.lock"), ROUNDS_PIPELINE.with_suffix(".lock"))


def locked_hashes(root: Path = Path()) -> dict[str, str]:
    """Return the md5 of each output in dvc.lock and rounds/dvc.lock by its path; empty without these files."""
    stages: list[dict[str, Any]] = []
    for lock in LOCKS:
        if (root / lock).is_file():
            stages += (read_yaml(root / lock).get("stages") or {}).values()
    return {out["path"]: out["md5"] for stage in stages for out in stage.get("outs", []) if "md5" in out}


def check_locked(path: str, found: str | None = None, *, root: Path = Path()) -> str | None:
    """Return the md5 of an output, if it was computed. Check that an output of the project at `root` has the md5 of dvc.lock. An
    output that dvc.lock doesn't have is accepted.

    Args:
        path: relative to `root`, with slashes. found: its md5 where it is known; None: every file is read (some 2 s per GB).
    Raises:
        ConfigError: it has another; names the file, both hashes, and DVC's copy where that is damaged.
    """
    wanted = locked_hashes(root).get(path)
    if wanted is None:
        return found
    found = dvc_md5(root / path) if found is None else found
    if wanted == found:
        return found
    name, expected, got = _first_difference(root, path, wanted)
    copy = None if expected is None else cache_folder(root) / expected[:2] / expected[2:]
    if copy is not None and not copy.is_file():
        restore = f"remove {path}; then `dvc repro`, or `dvc pull` from a remote that you trust, restores it"
    elif copy is not None and dvc_md5(copy) != expected.removesuffix(".dir"):
        restore = f"remove {path} and DVC's copy, {copy}; then `dvc repro`, or `dvc pull` from a remote that you trust, restores it"
    else:
        restore = f"remove {path}; `dvc checkout {path}` restores it"
    raise ConfigError(
        f"{name}: expected md5 {expected or 'of no file'} by dvc.lock, got {got or 'nothing'}; it was changed here, in DVC's cache or in "
        f"its remote, or a stage made it that DVC didn't record. If you made it, `dvc repro` or `dvc commit` records it; else {restore}"
    )


def _first_difference(root: Path, path: str, wanted: str) -> tuple[str, str | None, str | None]:
    """Name, expected and found md5 of the first file that differs if DVC's cache has the folder's list, else of the folder."""
    place = root / path
    if not place.is_dir():
        return path, wanted, dvc_md5(place)
    here = dvc_md5_of_files(place)
    try:
        files = listing(wanted, cache_folder(root))
    except ValueError:  # the list is missing or damaged
        return path, wanted, dvc_md5(place)
    name = next((name for name in sorted({*files, *here}) if files.get(name) != here.get(name)), None)
    return (path, wanted, dvc_md5(place)) if name is None else (f"{path}/{name}", files.get(name), here.get(name))
