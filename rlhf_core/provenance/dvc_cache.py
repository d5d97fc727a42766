"""Restores a model from DVC's cache by its md5 and verifies every file.

dvc.lock identifies a folder by the md5 of a listing, and the listing identifies its files by their md5s; the cache stores each under its
own md5. A recorded hash therefore identifies the bytes wherever they were stored. md5 collisions can be constructed, so recorded sha256s
are compared too.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Collection, Mapping
from functools import lru_cache
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from rlhf_core.config import ConfigError, shown
from rlhf_core.process import PROCESS_ENVIRONMENT, module_command, without_git_places
from rlhf_core.provenance.file_hashes import dvc_md5, folder_sha256

_CHUNK = 1 << 20  # bytes
_MAX_LISTING = 16 << 20  # bytes of the list of a model's files


class _ListedFile(BaseModel):
    relpath: str = Field(min_length=1)
    md5: str = Field(pattern=r"^[0-9a-f]{32}$")


_Listing = TypeAdapter(list[_ListedFile])


def checkout(md5: str, folder: Path, *, root: Path, sha256: Mapping[str, str] | str | None = None) -> None:
    """Copy the folder with this md5 from the cache of the checkout at `root`; every file is verified.

    Args:
        md5: as in dvc.lock, ending in .dir.
        folder: created atomically; left alone if it already has this content.
        sha256: of each file by its name, or of the whole folder (`folder_sha256`); None: not recorded, and only the md5,
            for which collisions can be constructed, is verified.
    Raises:
        ValueError: a file is missing in the cache or doesn't match its hash, or `folder` has other content.
        ConfigError: DVC can't locate its cache.
    """
    if folder.exists():
        if (found := dvc_md5(folder)) != md5:
            raise ValueError(f"{folder}: expected md5 {md5} or nothing there, got {found}; move it away")
        if sha256 is not None:
            _check_content(str(folder), sha256_of_files(folder), sha256)
        return
    cache = cache_folder(root)
    listed = listing(md5, cache)
    aside = folder.with_name(f"{folder.name}.tmp-{os.getpid()}")
    try:
        found: dict[str, str] = {}
        for name, file_md5 in listed.items():
            (aside / name).parent.mkdir(parents=True, exist_ok=True)
            with (aside / name).open("wb") as output:
                found[name] = _check(cache, file_md5, name, output)
        if sha256 is not None:
            _check_content(f"md5 {md5}", found, sha256)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _check_content(subject: str, found: dict[str, str], wanted: Mapping[str, str] | str) -> None:
    """Compare sha256s with the recorded ones.

    Raises:
        ValueError: they differ; names the file if each file's sha256 was recorded.
    """
    if isinstance(wanted, str):
        wanted, other = {"": wanted}, {"": folder_sha256(found)}
    else:
        other = found
    for name in sorted(wanted.keys() | other.keys()):
        if wanted.get(name) != other.get(name):
            raise ValueError(
                f"{name or subject}: expected sha256 {wanted.get(name, 'none, for it is no file of the model')}, got "
                f"{other.get(name, 'nothing')}, although the md5 matches: the content was forged to have the same md5; don't use it"
            )


def sha256_of_files(folder: Path) -> dict[str, str]:
    """sha256 of each file in a folder, by its name with slashes."""
    return {path.relative_to(folder).as_posix(): _sha256(path) for path in folder.rglob("*") if path.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(md5: str, *, root: Path) -> dict[str, str]:
    """Check that the cache of the checkout at `root` has every file of a folder and that each matches its md5.

    Returns:
        The sha256 of each file, by its name.
    Raises:
        ValueError: names the missing or damaged file.
    """
    cache = cache_folder(root)
    return {name: _check(cache, file_md5, name) for name, file_md5 in listing(md5, cache).items()}


def link_verified(md5: str, target: Path, *, root: Path, names: Collection[str] | None = None) -> None:
    """Make `target` a link to a file in the cache of the checkout at `root`, or a folder of such links, and verify what is linked.

    Args:
        names: of a folder's files to link, where it has them; None: all.
    Raises:
        ValueError: a file is missing in the cache or doesn't match its md5.
    """
    cache = cache_folder(root)
    if not md5.endswith(".dir"):
        _check(cache, md5, target.name)
        target.symlink_to(cache / _place(md5))
        return
    target.mkdir()
    for name, file_md5 in listing(md5, cache).items():
        if names is None or name in names:
            _check(cache, file_md5, name)
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            (target / name).symlink_to(cache / _place(file_md5))


def missing(md5: str, cache: Path) -> list[str]:
    """Names of a folder's files, or of the file itself, that aren't in the cache; content isn't verified."""
    if not (cache / _place(md5)).is_file():
        return [f"md5 {md5}"]
    if not md5.endswith(".dir"):
        return []
    return [name for name, file_md5 in listing(md5, cache).items() if not (cache / _place(file_md5)).is_file()]


