"""Checkpoints that are complete or absent: written aside, fsynced, renamed, with a manifest of sizes and hashes.

Saving has two halves. `write` takes the snapshot; training continues when it returns. `publish` does the rest in a thread: hashes, fsync,
state digest, renaming, retention. The next `write` or `wait` raises the errors of that thread. With several ranks, each hashes and syncs
its own files (parts.py). docs/resume.md has the format.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import fsync, read_manifest, write_manifest
from rlhf_core.checkpoint.parts import PartLost, PartsOverdue, describe, gather
from rlhf_core.checkpoint.saved_state import Item
from rlhf_core.checkpoint.settings import Origin, StoreSettings
from rlhf_core.checkpoint.stored import StoredCheckpoint, check_checkpoint, match_storage
from rlhf_core.config import bytes_shown
from rlhf_core.storage.address import StorageFailed

log = logging.getLogger("rlhf")

BLOCK = 4096  # bytes; a disk with less is full
PATIENCE = 1.0  # seconds that a thread whose deadline has passed has to report it


class SaveFailed(OSError):
    """A checkpoint can't be written. Earlier checkpoints stay, and another try may succeed."""


class NoSpace(SaveFailed):
    """The disk has no room for a checkpoint. The message names the missing bytes and the checkpoint that stays."""


class SaveOverdue(SaveFailed):
    """A checkpoint isn't on the disk by its deadline. The message names the folder, the bytes and what to do."""


@dataclass(frozen=True)
class Found:
    """A complete checkpoint, with the content of its manifest.

    begun_anew: fields of its state that mean something else in this work, see `StoreSettings`.
    """

    step: int
    folder: Path
    manifest: dict[str, Any]
    begun_anew: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Written:
    """A checkpoint between `write`, whose arguments are the fields, and its publication."""

    step: int
    aside: Path
    score: float | None
    ranks: tuple[int, ...]
    best: int | None
    seconds: float


