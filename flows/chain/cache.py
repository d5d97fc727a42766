"""Verifies the files that DVC restores from its cache. DVC trusts read-only files without hashing them, even if the disk damaged them."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

from flows.chain.recorded import remove_unread
from flows.chain.stages import LineHandler, StageFailed, StageResult, run_stage
from rlhf_core.config import read_yaml
from rlhf_core.provenance.dvc_cache import cache_folder
from rlhf_core.provenance.file_hashes import dvc_md5


def run_checked(stage: str, workspace: Path, *, timeout: float, grace: float, on_line: LineHandler, force: bool = False) -> StageResult:
    """Run a stage as `run_stage` does. If DVC restores damaged files, remove them from its cache and run the stage again.

    Raises:
        StageFailed: as `run_stage`; also if params, code or data changed while DVC recorded the stage.
    """
    result = _run(stage, workspace, timeout=timeout, grace=grace, on_line=on_line, force=force)
    damaged = remove_damaged(workspace, stage) if result.outcome == "restored" else []
    if not damaged:
        return result
    names = " and ".join(damaged)
    on_line(f"{stage}: expected from DVC's cache what dvc.lock says, got a damaged {names}; removed there, and the stage runs again")
    return _run(stage, workspace, timeout=timeout, grace=grace, on_line=on_line)


def _run(stage: str, workspace: Path, **options: Any) -> StageResult:
    began = time.time()
    result = run_stage(stage, workspace, **options)
    if result.outcome == "ran" and (changed := remove_unread(stage, workspace, began)) is not None:
        raise StageFailed(
            stage,
            f"{stage}: expected params, code and data as at the stage's start, got changes as it ended: {changed}; what DVC recorded is "
            "removed. To get these results, undo that and run it again. To use what is there now, only run it again",
            refused=True,
        )
    return result


def remove_damaged(workspace: Path, stage: str) -> list[str]:
    """Remove the outs of a stage that don't match dvc.lock, also from the cache, so that DVC runs the stage again.

    Args:
        stage: DVC's address of the stage, with the file of another pipeline, such as rounds/dvc.yaml:sample_round@1.
    Returns:
        The removed paths; empty if all match.
    """
    pipeline, _, name = stage.rpartition(":")
    lock = (workspace / (pipeline or "dvc.yaml")).with_suffix(".lock")
    outs = (lock.exists() and read_yaml(lock).get("stages", {}).get(name, {}).get("outs")) or []
    bad = [out for out in outs if (path := lock.parent / out["path"]).exists() and dvc_md5(path) != out["md5"]]
    objects = cache_folder(workspace) if bad else Path()
    for out in bad:
        path = lock.parent / out["path"]
        for md5 in (*_members(objects, out), out["md5"]):
            cached = objects / md5[:2] / md5[2:]
            if cached.exists() and (md5 == out["md5"] or dvc_md5(cached) != md5):
                cached.unlink()
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return [out["path"] for out in bad]


def _members(objects: Path, out: dict[str, Any]) -> list[str]:
    """Return the md5 of each file of a folder, from the folder's listing in the cache."""
    listing = objects / out["md5"][:2] / out["md5"][2:]
    if not out["md5"].endswith(".dir") or not listing.exists():
        return []
    try:
        return [entry["md5"] for entry in json.loads(listing.read_text(encoding="utf-8"))]
    except ValueError:  # the listing itself is damaged
        return []
