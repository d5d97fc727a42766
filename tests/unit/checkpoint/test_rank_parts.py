"""Ranks hash and sync their own files; the publisher puts what they hand in into the manifest, and names one that is late."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from pathlib import Path

import pytest
import torch

from rlhf_core.checkpoint import parts
from rlhf_core.checkpoint.digest import read_digest, write_digest
from rlhf_core.checkpoint.manifest import MANIFEST, damage
from rlhf_core.checkpoint.parts import gather, save_part
from rlhf_core.checkpoint.saved_state import SavedFile
from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore, NoSpace, SaveOverdue
from rlhf_core.storage.hashing import FileHash

RANKS = range(3)


def save_rank(folder: Path, rank: int) -> None:
    (folder / "engine").mkdir(exist_ok=True)
    torch.save({"torch": torch.full((1000,), rank)}, folder / f"rng-{rank}.pt")
    (folder / "engine" / f"zero_pp_rank_{rank}_shard.bin").write_bytes(bytes([rank]) * 5000)
    if rank == 0:
        (folder / "engine" / "shared.bin").write_bytes(b"shared" * 10)


def save_and_hand_in(folder: Path, rank: int) -> None:
    """In a process of its own, as a rank."""
    save_rank(folder, rank)
    save_part(folder, rank, ["engine", f"rng-{rank}.pt", "not-there.pt"]).join()


def write(folder: Path) -> None:
    processes = [multiprocessing.get_context("fork").Process(target=save_and_hand_in, args=(folder, rank)) for rank in RANKS]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    (folder / "driver.json").write_text("{}")


def saved(folder: Path, *, by_ranks: bool) -> Path:
    store = CheckpointStore(folder, StoreSettings(world_size=3), write_digest=write_digest)
    store.write(1, write if by_ranks else lambda aside: [save_rank(aside, rank) for rank in RANKS], ranks=RANKS if by_ranks else ())
    store.publish()
    store.wait()
    return folder / "step-1"


def test_a_checkpoint_hashed_by_its_ranks_is_the_one_that_a_single_process_hashes(tmp_path: Path):
    by_ranks, alone = saved(tmp_path / "ranks", by_ranks=True), saved(tmp_path / "alone", by_ranks=False)
    assert damage(by_ranks) is None and damage(alone) is None
    files = [json.loads((folder / MANIFEST).read_text())["files"] for folder in (by_ranks, alone)]
    assert files[0].pop("driver.json")["bytes"] == 2
    for found in files:
        del found["digest.json"]  # of one more file
    assert files[0] == files[1] and len(files[0]) == 7
    digests = [read_digest(folder)["parts"] for folder in (by_ranks, alone)]
    assert digests[0]["generators"] == digests[1]["generators"] and set(digests[0]["generators"]) == {f"torch on rank {r}" for r in RANKS}
    assert not list(by_ranks.glob("part-*"))


def test_the_publisher_reads_no_file_of_a_rank_that_handed_it_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    described = []
    real = parts.describe
    (tmp_path / "step").mkdir()
    write(tmp_path / "step")
    monkeypatch.setattr(parts, "describe", lambda folder, names: described.extend(names) or real(folder, names))
    found = gather(tmp_path / "step", RANKS, deadline=time.monotonic() + 60)
    assert described == ["driver.json"] and len(found) == 8


def test_handed_in_hashes_of_a_checkpoint_that_is_damaged_on_the_way_are_noticed_by_the_rank_that_checks_the_file(tmp_path: Path):
    folder = saved(tmp_path, by_ranks=True)
    shard = folder / "engine" / "zero_pp_rank_1_shard.bin"
    shard.write_bytes(b"x" + shard.read_bytes()[1:])
    found = [damage(folder, rank=rank, ranks=3) for rank in RANKS]
    assert found == [None, "expected engine/zero_pp_rank_1_shard.bin as it was written, got other content", None]
    assert [damage(folder, rank=rank, ranks=2) for rank in range(2)] == [None, found[1]]  # resumed with fewer
    (folder / "engine" / "shared.bin").unlink()
    assert damage(folder, rank=0, ranks=3) == "expected the file engine/shared.bin, got none"
    assert damage(folder, rank=2, ranks=3) is None


def test_a_rank_that_hands_nothing_in_is_named_after_the_deadline_with_folder_and_bytes(tmp_path: Path):
    store = CheckpointStore(tmp_path, StoreSettings(save_timeout=0.3))
    store.save(1, lambda folder: save_rank(folder, 0))
    store.write(2, lambda folder: [save_rank(folder, 0), save_part(folder, 0, ["engine", "rng-0.pt"]).join()], ranks=(0, 1))
    store.publish()
    with pytest.raises(SaveOverdue) as raised:
        store.wait()
    assert str(raised.value).startswith("checkpoint of step 2: expected its ")
    assert f"in {tmp_path / 'writing-2'} to be on the disk after 0 s, got an unfinished save (rank 1: no hashes of its files)" in str(
        raised.value
    )
    assert str(raised.value).endswith("raise checkpoints.save_timeout, or use a faster disk")
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_the_part_of_a_rank_that_is_lost_is_not_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    store = CheckpointStore(tmp_path, StoreSettings(save_timeout=600))
    store.save(1, lambda folder: save_rank(folder, 0))
    store.write(2, lambda folder: [save_rank(folder, 0), save_part(folder, 0, ["engine", "rng-0.pt"]).join()], ranks=(0, 1))
    store.publish()
    began = time.monotonic()
    store.close(lost={1})
    assert time.monotonic() - began < 10
    assert caplog.messages == ["checkpoint of step 2: abandoned (rank 1: lost before its files were hashed)"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-1"]


def test_the_part_that_a_rank_handed_in_before_it_was_lost_counts(tmp_path: Path):
    store = CheckpointStore(tmp_path, StoreSettings(world_size=3, save_timeout=60))
    store.write(1, write, ranks=RANKS)
    store.publish()
    store.close(lost={0, 2})
    assert damage(tmp_path / "step-1") is None


def test_a_disk_that_does_not_answer_is_an_error_and_does_not_hold_the_process(tmp_path: Path):
    """The digest blocks here, as a read or fsync does on a file system that is gone."""
    released = threading.Event()
    store = CheckpointStore(tmp_path, StoreSettings(save_timeout=0.2), write_digest=lambda *_: released.wait(30))
    store.write(1, lambda folder: save_rank(folder, 0))
    store.publish()
    began = time.monotonic()
    with pytest.raises(SaveOverdue, match=r"checkpoint of step 1: expected its .* kB in .*writing-1 .* \(the disk doesn't answer\)"):
        store.write(2, lambda folder: save_rank(folder, 0))
    assert time.monotonic() - began < 10
    assert all(thread.daemon for thread in threading.enumerate() if thread.name in ("checkpoint", "hashing"))
    released.set()


def test_a_full_disk_of_a_rank_is_a_full_disk_of_the_checkpoint(tmp_path: Path):
    def write_part(folder: Path) -> None:
        save_rank(folder, 0)
        (folder / "part-0.json").write_text(json.dumps({"names": ["rng-0.pt"], "error": "[Errno 28] No space left on device", "errno": 28}))

    store = CheckpointStore(tmp_path)
    store.write(1, write_part, ranks=(0,))
    store.publish()
    with pytest.raises(NoSpace, match="checkpoint of step 1: expected more free on the disk"):
        store.wait()


def test_a_checkpoint_of_several_ranks_needs_room_for_the_files_of_all(tmp_path: Path):
    free = {"bytes": 10**9}
    store = CheckpointStore(tmp_path, StoreSettings(world_size=3), free=lambda folder: free["bytes"])
    store.write(1, write, ranks=RANKS)
    store.publish()
    store.wait()
    needed = sum(p.stat().st_size for p in (tmp_path / "step-1").rglob("*") if p.is_file() and p.name != MANIFEST)
    assert needed > 3 * 5000
    free["bytes"] = needed - 1
    with pytest.raises(NoSpace, match=r"checkpoint of step 2: expected .* \(the size of the one before\) free .*, 1 bytes too little"):
        store.write(2, write, ranks=RANKS)
    free["bytes"] = needed
    store.write(2, write, ranks=RANKS)


def test_what_is_handed_in_comes_back_as_it_was():
    found = SavedFile(FileHash(3, "ab", (1, 3)), [("counters", "steps", 3), ("weights", "w", "sha256:00"), ("statistics", "x", None)])
    assert SavedFile.from_json(json.loads(json.dumps(found.as_json()))) == found