def listing(md5: str, cache: Path) -> dict[str, str]:
    """Names of a folder's files, with slashes, and their md5s.

    Raises:
        ValueError: the listing is missing, doesn't match its md5, or names a file outside the folder.
    """
    if not md5.endswith(".dir"):
        raise ValueError(f"model: expected the md5 of a folder, which ends in .dir, got {md5}; take it from dvc.lock")
    place = cache / _place(md5)
    if place.is_file() and (size := place.stat().st_size) > _MAX_LISTING:
        raise ValueError(f"md5 {md5}: expected a list of files of at most {_MAX_LISTING} bytes, got {size}; don't use it")
    _check(cache, md5, "the list of its files")
    try:
        entries = _Listing.validate_json(place.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"md5 {md5}: expected a list of files, got other content ({shown(first['msg'])}); don't use it") from error
    names = {entry.relpath for entry in entries}
    for entry in entries:
        path = PurePosixPath(entry.relpath)
        inside = not path.is_absolute() and path.parts and ".." not in path.parts and path.as_posix() == entry.relpath
        if not inside or not entry.relpath.isprintable() or "\\" in entry.relpath:
            raise ValueError(f"md5 {md5}: expected names of files inside the folder, got {shown(repr(entry.relpath))}; don't use it")
        if above := next((parent.as_posix() for parent in path.parents if parent.as_posix() in names), None):
            raise ValueError(f"md5 {md5}: expected files, got one inside another, {shown(repr(above))}; don't use it")
    if len(names) < len(entries):
        raise ValueError(f"md5 {md5}: expected each file once, got one twice; don't use it")
    return {entry.relpath: entry.md5 for entry in entries}


def read_cached(md5: str, name: str, cache: Path) -> bytes:
    """Return the content of one of a folder's files.

    Raises:
        ValueError: the cache lacks it, it doesn't match its md5, or the folder has no such file.
    """
    if (file_md5 := listing(md5, cache).get(name)) is None:
        raise ValueError(f"md5 {md5}: expected a file {name} in the folder, got none; don't use it")
    content = BytesIO()
    _check(cache, file_md5, name, content)
    return content.getvalue()


def cache_folder(root: Path) -> Path:
    """Folder of DVC's cache of the checkout at `root`.

    Raises:
        ConfigError: DVC can't name it.
    """
    root = root.resolve()  # a relative path may mean another project at the next call
    return _cache_folder(root, *(_stamp(root / ".dvc" / name) for name in ("config", "config.local")))


@lru_cache(maxsize=64)
def _cache_folder(root: Path, *_stamps: tuple[int, int] | None) -> Path:
    """Result of DVC's command line, cached until a settings file changes. DVC isn't imported, since that installs its log handlers."""
    environment = PROCESS_ENVIRONMENT | without_git_places()
    process_options = {"cwd": root, "env": environment, "encoding": "utf-8", "errors": "replace"}
    done = subprocess.run(module_command("dvc", "cache", "dir"), capture_output=True, check=False, **process_options)
    if done.returncode:
        raise ConfigError(f"{root}: expected a DVC project, got: {' '.join(done.stderr.split())}; run from the project's folder")
    return root / done.stdout.strip() / "files" / "md5"


def _stamp(path: Path) -> tuple[int, int] | None:
    """Values that change when a file is written; None: no such file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def _place(md5: str) -> Path:
    return Path(md5[:2]) / md5[2:]


def _check(cache: Path, md5: str, name: str, output: BinaryIO | None = None) -> str:
    """Read a file of the cache, copy it to `output` if given, and verify its md5.

    Returns:
        Its sha256.
    Raises:
        ValueError: the file is missing or doesn't match.
    """
    path = cache / _place(md5)
    try:
        with path.open("rb") as file:
            digest, content = hashlib.md5(usedforsecurity=False), hashlib.sha256()
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                content.update(chunk)
                if output is not None:
                    output.write(chunk)
    except FileNotFoundError:
        raise ValueError(f"{name}: expected md5 {md5} in DVC's cache, got nothing; `dvc pull` brings it from the remote") from None
    if digest.hexdigest() != md5.removesuffix(".dir"):
        raise ValueError(
            f"{name}: expected md5 {md5}, got {digest.hexdigest()}: {path} was changed or damaged; delete that file, and `dvc pull` brings "
            "it from the remote again"
        )
    return content.hexdigest()