class CheckpointStore:
    """The step checkpoints of one piece of work, `<folder>/step-<n>`.

    Args:
        folder: folder of the checkpoints, created if missing; remains of an interrupted save are removed.
        write_digest: writes a state digest, given the folder of a checkpoint, its step and the items of each file
            (rlhf_core/checkpoint/digest.py).
        free: returns the free bytes on the disk of a folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: StoreSettings | None = None,
        *,
        write_digest: Callable[[Path, int, Mapping[str, list[Item]]], None] | None = None,
        free: Callable[[Path], int] | None = None,
    ):
        self.folder = folder
        self._settings = settings or StoreSettings()
        self._write_digest = write_digest
        self._free = free or (lambda folder: shutil.disk_usage(folder).free)
        self._written: _Written | None = None
        self._lost: set[int] = set()
        self._publishing: tuple[_Written, Future[None], float] | None = None  # and its deadline
        _make(folder)
        for left_over in folder.glob("writing-*"):
            shutil.rmtree(left_over)
        for replaced in folder.glob("replaced-*"):  # the only copy, if a process was killed between the two renames
            step = replaced.with_name(replaced.name.replace("replaced-", "step-"))
            if step.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(step)
        match_storage(folder)

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None = None) -> Path:
        """Write and publish a checkpoint, wait for it, and return its folder."""
        self.write(step, write, score=score)
        self.publish()
        self.wait()
        return self.folder / f"step-{step}"

    def write(
        self,
        step: int,
        write: Callable[[Path], None],
        *,
        score: float | None = None,
        ranks: Collection[int] = (),
        best: int | None = None,
        seconds: float = 0.0,
    ) -> None:
        """Wait until the previous checkpoint is published, then call `write(folder)` on an empty folder.

        A failure changes no earlier checkpoint and leaves nothing of this one.

        Args:
            score: the state's score, higher is better; None: not measured at this step.
            ranks: ranks that hash their own files; each calls `save_part` (parts.py) after it has written them in `write`.
            best: step of the checkpoint, this one or an earlier one, that a resumed run needs besides. It stays as long as this one.
            seconds: training time so far. The manifest has it, the state digest doesn't, since it differs between equal runs.
        Raises:
            NoSpace: the disk has no room for a checkpoint of the last one's size, or became full.
            SaveOverdue: the previous checkpoint isn't published by its deadline.
        """
        self.wait()
        self._check_space(step)
        aside = self.folder / f"writing-{step}"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        with self._nothing_on_failure(step, aside):
            write(aside)
        self._written = _Written(step, aside, score, tuple(ranks), best, seconds)

    def publish(self) -> None:
        """Publish the written snapshot as its step's checkpoint, in a thread; without a snapshot do nothing."""
        if self._written is None:
            return
        written, self._written = self._written, None
        done: Future[None] = Future()
        deadline = time.monotonic() + self._settings.save_timeout

        def publish() -> None:
            try:
                self._publish(written, deadline)
            except BaseException as error:  # raised by `wait`
                done.set_exception(error)
            else:
                done.set_result(None)

        # A daemon: the process can end although the disk doesn't answer.
        threading.Thread(target=publish, name="checkpoint", daemon=True).start()
        self._publishing = written, done, deadline

    def wait(self) -> None:
        """Wait until the snapshot is published.

        Raises:
            SaveFailed, OSError: it can't be published. Earlier checkpoints stay.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is None:
            return
        written, done, deadline = publishing
        try:
            done.result(timeout=max(0.0, deadline - time.monotonic()) + PATIENCE)
        except TimeoutError as error:
            if done.done():  # raised by the thread
                raise
            raise self._overdue(written, "the disk doesn't answer") from error

    def look(self) -> None:
        """Raise what `wait` would, if publishing has failed."""
        if self._publishing is not None and self._publishing[1].done():
            self.wait()

    def close(self, lost: Collection[int] = ()) -> None:
        """Wait as `wait` does at the end of failed work: an error is logged and not raised.

        Args:
            lost: ranks of `write` that died or hang; a checkpoint that lacks the files of one is abandoned.
        """
        self._lost.update(lost)
        try:
            self.wait()
        except OSError as error:
            log.error("%s", error)

    def latest(self, check: Callable[[Path], str | None] = check_checkpoint) -> Found | None:
        """Return the newest checkpoint whose files match its manifest, or None. A damaged checkpoint is logged and skipped.

        Args:
            check: returns the problem of a checkpoint's folder, or None. Several ranks can check it together, see `check_checkpoint`.
        Raises:
            ValueError: the checkpoint was made by other work, or with another ZeRO stage.
        """
        self.wait()
        for step in self._steps():
            folder = self.folder / f"step-{step}"
            problem = check(folder)
            if problem is None and (best := read_manifest(folder).get("best", step)) != step:
                problem = check(self.folder / f"step-{best}")
                problem = problem and f"its best checkpoint, of step {best}: {problem}"
            if problem is None:
                found = self._found(folder)
                self._check_origin(found)
                self._check_zero_stage(found)
                return found
            log.warning("checkpoint of step %d: %s; going back to the one before", step, problem)
        return None

    def of_step(self, step: int, check: Callable[[Path], str | None] = check_checkpoint) -> Found:
        """Return the checkpoint of a step, which must exist.

        Args:
            check: see `latest`.
        Raises:
            SaveFailed: the checkpoint is damaged. In the next run `latest` then skips the checkpoints that need it.
        """
        self.wait()
        folder = self.folder / f"step-{step}"
        if problem := check(folder):
            raise SaveFailed(f"checkpoint of step {step}: {problem}; run again: the stage resumes from one before it")
        return self._found(folder)

    def _found(self, folder: Path) -> Found:
        manifest = read_manifest(folder)
        return Found(manifest["step"], folder, manifest, self._settings.changed_since(Origin(**manifest["origin"])))

    def _publish(self, written: _Written, deadline: float) -> None:
        settings, step, aside, score = self._settings, written.step, written.aside, written.score
        if score is None or not math.isfinite(score):
            score = self._score(step)  # a run stopped before its next step saves the same state again, without a score
        with self._nothing_on_failure(step, aside):
            try:
                saved = gather(aside, written.ranks, deadline=deadline, lost=self._lost)
            except PartsOverdue as error:
                raise self._overdue(written, str(error)) from error
            except PartLost as error:
                raise SaveFailed(f"checkpoint of step {step}: abandoned ({error})") from error
            hashes = {name: found.hash for name, found in saved.items()}
            if self._write_digest is not None:
                self._write_digest(aside, step, {name: found.items for name, found in saved.items()})
                more = {p.relative_to(aside).as_posix() for p in aside.rglob("*") if p.is_file()} - hashes.keys()
                hashes |= {name: found.hash for name, found in describe(aside, more).items()}
            write_manifest(
                aside,
                {
                    "step": step,
                    "score": score,
                    "best": step if written.best is None else written.best,
                    "seconds": written.seconds,
                    "world_size": settings.world_size,
                    "zero_stage": settings.zero_stage,
                    **({"engine_ranks": settings.engine_ranks} if settings.engine_ranks else {}),
                    "origin": asdict(settings.origin),
                },
                hashes,
            )
            if (stored := StoredCheckpoint.of(aside)) is not None:
                try:
                    stored.publish(aside, hashes)
                except StorageFailed as error:
                    raise SaveFailed(f"checkpoint of step {step}: {error}") from error
            final, replaced = self.folder / f"step-{step}", self.folder / f"replaced-{step}"
            if final.exists():
                final.rename(replaced)
            aside.rename(final)
            fsync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._retire(step)

    def _retire(self, step: int) -> None:
        """Remove checkpoints beyond the limits, and those of later steps, which are damaged ones that `latest` skipped."""
        steps = self._steps()
        candidates = [s for s in steps if s <= step]
        kept = {*candidates[: self._settings.keep_last], *self._by_score(candidates)[: self._settings.keep_best]}
        needed = {self._manifest(s).get("best") for s in kept}
        for superseded in set(candidates) - kept - needed | (set(steps) - set(candidates)):
            if (stored := StoredCheckpoint.of(self.folder / f"step-{superseded}")) is not None:
                stored.remove()
            shutil.rmtree(self.folder / f"step-{superseded}")

    def _by_score(self, steps: list[int]) -> list[int]:
        """Return the steps that have a score, best first."""
        scores = {step: score for step in steps if (score := self._score(step)) is not None}
        return sorted(scores, key=lambda step: (-scores[step], step))

    def _score(self, step: int) -> float | None:
        """Return the score of a step's checkpoint; None if it has none that can be compared with this work's scores."""
        manifest = self._manifest(step)
        changed = self._settings.changed_since(Origin(**manifest["origin"])) if manifest else ()
        return None if {"best", "best_loss"} & set(changed) else manifest.get("score")

    def _manifest(self, step: int) -> dict[str, Any]:
        """Return the manifest of a step's checkpoint; an empty one if it can't be read."""
        try:
            return read_manifest(self.folder / f"step-{step}")
        except ValueError:
            return {}

    @contextlib.contextmanager
    def _nothing_on_failure(self, step: int, aside: Path) -> Iterator[None]:
        """Remove the partial checkpoint if the block fails. A full disk is reported as NoSpace."""
        try:
            yield
        except BaseException as error:  # a signal too: raised again after the removal
            free = self._free(self.folder)
            full = isinstance(error, Exception) and (_says_full(error) or free < BLOCK)
            partial = sum(p.stat().st_size for p in aside.rglob("*") if p.is_file())
            shutil.rmtree(aside, ignore_errors=True)
            if full:
                raise self._no_space(step, partial + free) from error
            raise

    def _check_space(self, step: int) -> None:
        free = self._free(self.folder)
        if free < self._last_size():
            raise self._no_space(step, free)

    def _overdue(self, written: _Written, what: str) -> SaveOverdue:
        bytes_ = sum(p.stat().st_size for p in written.aside.rglob("*") if p.is_file())
        return SaveOverdue(
            f"checkpoint of step {written.step}: expected its {bytes_shown(bytes_)} in {written.aside} to be on the disk after "
            f"{self._settings.save_timeout:.0f} s, got an unfinished save ({what}); raise checkpoints.save_timeout, or use a faster disk"
        )

    def _no_space(self, step: int, free: int) -> NoSpace:
        before, needed = next(iter(self._steps()), None), self._last_size()
        wanted, missing = (
            (f"{bytes_shown(needed)} (the size of the one before)", f", {bytes_shown(needed - free)} too little")
            if needed > free
            else ("more", "")
        )
        stays = "there is none before it" if before is None else f"the one of step {before} stays, and the stage resumes from it"
        return NoSpace(
            f"checkpoint of step {step}: expected {wanted} free on the disk of {self.folder}, got {bytes_shown(free)}{missing}; make room "
            f"and run again: {stays}"
        )

    def _last_size(self) -> int:
        """Return the bytes of the newest checkpoint, files of all ranks included; 0 if there is none."""
        for step in self._steps():
            with contextlib.suppress(ValueError):
                return sum(file["bytes"] for file in read_manifest(self.folder / f"step-{step}")["files"].values())
        return 0

    def _check_origin(self, found: Found) -> None:
        origin = Origin(**found.manifest["origin"])
        if origin in (self._settings.origin, *self._settings.accepted):
            return
        differing = " and ".join(name for name, value in asdict(origin).items() if value != getattr(self._settings.origin, name))
        raise ValueError(
            f"checkpoint {found.folder}: expected one of this work, got one that was made with other {differing}; remove it to start "
            "anew, or resume from it with checkpoints.resume_from"
        )

    def _check_zero_stage(self, found: Found) -> None:
        made, wanted = found.manifest["zero_stage"], self._settings.zero_stage
        if made != wanted:
            raise ValueError(
                f"checkpoint {found.folder}: expected one of zero_stage {wanted}, got one of {made}; set it back or begin anew"
            )

    @property
    def surely_done(self) -> int:
        """The number of steps from which work resumes at the earliest, unless more than keep_last - 1 checkpoints are damaged."""
        newest = self._steps()[: self._settings.keep_last]
        return newest[-1] if len(newest) == self._settings.keep_last else 0

    def _steps(self) -> list[int]:
        return checkpoint_steps(self.folder)


def checkpoint_steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a store's folder, complete or not, newest first."""
    names = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def _says_full(error: BaseException) -> bool:
    """Return whether an error or one of its causes is a full disk, for which torch has no error class."""
    chain: BaseException | None = error
    while chain is not None:
        full = isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(chain) or "PytorchStreamWriter failed writing" in str(chain):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _make(folder: Path) -> None:
    """Create a folder with its parents, and sync their entries to disk."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)
