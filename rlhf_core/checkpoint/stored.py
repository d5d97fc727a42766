"""Checkpoints of ranks that share no disk: each rank writes its files into the job's storage, and reads from there what it resumes from.

A checkpoint's folder has a counterpart in the storage with the contents of its files by their hashes. The manifest is written there last,
so that a checkpoint is complete or absent. Folders on the nodes are copies of parts.
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
    """The counterpart of a checkpoint's folder. prefix: in the storage."""

    work: JobStorage
    prefix: str

    @staticmethod
    def of(folder: Path) -> StoredCheckpoint | None:
        """None: the job has no storage, and every rank sees the folder.

        Args:
            folder: of a checkpoint, or of one that is being written.
        """
        if (work := job_storage()) is None:
            return None
        return StoredCheckpoint(work, work.prefix_of(folder.with_name(folder.name.replace(WRITING, STEP))))

    def put_note(self, name: str, content: bytes) -> None:
        self.work.storage.put_note(f"{self.prefix}/{name}", content)

    def note(self, name: str) -> bytes | None:
        return self.work.storage.note(f"{self.prefix}/{name}")

    def upload(self, folder: Path, hashes: Mapping[str, FileHash]) -> None:
        """Write the contents of files of the folder."""
        upload(self.work.storage, self.prefix, {name: folder / name for name in hashes}, dict(hashes))

    def publish(self, folder: Path, hashes: Mapping[str, FileHash]) -> None:
        """Write the rest of the files, which this process has, and the manifest, and remove what an earlier attempt left.

        Args:
            folder: with the manifest.
            hashes: of all files of the checkpoint.
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
        """Its manifest first: what is left of it is no checkpoint."""
        self.work.storage.remove([f"{self.prefix}/{MANIFEST}"])
        self.work.storage.remove_folder(self.prefix)

    def download(self, folder: Path, wanted: Callable[[str], bool]) -> str | None:
        """Make files of the checkpoint complete in this node's folder. The processes of a node share what one of them has brought.

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
    """The first problem of a checkpoint; None: it is intact. Every file is read.

    Args:
        rank, ranks: see `damage`, for a folder that all ranks see.
        wanted: which files this process needs, of a checkpoint in the storage. They are in the folder afterwards.
    """
    stored = StoredCheckpoint.of(folder)
    return damage(folder, rank=rank, ranks=ranks) if stored is None else stored.download(folder, wanted)


def match_storage(folder: Path) -> None:
    """Make the checkpoints of a store's folder those of the storage, by their manifests, and remove remains of interrupted saves there."""
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
    """Remove what this node still has of checkpoints before the one in `folder`; the node of the store keeps those with a manifest."""
    for copy in (*folder.parent.glob(f"{WRITING}*"), *folder.parent.glob(f"{STEP}*")):
        if copy != folder and not (copy / MANIFEST).exists():
            shutil.rmtree(copy, ignore_errors=True)


def download_for_driver(folder: Path) -> str | None:
    """Bring the files of a checkpoint that an RL job's driver reads, from the storage if there is one. Returns the first problem."""
    stored = StoredCheckpoint.of(folder)
    return None if stored is None else stored.download(folder, lambda name: "/" not in name and name.endswith(".json"))


def upload_folder(folder: Path) -> None:
    """Give a folder of this node to others that share no disk with it, until `remove_folder`."""
    if (work := job_storage()) is not None:
        work.push(folder.as_posix(), [folder])


def download_folder(folder: Path) -> None:
    """
    Raises:
        StorageFailed: the folder wasn't shared, or is damaged.
    """
    if (work := job_storage()) is not None and not work.pull(folder.as_posix()):
        raise StorageFailed(f"storage {work.storage.url}: expected {folder}, which another node made, got none; run again")


def remove_folder(folder: Path) -> None:
    """Remove a shared folder, and this node's copy."""
    shutil.rmtree(folder, ignore_errors=True)
    if (work := job_storage()) is not None:
        work.remove_set(folder.as_posix())
