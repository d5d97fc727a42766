"""Compares what DVC has recorded with what the stage has read.

A stage refuses its results if params, code or data change before it ends (rlhf_core/stage/reading.py), and DVC hashes them a moment later.
An edit within that moment is found here, and what DVC recorded is removed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from rlhf_core.config import ConfigError, read_yaml
from rlhf_core.files import replacing
from rlhf_core.provenance.dvc_cache import cache_folder
from rlhf_core.stage.reading import unlike_record
from rlhf_core.stage.scratch import StageInputs, md5_of

Tree = dict[str, Any]


def remove_unread(stage: str, workspace: Path, began: float) -> str | None:
    """Remove what DVC recorded of a stage that has just run if the stage has read something else: from the lock file and the run cache.

    Args:
        stage: DVC's address of the stage, with the file of another pipeline, such as rounds/dvc.yaml:sample_round@1.
        began: time at which DVC started the stage.
    Returns:
        What differs, or None if nothing was removed.
    """
    pipeline, _, name = stage.rpartition(":")
    _, _, number = name.partition("@")
    unlike = unlike_record(name, int(number) if number else None, workspace)
    if unlike is None:
        return None
    read, differences = unlike
    lock = (workspace / (pipeline or "dvc.yaml")).with_suffix(".lock")
    tree = read_yaml(lock)
    entry = (tree.get("stages") or {}).get(name)
    if entry is None or _is_record_of(entry, read):
        return None
    for cached in _run_cache(workspace, began):
        with suppress(ConfigError, OSError):
            if _inputs_of(read_yaml(cached)) == _inputs_of(entry):
                cached.unlink()
                cached.parent.rmdir()  # if it is empty, with which DVC fails
    del tree["stages"][name]
    with replacing(lock) as aside, aside.open("w", encoding="utf-8") as file:
        yaml = YAML(typ="safe", pure=True)
        yaml.default_flow_style = False
        yaml.dump(tree, file)
    return "; ".join(differences)


def _is_record_of(entry: Tree, read: StageInputs) -> bool:
    """Return whether an entry of a lock file has the command, params and hashes that a stage has read."""
    params = {
        (key if file == "params.yaml" else f"{file}:{key}"): value
        for file, values in (entry.get("params") or {}).items()
        for key, value in values.items()
    }
    return (
        entry["cmd"] == read.command
        and params == read.params
        and all(dep["md5"] == md5_of(Path(dep["path"]), read.files) for dep in entry.get("deps", []))
    )


def _inputs_of(entry: Tree) -> list[Any]:
    return [entry.get("cmd"), entry.get("params"), entry.get("deps")]


def _run_cache(workspace: Path, began: float) -> Iterator[Path]:
    """Yield entries of DVC's run cache that were written since a stage began."""
    for path in (cache_folder(workspace).parents[1] / "runs").glob("*/*/*"):
        with suppress(OSError):
            if path.stat().st_mtime >= began:
                yield path
