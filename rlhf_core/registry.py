"""A model by its hash: what DVC's cache holds under an md5, laid out as a folder after every file of it was checked.

dvc.lock names a folder by the md5 of a listing, and the listing names its files by their md5s; the cache keeps each under its own. So
a hash that was written down once says which bytes are meant, whoever kept them in the meantime.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from rlhf_core.config import ConfigError
from rlhf_core.quiet import QUIET_ENVIRONMENT, quietly
from rlhf_core.rounds import dvc_md5

_CHUNK = 1 << 20  # bytes


def checkout(md5: str, folder: Path, *, root: Path) -> None:
    """Lay out the folder that DVC knows as `md5`, from the cache of the checkout at `root`; every file is checked on its way.

    Args:
        md5: as dvc.lock has it, ending in .dir.
        folder: made whole or not at all; one that holds this very content already is left alone.
    Raises:
        ValueError: something is missing in the cache or isn't what its name says, or `folder` holds something else.
        ConfigError: DVC doesn't say where its cache is.
    """
    if folder.exists():
        if (found := dvc_md5(folder)) != md5:
            raise ValueError(f"{folder}: expected md5 {md5} or nothing there, got {found}; move it away")
        return
    cache = cache_folder(root)
    listed = listing(md5, cache)
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        for name, file_md5 in listed.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            with (aside / name).open("wb") as output:
                _check(cache, file_md5, name, output)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def verify(md5: str, *, root: Path) -> None:
    """Every file of a folder is in the cache of the checkout at `root` and is what its name says.

    Raises:
        ValueError: naming the file that isn't.
    """
    cache = cache_folder(root)
    for name, file_md5 in listing(md5, cache).items():
        _check(cache, file_md5, name)


def missing(md5: str, cache: Path) -> list[str]:
    """Names of files of a folder, or of the file itself, that aren't in the cache; their content isn't looked at."""
    if not (cache / _place(md5)).is_file():
        return [f"md5 {md5}"]
    if not md5.endswith(".dir"):
        return []
    return [name for name, file_md5 in listing(md5, cache).items() if not (cache / _place(file_md5)).is_file()]


def listing(md5: str, cache: Path) -> dict[str, str]:
    """Names of a folder's files, with slashes, and their md5s.

    Raises:
        ValueError: the listing is missing, isn't what its name says, or names a file outside the folder.
    """
    if not md5.endswith(".dir"):
        raise ValueError(f"model: expected the md5 of a folder, which ends in .dir, got {md5}; take it from dvc.lock")
    _check(cache, md5, "the list of its files")
    entries = {entry["relpath"]: entry["md5"] for entry in json.loads((cache / _place(md5)).read_text(encoding="utf-8"))}
    if outside := [name for name in entries if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts]:
        raise ValueError(f"md5 {md5}: expected names of files inside the folder, got {outside[0]!r}; don't use it")
    return entries


def cache_folder(root: Path) -> Path:
    """Where the checkout at `root` keeps DVC's files by their md5.

    Raises:
        ConfigError: DVC doesn't say.
    """
    root = root.resolve()  # a relative one may be another project's by the next call
    return _cache_folder(root, *(_stamp(root / ".dvc" / name) for name in ("config", "config.local")))


@lru_cache(maxsize=64)
def _cache_folder(root: Path, *_stamps: tuple[int, int] | None) -> Path:
    """Asked of DVC's command line, a third of a second, and again when a file of settings is another one: who imports DVC gets its log
    handlers and its terminal.
    """
    environment = {**QUIET_ENVIRONMENT, **os.environ}
    done = subprocess.run(quietly("dvc", "cache", "dir"), cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"{root}: expected a project of DVC, got: {' '.join(done.stderr.split())}; run from the project's folder")
    return root / done.stdout.strip() / "files" / "md5"


def _stamp(path: Path) -> tuple[int, int] | None:
    """What changes when a file is written; None: it isn't there."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _place(md5: str) -> Path:
    return Path(md5[:2]) / md5[2:]


def _check(cache: Path, md5: str, name: str, output: BinaryIO | None = None) -> None:
    """Read a file of the cache, into `output` where there is one, and compare its md5.

    Raises:
        ValueError: it is missing, or has another content.
    """
    path = cache / _place(md5)
    try:
        with path.open("rb") as file:
            digest = hashlib.md5(usedforsecurity=False)
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                if output is not None:
                    output.write(chunk)
    except FileNotFoundError:
        raise ValueError(f"{name}: expected md5 {md5} in DVC's cache, got nothing; `dvc pull` brings it from the remote") from None
    if digest.hexdigest() != md5.removesuffix(".dir"):
        raise ValueError(
            f"{name}: expected md5 {md5}, got {digest.hexdigest()}: {path} was changed or damaged; delete that file, and `dvc pull` brings "
            "it from the remote again"
        )
