"""A node's copy of the project's folder, for a job whose nodes share no disk.

Ray's runtime environment brings the code. Inputs come from the storage, once for each node: `objects/<hash>` of the node's folder has
their contents, and `work/<name>` a workspace of links to them, in which paths are those of the project's folder. Checkpoints and outputs
are written into the workspace, and from there into the storage.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from rlhf_core.files import lock_file, try_lock
from rlhf_core.storage.address import Storage, StorageFailed
from rlhf_core.storage.files import Index, download, read_index, sha256_of
from rlhf_core.storage.work import JobStorage

ENVIRONMENT = "RLHF_JOB_FILES"  # variable of a job's processes: where its files are, as JSON
INPUTS = "inputs"  # prefix in the storage
CODE = Path(__file__).parents[2]

log = logging.getLogger("rlhf")


@dataclass(frozen=True)
class JobFiles:
    """Where a job's files are.

    url: the storage's address. work: prefix of the work's files in the storage. inputs: hash of the index of the job's inputs.
    packages: versions that a node must have. attempt: identifies this submission.
    node_folder: folder on each node; None: one in the node's temporary folder. node_bytes: limit of its content.
    timeout: deadline of a transfer in seconds.
    """

    url: str
    work: str
    inputs: str
    packages: dict[str, str]
    attempt: str
    node_folder: str | None
    node_bytes: int
    timeout: float

    def as_environment(self) -> dict[str, str]:
        return {ENVIRONMENT: json.dumps(asdict(self))}

    @staticmethod
    def read(environment: Mapping[str, str] = os.environ) -> JobFiles | None:
        text = environment.get(ENVIRONMENT)
        return None if text is None else JobFiles(**json.loads(text))

    def storage(self) -> Storage:
        return Storage(self.url, timeout=self.timeout)

    @property
    def folder(self) -> Path:
        return Path(self.node_folder) if self.node_folder else Path(tempfile.gettempdir()) / f"rlhf-{os.getuid()}"


_entered: tuple[JobStorage, IO[str]] | None = None  # and the lock that keeps the workspace


def enter(shared: Path | None = None) -> JobStorage | None:
    """Change to the project's folder: the node's workspace, or the folder that all nodes see.

    Args:
        shared: the folder that all nodes see; None: the process stays where it is.
    Returns:
        The work's part of the storage; None: the job has no storage.
    Raises:
        StorageFailed: an input is missing or damaged, or the storage doesn't answer.
    """
    global _entered
    files = JobFiles.read()
    if files is None:
        if shared is not None:
            os.chdir(shared)
        return None
    if _entered is None:
        _entered = _enter(files)
        os.chdir(_entered[0].root)
    return _entered[0]


def job_storage() -> JobStorage | None:
    """Return what `enter` returned in this process; None before it."""
    return None if _entered is None else _entered[0]


def _enter(files: JobFiles) -> tuple[JobStorage, IO[str]]:
    storage, folder = files.storage(), files.folder
    _own(folder)
    root = (folder / "work" / files.work.replace("/", "-")).resolve()
    content = storage.note(f"{INPUTS}/{files.inputs}")
    if content is None or sha256_of(content) != files.inputs:
        raise StorageFailed(f"storage {storage.url}: expected the job's inputs, got none or others; run the stage again")
    with (folder / "lock").open("a") as lock:  # one process of the node fetches, the others find what it has fetched
        lock_file(lock, files.timeout)
        keeper = _kept(root, files.timeout)
        _fetch(storage, read_index(content), folder / "objects", root)
        _link_code(root)
        _evict(folder, files.node_bytes, spared=root)
    return JobStorage(storage, files.work, root), keeper


def _own(folder: Path) -> None:
    """Create a folder that only this user can write, with its subfolders. Another user's folder is refused, since it could hold foreign
    code.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022 or folder.is_symlink():
        raise StorageFailed(f"{folder}: expected a folder that only this user can write, got another; set cluster.node_folder")
    for part in ("objects", "work"):
        (folder / part).mkdir(exist_ok=True)


def _kept(root: Path, seconds: float) -> IO[str]:
    """Lock a workspace so that it isn't removed while this process lives, and return the open lock file."""
    file = root.with_name(f"{root.name}.lock").open("a")
    os.utime(file.fileno())
    lock_file(file, seconds, shared=True)
    return file


def _fetch(storage: Storage, index: Index, objects: Path, root: Path) -> None:
    """Link each input into the workspace. Inputs that the node lacks are downloaded first."""
    missing = {of.sha256: of for of in index.values() if not (objects / of.sha256).exists()}
    if missing:
        download(storage, INPUTS, missing, objects)
    for sha256 in missing:
        (objects / sha256).chmod(0o444)
    for name, of in index.items():
        path, content = root / name, objects / of.sha256
        if path.exists() and path.samefile(content):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        os.link(content, path)


def _link_code(root: Path) -> None:
    """Link the project's code, such as reward functions and params.yaml, from Ray's copy into the workspace."""
    root.mkdir(parents=True, exist_ok=True)
    for part in CODE.iterdir():
        link = root / part.name
        if link.is_symlink():
            link.unlink()
        if not link.exists():
            link.symlink_to(part)


def _evict(folder: Path, limit: int, *, spared: Path) -> None:
    """Remove unused workspaces, the longest unused first, then inputs that no workspace links, until the folder is within its limit."""
    locks = sorted((folder / "work").glob("*.lock"), key=lambda p: p.stat().st_mtime)
    used = _bytes(folder)
    for path in locks:
        root = path.with_suffix("")
        if used <= limit or root == spared:
            continue
        with path.open("a") as lock:
            if not try_lock(lock):
                continue
            shutil.rmtree(root, ignore_errors=True)
            path.unlink()
        used = _bytes(folder)
    for content in sorted((folder / "objects").iterdir(), key=lambda p: p.stat().st_atime):
        if used > limit and content.stat().st_nlink == 1:
            used -= content.stat().st_size
            content.unlink()
    if used > limit:
        log.warning("%s: expected at most %.3g GiB (cluster.node_gib), got %.3g GiB of running jobs", folder, limit / 2**30, used / 2**30)


def _bytes(folder: Path) -> int:
    """Return the bytes of a folder's files; a file with several links counts once."""
    found = {}
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_file():
            status = path.stat()
            found[status.st_ino] = status.st_size
    return sum(found.values())
