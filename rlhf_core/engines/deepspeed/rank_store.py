"""One store of checkpoints for all ranks: rank 0 owns the folders, and every rank writes into them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rlhf_core.checkpoint.parts import save_part
from rlhf_core.checkpoint.store import CheckpointStore, Found
from rlhf_core.checkpoint.stored import check_checkpoint
from rlhf_core.engines.deepspeed.ranks import all_gather, from_first, is_first, on_rank_zero, rank, world_size


class RankStore:
    """A CheckpointStore whose methods every rank calls; with one rank it is that store.

    Args:
        open_store: opens the store; called on rank 0 only, since opening removes what an interrupted save left behind.
    Raises:
        RuntimeError: another rank failed; every method but `close` and `publish` raises it, with that rank's error.
    """

    def __init__(self, open_store: Callable[[], CheckpointStore]):
        self._store: CheckpointStore | None = None

        def keep() -> None:
            self._store = open_store()

        on_rank_zero(keep, subject="checkpoints")

    def latest(self) -> Found | None:
        """Return the newest intact checkpoint, as `CheckpointStore.latest` does; each rank reads a share of the files."""
        return self._checked(lambda check: self._store.latest(check))

    def of_step(self, step: int) -> Found:
        """Return the checkpoint of a step, as `CheckpointStore.of_step` does; each rank reads a share of the files."""
        return self._checked(lambda check: self._store.of_step(step, check))

    def _checked(self, find: Callable[[Callable[[Path], str | None]], Found | None]) -> Found | None:
        """Call `find(check)` on rank 0, and check the folders that it asks about on all ranks."""
        if world_size() == 1:
            return find(check_checkpoint)
        if not is_first():
            while (folder := from_first(None)) is not None:
                all_gather(check_checkpoint(folder, rank=rank(), ranks=world_size()))
            return on_rank_zero(lambda: None, subject="checkpoint")

        def check(folder: Path) -> str | None:
            return next(filter(None, all_gather(check_checkpoint(from_first(folder), ranks=world_size()))), None)

        found, failed = None, None
        try:
            found = find(check)
        except Exception as error:  # raised below, on all ranks, which wait for this one
            failed = error
        from_first(None)  # no further folder

        def result() -> Found | None:
            if failed is not None:
                raise failed
            return found

        return on_rank_zero(result, subject="checkpoint")

    def write(
        self, step: int, save: Callable[[Path], list[str]], *, score: float | None = None, best: int | None = None, seconds: float = 0.0
    ) -> None:
        """Write a checkpoint as `CheckpointStore.write` does.

        Args:
            save: function that every rank calls with the checkpoint's folder. It returns the names of the files and folders that it wrote;
                a rank
            hashes its own files in them.
        """
        if not is_first():
            told = from_first(None)
            if isinstance(told, str):
                raise RuntimeError(f"checkpoint of step {step}: expected rank 0 to make its folder, got {told}")
            _save(told, save)
            return
        begun = False

        def save_all(folder: Path) -> None:
            nonlocal begun
            begun = True
            _save(from_first(folder), save)

        try:
            ranks = range(world_size()) if world_size() > 1 else ()
            self._store.write(step, save_all, score=score, best=best, ranks=ranks, seconds=seconds)
        except Exception as error:  # of any kind: the other ranks wait for an answer
            if not begun:
                from_first(f"{type(error).__name__}: {error}")
            raise

    def publish(self) -> None:
        """Publish the checkpoint as `CheckpointStore.publish` does, on rank 0; other ranks do nothing."""
        if self._store is not None:
            self._store.publish()

    def wait(self) -> None:
        """Wait as `CheckpointStore.wait` does; other ranks wait for rank 0."""
        on_rank_zero(lambda: self._store.wait(), subject="checkpoint")

    def close(self) -> None:
        """Close rank 0's store as `CheckpointStore.close` does. No collective: work that failed on one rank closes its store too."""
        if self._store is not None:
            self._store.close()


def _save(folder: Path, save: Callable[[Path], list[str]]) -> None:
    """Call `save(folder)` on every rank, and wait for all.

    Raises:
        RuntimeError: another rank couldn't save its part.
    """
    names: list[str] = []
    failed: Exception | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)  # another node's, where ranks share no disk
        names = save(folder)
    except Exception as error:  # raised below, on all ranks, which wait for this one
        failed = error
    outcomes = all_gather(None if failed is None else f"{type(failed).__name__}: {failed}")
    if failed is not None:
        raise failed
    for number, problem in enumerate(outcomes):
        if problem is not None:
            raise RuntimeError(f"checkpoint: expected rank {number} to save its part, got {problem}")
    if world_size() > 1:
        save_part(folder, rank(), names)
