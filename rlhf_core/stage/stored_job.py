"""A stage's side of a job whose files travel through a storage (cluster.storage)."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from rlhf_core.checkpoint.manifest import MANIFEST, parse_manifest, read_manifest
from rlhf_core.config import Params, bytes_shown
from rlhf_core.stage.job_inputs import JobInputs, pack_code
from rlhf_core.stage.scratch import is_code, stored_work, write_stored_work
from rlhf_core.storage.address import Storage, StorageFailed
from rlhf_core.storage.files import download, hash_files, index_bytes, sha256_of, upload
from rlhf_core.storage.hashing import FileHash
from rlhf_core.storage.node import INPUTS, JobFiles
from rlhf_core.storage.packages import wanted
from rlhf_core.storage.work import INDEX, OUTPUTS, PULSE, JobStorage, RemoteNote

if TYPE_CHECKING:
    from rlhf_core.stage.run import Stage

DIGEST = "digest.json"

log = logging.getLogger("rlhf")


def uses_storage(params: Params) -> bool:
    return params.cluster.address is not None and params.cluster.storage is not None


class StoredJob:
    """The files of a stage's job in the storage.

    Raises:
        StorageFailed: the storage can't be opened.
    """

    def __init__(self, stage: Stage):
        cluster = stage.params.cluster
        assert cluster.storage is not None
        self._stage, self._cluster = stage, cluster
        known = stored_work(stage.scratch)
        if known is None or known["url"] != cluster.storage:
            work = f"{stage.name.replace('@', '-')}/{stage.inputs.folder_name}-{secrets.token_hex(4)}"
            known = write_stored_work(stage.scratch, url=cluster.storage, work=work, timeout=cluster.storage_timeout)
        self.work = JobStorage(Storage(cluster.storage, timeout=cluster.storage_timeout), known["work"], Path.cwd())

    @property
    def pulse(self) -> RemoteNote:
        return RemoteNote(self.work, PULSE)

    @contextmanager
    def sent(self, inputs: JobInputs, description: Path, params: Params, engines: Iterable[str]) -> Iterator[tuple[Path, dict[str, str]]]:
        """Write the job's inputs into the storage. Yields the folder of the job's code, and the environment of its processes.

        Args:
            description: file that describes the job; nodes have it at the same path.
            params: params with the paths of a node.
            engines: as for `wanted` of rlhf_core/storage/packages.py.
        Raises:
            StorageFailed: an input can't be written.
        """
        files = inputs.files | {description.as_posix(): description}
        for path in self._stage.inputs.files:
            if not is_code(path):
                inputs.add(path)
        files |= inputs.files
        index, storage = hash_files(files), self.work.storage
        sent = upload(storage, INPUTS, files, index)
        content = index_bytes(index)
        storage.put_note(f"{INPUTS}/{sha256_of(content)}", content)
        log.info("%s: %d inputs, of which %s are new in %s", self._stage.name, len(files), bytes_shown(sent), storage.url)
        self._send_checkpoints()
        job = JobFiles(
            url=self._cluster.storage,
            work=self.work.prefix,
            inputs=sha256_of(content),
            packages=wanted(engines),
            attempt=secrets.token_hex(4),
            node_folder=self._cluster.node_folder,
            node_bytes=int(self._cluster.node_gib * 2**30),
            timeout=self._cluster.storage_timeout,
        )
        with TemporaryDirectory(prefix="rlhf-code-") as code:
            pack_code(Path(code), params, Path.cwd())
            yield Path(code), job.as_environment()

    def take_back(self, sets: Iterable[str], *, complete: bool) -> None:
        """Download the job's outputs into the project's folder.

        Args:
            complete: whether the job has finished and every set must exist. Otherwise what there is is downloaded, if the storage answers.
        Raises:
            StorageFailed: an output of a finished job is missing or damaged.
        """
        try:
            for name in sets:
                if not self.work.pull(name) and complete:
                    raise StorageFailed(f"storage {self.work.storage.url}: expected the job's {name}, got none; run the stage again")
            self._take_manifests()
        except StorageFailed as error:
            if complete:
                raise
            log.warning("%s", error)

    def remove(self) -> None:
        """Remove the work's files from the storage; its inputs stay for other jobs."""
        try:
            self.work.storage.remove_folder(self.work.prefix)
        except StorageFailed as error:
            log.warning("%s", error)

    def _take_manifests(self) -> None:
        """Download the checkpoints' manifests and state digests, which the stage keeps and resuming from other work reads."""
        storage, scratch = self.work.storage, self.work.prefix_of(self._stage.scratch)
        for name in storage.sizes(scratch):
            path = Path(name)
            if path.name == MANIFEST and path.parent.name.startswith("step-"):
                content = storage.note(f"{scratch}/{name}") or b""
                recorded = parse_manifest(content)["files"]
                folder = self._stage.scratch / path.parent
                folder.mkdir(parents=True, exist_ok=True)
                (folder / MANIFEST).write_bytes(content)
                digest = {file: FileHash.from_json(entry) for file, entry in recorded.items() if file == DIGEST}
                download(storage, f"{scratch}/{path.parent.as_posix()}", digest, folder)

    def _send_checkpoints(self) -> None:
        """Write the checkpoints of the stage's scratch folder into the storage, if it has none of this work.

        They are from jobs without a storage or from other work (checkpoints.resume_from), whose files may be in the storage already.
        """
        storage, scratch = self.work.storage, self.work.prefix_of(self._stage.scratch)
        if any(name.endswith(f"/{MANIFEST}") for name in storage.sizes(scratch)):
            return
        for path in sorted(self._stage.scratch.glob(f"*/step-*/{MANIFEST}")):
            folder = path.parent
            name = folder.relative_to(self._stage.scratch).as_posix()
            index = {file: FileHash.from_json(entry) for file, entry in read_manifest(folder)["files"].items()}
            if all((folder / file).exists() for file in index):
                upload(storage, f"{scratch}/{name}", {file: folder / file for file in index}, index)
            elif not any(_copied(storage, f"{older}/{name}", f"{scratch}/{name}", index) for older in self._older()):
                continue
            storage.put_note(f"{scratch}/{name}/{MANIFEST}", path.read_bytes())
        curves = self._stage.scratch / "curves.csv"
        if curves.exists() and self.work.note(f"{OUTPUTS}/{INDEX}") is None:
            self.work.push(OUTPUTS, [curves])

    def _older(self) -> Iterator[str]:
        """Yield the storage paths of the scratch folders of other work that this work resumed from, newest first."""
        for entry in reversed(self._stage.resumed_from):
            folder = self._stage.scratch.with_name(entry["scratch"])
            if (known := stored_work(folder)) is not None and known["url"] == self._cluster.storage:
                yield f"{known['work']}/{folder.as_posix()}"


def _copied(storage: Storage, source: str, target: str, index: dict[str, FileHash]) -> bool:
    """Copy a checkpoint's files within the storage, and return True; return False if a file is missing."""
    there = storage.sizes(source)
    if any(there.get(of.sha256) != of.bytes for of in index.values()):
        return False
    storage.copy((f"{source}/{of.sha256}", f"{target}/{of.sha256}") for of in index.values())
    return True
