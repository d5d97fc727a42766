"""Checkpoints of ranks that share no disk: each rank writes its files into the job's storage, and reads what it resumes from there.

A checkpoint's folder has a counterpart in the storage with the contents of its files under their hashes. The manifest is written there
last, so that a checkpoint is complete or absent. A folder on a node has copies of some of the files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rlhf_core.checkpoint.manifest import MANIFEST, damage, parse_manifest
from rlhf_core.checkpoint.torch_file import check_torch_file
from rlhf_core.files import lock_file
from rlhf_core.storage.address import StorageFailed
from rlhf_core.storage.files import download, intact, sha256_of, upload
from rlhf_core.storage.hashing import FileHash
from rlhf_core.storage.node import JobFiles, job_storage
from rlhf_core.storage.work import JobStorage

WRITING, STEP = "writing-", "step-"


@dataclass(frozen=True)
class StoredCheckpoint:
    """The counterpart in the storage of a checkpoint's folder; `prefix` is its path there."""

    work: JobStorage
    prefix: str

    @staticmethod
    def of(folder: Path) -> StoredCheckpoint | None:
        """Return the counterpart of a checkpoint's folder; None if the job has no storage, because every rank then sees the folder.

        Args:
            folder: folder of a checkpoint, finished or being written.
        """
        if (work := job_storage()) is None:
            return None
        return StoredCheckpoint(work, work.prefix_of(folder.with_name(folder.name.replace(WRITING, STEP))))

    def put_note(self, name: str, content: bytes) -> None:
        self.work.storage.put_note(f"{self.prefix}/{name}", content)

    def note(self, name: str) -> bytes | None:
        return self.work.storage.note(f"{self.prefix}/{name}")

    def upload(self, folder: Path, hashes: Mapping[str, FileHash]) -> None:
        """Write the contents of files of the folder into the storage."""
        upload(self.work.storage, self.prefix, {name: folder / name for name in hashes}, dict(hashes))

    def publish(self, folder: Path, hashes: Mapping[str, FileHash]) -> None:
        """Write the files that this process has and then the manifest, and remove contents that an earlier attempt left.

        Args:
            folder: the local folder, which has the manifest.
            hashes: hashes of all files of the checkpoint.
        Raises:
            StorageFailed: a rank's file is missing.
        """
        self.work.push_outputs()
        self.upload(folder, {name: found for name, found in hashes.items() if (folder / name).exists()})
        there = self.work.storage.sizes(self.prefix)
        if missing := sorted(name for name, found in hashes.items() if there.get(found.sha256) != found.bytes):
            raise StorageFailed(f"storage {self.work.storage.url}: expected {missing[0]} below {self.prefix}, got none; run again")
        self.put_note(MANIFEST, (folder / MANIFEST).read_bytes())
        kept = {found.sha256 for found in hashes.values()} | {MANIFEST}
        self.work.storage.remove(f"{self.prefix}/{name}" for name in there if name not in kept)

    def remove(self) -> None:
        """Remove the checkpoint, its manifest first: without a manifest the rest counts as no checkpoint."""
        self.work.storage.remove([f"{self.prefix}/{MANIFEST}"])
        self.work.storage.remove_folder(self.prefix)

    def download(self, folder: Path, wanted: Callable[[str], bool]) -> str | None:
        """Download the wanted files of the checkpoint into this node's folder, and check them. A node's processes share what one has
        brought.

        Returns:
            The first problem; None: there is none.
        """
        content = self.note(MANIFEST)
        try:
            manifest = parse_manifest(content or b"")
        except ValueError as error:
            return str(error)
        index = {name: FileHash.from_json(entry) for name, entry in manifest["files"].items() if wanted(name)}
        files = JobFiles.read()
        assert files is not None
        folder.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f".{folder.name}.lock").open("a+") as lock:
            lock_file(lock, files.timeout)
            lock.seek(0)
            brought = set(lock.read().splitlines())  # by this attempt, so that the ranks of a node don't read all again
            mark = f"{files.attempt} {sha256_of(content or b'')} "
            unknown = {name: of for name, of in index.items() if mark + name not in brought}
            try:
                there = intact(folder, unknown)
                download(self.work.storage, self.prefix, {name: of for name, of in unknown.items() if name not in there}, folder)
                for name in unknown:
                    if name.endswith(".pt"):
                        check_torch_file(folder / name)
            except (OSError, ValueError) as error:
                return str(error)
            lock.write("".join(f"{mark}{name}\n" for name in unknown))
        return None


def check_checkpoint(folder: Path, *, rank: int = 0, ranks: int = 1, wanted: Callable[[str], bool] = lambda name: True) -> str | None:
    """Return the first problem of a checkpoint, or None if it is intact.

    Args:
        rank, ranks: see `damage`, for a folder that all ranks see.
        wanted: whether this process needs a file, for a checkpoint in the storage. Wanted files are downloaded into the folder; no other is
            checked.
    """
    stored = StoredCheckpoint.of(folder)
    return damage(folder, rank=rank, ranks=ranks) if stored is None else stored.download(folder, wanted)


def match_storage(folder: Path) -> None:
    """Make the checkpoints of a store's folder those of the storage, by their manifests, and remove incomplete ones from both."""
    if (work := job_storage()) is None:
        return
    prefix = work.prefix_of(folder)
    there = work.storage.sizes(prefix)
    steps = {name.partition("/")[0] for name in there}
    complete = {step for step in steps if f"{step}/{MANIFEST}" in there}
    for step in steps - complete:
        work.storage.remove_folder(f"{prefix}/{step}")
    for copy in folder.glob(f"{STEP}*"):
        if copy.name not in complete:
            shutil.rmtree(copy)
    for step in complete:
        (folder / step).mkdir(exist_ok=True)
        (folder / step / MANIFEST).write_bytes(work.storage.note(f"{prefix}/{step}/{MANIFEST}") or b"")


def remove_old_copies(folder: Path) -> None:
    """Remove this node's copies of checkpoints other than `folder`; copies with a manifest, which the store's node has, stay."""
    for copy in (*folder.parent.glob(f"{WRITING}*"), *folder.parent.glob(f"{STEP}*")):
        if copy != folder and not (copy / MANIFEST).exists():
            shutil.rmtree(copy, ignore_errors=True)


def download_for_driver(folder: Path) -> str | None:
    """Download the files of a checkpoint that an RL job's driver reads, if the job has a storage. Return the first problem."""
    stored = StoredCheckpoint.of(folder)
    return None if stored is None else stored.download(folder, lambda name: "/" not in name and name.endswith(".json"))


def upload_folder(folder: Path) -> None:
    """Upload a folder for nodes that share no disk with this one, until `remove_folder`."""
    if (work := job_storage()) is not None:
        work.push(folder.as_posix(), [folder])


def download_folder(folder: Path) -> None:
    """Download a folder that `upload_folder` uploaded; without a storage do nothing.

    Raises:
        StorageFailed: the folder wasn't uploaded, or is damaged.
    """
    if (work := job_storage()) is not None and not work.pull(folder.as_posix()):
        raise StorageFailed(f"storage {work.storage.url}: expected {folder}, which another node made, got none; run again")


def remove_folder(folder: Path) -> None:
    """Remove a folder of `upload_folder` from the storage and from this node."""
    shutil.rmtree(folder, ignore_errors=True)
    if (work := job_storage()) is not None:
        work.remove_set(folder.as_posix())
