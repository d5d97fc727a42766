"""Checkpoints that are complete or absent: written aside, fsynced, renamed, with a manifest of sizes and hashes.

Saving has two halves. `write` takes the snapshot; training continues when it returns. `publish` does the rest in a thread: state digest,
hashes, fsync, renaming, retention. The next `write` or `wait` raises the errors of that thread. docs/resume.md has the format.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlhf_core.checkpoint.manifest import damage, fsync, read_manifest, write_manifest

log = logging.getLogger("rlhf")

BLOCK = 4096  # bytes; a disk with less is full


class NoSpace(OSError):
    """The disk has no room for a checkpoint; the message says how much is missing and what stays."""


@dataclass(frozen=True)
class Origin:
    """The work that a checkpoint belongs to: hashes of its configuration, data and code."""

    config: str = ""
    data: str = ""
    code: str = ""


@dataclass(frozen=True)
class StoreSettings:
    """What a store keeps and accepts.

    keep_last: how many of the newest whole checkpoints stay; at least 2, so that a damaged newest one has one before it.
    keep_best: how many of those with the best scores stay besides.
    origin: of the work at hand. accepted: further origins whose checkpoints are loaded.
    world_size, zero_stage: of the engines, for the manifest.
    """

    keep_last: int = 2
    keep_best: int = 0
    origin: Origin = Origin()
    accepted: tuple[Origin, ...] = ()
    world_size: int = 1
    zero_stage: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 2:
            raise ValueError(
                "checkpoints.keep_last: expected at least 2, so that a damaged newest one has one before it, got "
                f"{self.keep_last}; raise it"
            )


@dataclass(frozen=True)
class Found:
    """A whole checkpoint, and what its manifest says."""

    step: int
    folder: Path
    manifest: dict[str, Any]


class CheckpointStore:
    """The step checkpoints of one piece of work, `<folder>/step-<n>`.

    Args:
        folder: made if it isn't there; left-overs of an interrupted save are removed.
        write_digest: writes a state digest into the folder of a checkpoint, given its step (rlhf_core/checkpoint/digest.py).
        free: bytes that are free on the disk of a folder.
    """

    def __init__(
        self,
        folder: Path,
        settings: StoreSettings | None = None,
        *,
        write_digest: Callable[[Path, int], None] | None = None,
        free: Callable[[Path], int] | None = None,
    ):
        self.folder = folder
        self._settings = settings or StoreSettings()
        self._write_digest = write_digest
        self._free = free or free_bytes
        self._written: tuple[int, Path, float | None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._publishing: Future[None] | None = None
        _make(folder)
        for left_over in folder.glob("writing-*"):
            shutil.rmtree(left_over)
        for replaced in folder.glob("replaced-*"):  # of a process that was killed between the two renames it is all there is
            step = replaced.with_name(replaced.name.replace("replaced-", "step-"))
            if step.exists():
                shutil.rmtree(replaced)
            else:
                replaced.rename(step)

    def save(self, step: int, write: Callable[[Path], None], *, score: float | None = None) -> Path:
        """`write`, `publish` and `wait` in one. Returns the checkpoint's folder."""
        self.write(step, write, score=score)
        self.publish()
        self.wait()
        return self.folder / f"step-{step}"

    def write(self, step: int, write: Callable[[Path], None], *, score: float | None = None) -> None:
        """Wait for the checkpoint before to be published, then call `write(folder)` on an empty folder.

        A failure leaves every earlier checkpoint as it was, and nothing of this one.

        Args:
            score: of the state, higher is better; None: not measured at this step.
        Raises:
            NoSpace: the disk is too full for another of the last one's size, or became full.
        """
        self.wait()
        self._check_space(step)
        aside = self.folder / f"writing-{step}"
        if aside.exists():
            shutil.rmtree(aside)
        aside.mkdir()
        with self._nothing_on_failure(step, aside):
            write(aside)
        self._written = step, aside, score

    def publish(self) -> None:
        """Make what was written the checkpoint of its step, in a thread; nothing to do where nothing was written."""
        if self._written is None:
            return
        written, self._written = self._written, None
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._publishing = self._thread.submit(self._publish, *written)

    def wait(self) -> None:
        """Until what is being published is there.

        Raises:
            NoSpace, OSError: it can't be. The checkpoints before it stay.
        """
        publishing, self._publishing = self._publishing, None
        if publishing is not None:
            publishing.result()

    def close(self) -> None:
        """Wait, and end the thread. For the end of work that has failed: what `wait` would raise goes to the log here."""
        try:
            self.wait()
        except OSError as error:
            log.error("%s", error)
        if self._thread is not None:
            self._thread.shutdown()

    def latest(self) -> Found | None:
        """The newest checkpoint whose files are all as its manifest says; a damaged one is named in the log and passed over.

        Raises:
            ValueError: it was made by other work than this, or with another ZeRO stage.
        """
        self.wait()
        for step in self._steps():
            folder = self.folder / f"step-{step}"
            problem = damage(folder)
            if problem is None:
                found = Found(step, folder, read_manifest(folder))
                self._check_origin(found)
                self._check_zero_stage(found)
                return found
            log.warning("checkpoint of step %d: %s; going back to the one before", step, problem)
        return None

    def _publish(self, step: int, aside: Path, score: float | None) -> None:
        settings = self._settings
        if score is None or not math.isfinite(score):
            score = self._score(step)  # a run that is stopped before its next step saves the same state again, and has no score for it
        with self._nothing_on_failure(step, aside):
            if self._write_digest is not None:
                self._write_digest(aside, step)
            write_manifest(
                aside,
                {
                    "step": step,
                    "score": score,
                    "world_size": settings.world_size,
                    "zero_stage": settings.zero_stage,
                    "origin": asdict(settings.origin),
                },
            )
            final, replaced = self.folder / f"step-{step}", self.folder / f"replaced-{step}"
            if final.exists():
                final.rename(replaced)
            aside.rename(final)
            fsync(self.folder)
        shutil.rmtree(replaced, ignore_errors=True)
        self._retire(step)

    def _retire(self, step: int) -> None:
        """Remove what isn't to be kept. Later steps are damaged ones that `latest` passed over: they mustn't take the place of others."""
        keep_last, keep_best = self._settings.keep_last, self._settings.keep_best
        steps = self._steps()
        candidates = [s for s in steps if s <= step]
        scores = {s: score for s in candidates if keep_best and (score := self._score(s)) is not None}
        best = sorted(scores, key=lambda s: scores[s], reverse=True)[:keep_best]
        for superseded in set(steps) - set(candidates[:keep_last]) - set(best):
            shutil.rmtree(self.folder / f"step-{superseded}")

    def _score(self, step: int) -> float | None:
        try:
            return read_manifest(self.folder / f"step-{step}")["score"]
        except ValueError:
            return None

    @contextlib.contextmanager
    def _nothing_on_failure(self, step: int, aside: Path) -> Iterator[None]:
        """Removes a partial checkpoint when the block fails; that the disk is full is said in words then."""
        try:
            yield
        except BaseException as error:
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

    def _no_space(self, step: int, free: int) -> NoSpace:
        before, needed = next(iter(self._steps()), None), self._last_size()
        wanted, missing = (
            (f"{size(needed)} (the size of the one before)", f", {size(needed - free)} too little") if needed > free else ("more", "")
        )
        stays = "there is none before it" if before is None else f"the one of step {before} stays, and the stage resumes from it"
        return NoSpace(
            f"checkpoint of step {step}: expected {wanted} free on the disk of {self.folder}, got {size(free)}{missing}; make room and "
            f"run again: {stays}"
        )

    def _last_size(self) -> int:
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

    def _steps(self) -> list[int]:
        return checkpoint_steps(self.folder)


def checkpoint_steps(folder: Path) -> list[int]:
    """Of the checkpoints in a store's folder, whole or not, newest first."""
    names = (p.name.removeprefix("step-") for p in folder.glob("step-*"))
    return sorted((int(name) for name in names if name.isdigit()), reverse=True)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def size(count: int) -> str:
    """1536 as "1.5 kB"."""
    if count < 1000:
        return f"{count} bytes"
    power = min(4, int(math.log(count, 1000)))
    return f"{count / 1000**power:.1f} {('kB', 'MB', 'GB', 'TB')[power - 1]}"


def _says_full(error: BaseException) -> bool:
    """Whether an error, or what it came from, is a full disk; torch has no error of its own for it."""
    chain: BaseException | None = error
    while chain is not None:
        full = isinstance(chain, OSError) and chain.errno in (errno.ENOSPC, errno.EDQUOT)
        if full or "No space left" in str(chain) or "PytorchStreamWriter failed writing" in str(chain):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


def _make(folder: Path) -> None:
    """A folder that is on the disk with all that lead to it."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        fsync(path.parent)
