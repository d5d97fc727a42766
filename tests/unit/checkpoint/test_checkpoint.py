"""CORRECTNESS, checkpoint: written aside, complete or not there, a damaged one passed over, an old one never lost to a new one."""

from __future__ import annotations

import errno
import json
import logging
import math
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.checkpoint.manifest import MANIFEST, damage
from rlhf_core.checkpoint.settings import Origin, StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore, NoSpace, SaveFailed
from rlhf_core.config import bytes_shown


def writer(text: str):
    def write(folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "weights.bin").write_bytes(text.encode() * 50)
        (folder / "driver.json").write_text(json.dumps({"text": text}))

    return write


def filled(folder: Path, steps: tuple[int, ...] = (10, 20), settings: StoreSettings | None = None) -> CheckpointStore:
    store = CheckpointStore(folder, settings)
    for step in steps:
        store.save(step, writer(f"step {step}"))
    return store


def test_nothing_saved_is_nothing_found(tmp_path: Path):
    assert CheckpointStore(tmp_path / "new").latest() is None


def test_the_newest_is_found_with_all_that_was_written(tmp_path: Path):
    settings = StoreSettings(origin=Origin("a", "b", "c"), world_size=2, zero_stage=3)
    found = filled(tmp_path, settings=settings).latest()
    assert (found.step, found.folder) == (20, tmp_path / "step-20")
    assert (found.folder / "engine" / "weights.bin").read_bytes() == b"step 20" * 50
    manifest = found.manifest
    assert (manifest["step"], manifest["complete"], manifest["world_size"], manifest["zero_stage"]) == (20, True, 2, 3)
    assert manifest["origin"] == {"config": "a", "data": "b", "code": "c"}
    assert sorted(manifest["files"]) == ["driver.json", "engine/weights.bin"]
    assert manifest["files"]["engine/weights.bin"]["bytes"] == 350


def test_steps_are_numbers_not_text(tmp_path: Path):
    store = filled(tmp_path, (9, 20, 100))
    (tmp_path / "step-of-mine").mkdir()
    assert store.latest().step == 100


def flip_a_byte(folder: Path, name: str = "engine/weights.bin", at: int = 123) -> None:
    content = bytearray((folder / name).read_bytes())
    content[at] ^= 1
    (folder / name).write_bytes(content)


def cut_short(folder: Path) -> None:
    content = (folder / "engine" / "weights.bin").read_bytes()
    (folder / "engine" / "weights.bin").write_bytes(content[:-1])


def change_manifest(folder: Path, **changes) -> None:
    manifest = json.loads((folder / MANIFEST).read_text()) | changes
    (folder / MANIFEST).write_text(json.dumps(manifest))


def manifest_of_another(folder: Path) -> None:
    (folder / MANIFEST).write_text((folder.with_name("step-10") / MANIFEST).read_text())


DAMAGE = {
    "flipped byte": (flip_a_byte, "expected engine/weights.bin as it was written, got other content"),
    "torn file": (cut_short, "expected engine/weights.bin as it was written, 350 bytes, got 349"),
    "missing file": (lambda folder: (folder / "driver.json").unlink(), "expected the file driver.json, got none"),
    "a file too many": (
        lambda folder: (folder / "engine/more.pt").write_text("?"),
        "expected only what manifest.json lists, got engine/more.pt",
    ),
    "missing manifest": (lambda folder: (folder / MANIFEST).unlink(), "expected a readable manifest.json, got FileNotFoundError"),
    "empty manifest": (lambda folder: (folder / MANIFEST).write_text(""), "expected a readable manifest.json, got JSONDecodeError"),
    "torn manifest": (
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40]),
        "expected a readable manifest.json, got JSONDecodeError",
    ),
    "manifest that is no text": (
        lambda folder: (folder / MANIFEST).write_bytes(b"\xff\x00"),
        "expected a readable manifest.json, got Unicode",
    ),
    "manifest of something else": (lambda folder: (folder / MANIFEST).write_text("[]"), "expected a readable manifest.json, got TypeError"),
    "manifest without its hash": (lambda folder: (folder / MANIFEST).write_text("{}"), "expected a readable manifest.json, got KeyError"),
    "manifest with another step": (lambda folder: change_manifest(folder, step=30), "expected manifest.json as it was written"),
    "manifest with fewer files": (lambda folder: change_manifest(folder, files={}), "expected manifest.json as it was written"),
    "manifest of another checkpoint": (manifest_of_another, "expected the manifest of step-20, got that of step-10"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str):
    store = filled(tmp_path)
    harm, message = DAMAGE[kind]
    harm(tmp_path / "step-20")
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        assert store.latest().folder == tmp_path / "step-10"
    assert message in damage(tmp_path / "step-20")
    (record,) = caplog.records
    assert "checkpoint of step 20" in record.getMessage() and message in record.getMessage()


@settings(max_examples=60)
@given(data=st.data())
def test_any_flipped_bit_anywhere_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    folder = filled(tmp_path_factory.mktemp("bits"), (10,)).folder / "step-10"
    name = data.draw(st.sampled_from(["engine/weights.bin", "driver.json", MANIFEST]))
    content = bytearray((folder / name).read_bytes())
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    content[bit // 8] ^= 1 << (bit % 8)
    (folder / name).write_bytes(content)
    assert damage(folder) is not None


def test_when_all_are_damaged_there_is_none(tmp_path: Path):
    store = filled(tmp_path)
    for step in (10, 20):
        flip_a_byte(tmp_path / f"step-{step}")
    assert store.latest() is None


def test_a_failing_write_leaves_the_earlier_ones_and_nothing_of_itself(tmp_path: Path):
    store = filled(tmp_path)

    def fail(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"half")
        raise ValueError("no such tensor")

    with pytest.raises(ValueError, match="no such tensor"):
        store.save(30, fail)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-20"]
    store.save(30, writer("again"))
    assert (store.latest().folder / "driver.json").read_text() == '{"text": "again"}'


def test_what_a_killed_process_left_goes(tmp_path: Path):
    filled(tmp_path)
    for left_over in ("writing-30", "replaced-20"):
        (tmp_path / left_over).mkdir()
        (tmp_path / left_over / "weights.bin").write_bytes(b"half")
    assert CheckpointStore(tmp_path).latest().step == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-20"]


def test_one_that_was_being_replaced_when_the_process_was_killed_comes_back(tmp_path: Path):
    filled(tmp_path)
    (tmp_path / "step-20").rename(tmp_path / "replaced-20")
    assert CheckpointStore(tmp_path).latest().step == 20
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-20"]


def test_publishing_runs_in_a_thread_whose_errors_surface_later(tmp_path: Path):
    may_go_on, digested = threading.Event(), []

    def write_digest(folder: Path, step: int, _: object) -> None:
        may_go_on.wait(60)
        if step == 20:
            raise OSError("the disk said no")
        digested.append(step)

    store = CheckpointStore(tmp_path, write_digest=write_digest)
    store.write(10, writer("ten"))
    store.publish()
    assert not (tmp_path / "step-10").exists()  # the work goes on while it waits for the event
    may_go_on.set()
    store.write(20, writer("twenty"))
    assert digested == [10] and (tmp_path / "step-10").exists()
    store.publish()
    with pytest.raises(OSError, match="the disk said no"):
        store.write(30, writer("thirty"))
    store.write(20, writer("twenty"))
    store.publish()
    with pytest.raises(OSError, match="the disk said no"):
        store.wait()
    store.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10"]


def test_nothing_is_published_before_publish(tmp_path: Path):
    store = CheckpointStore(tmp_path)
    store.publish()
    store.write(10, writer("ten"))
    store.wait()
    assert [p.name for p in tmp_path.iterdir()] == ["writing-10"]


def test_a_disk_with_less_than_the_last_ones_size_is_refused_before_anything_is_written(tmp_path: Path):
    free = {"bytes": 10**9}
    store = CheckpointStore(tmp_path, free=lambda folder: free["bytes"])
    store.save(10, writer("0123456789" * 10))  # 100 bytes 50 times, and {"text": "<100>"}, which is 12 bytes more: 5112
    free["bytes"] = 5000
    with pytest.raises(NoSpace) as raised:
        store.save(20, writer("0123456789" * 10))
    assert str(raised.value) == (
        f"checkpoint of step 20: expected 5.1 kB (the size of the one before) free on the disk of {tmp_path}, got 5.0 kB, 112 bytes too "
        "little; make room and run again: the one of step 10 stays, and the stage resumes from it"
    )
    assert [p.name for p in tmp_path.iterdir()] == ["step-10"] and damage(tmp_path / "step-10") is None
    free["bytes"] = 5112
    assert store.save(20, writer("0123456789" * 10)).exists()


@pytest.mark.parametrize("how", ["OSError", "torch"])
def test_a_disk_that_becomes_full_in_the_middle_is_named(tmp_path: Path, how: str):
    store = filled(tmp_path)

    def write(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"half")
        if how == "OSError":
            raise OSError(errno.ENOSPC, "No space left on device")
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    with pytest.raises(NoSpace, match=r"checkpoint of step 30: expected more free on the disk of .*: the one of step 20 stays"):
        store.save(30, write)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-10", "step-20"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is for root")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full_leaves_the_last_good_one(small_disk: Path):
    """1 MiB: two checkpoints of 300,000 bytes are there, the third would fit but has grown to more than what is left."""
    store = CheckpointStore(small_disk / "c")
    for step in (1, 2):
        store.save(step, lambda folder: torch.save(torch.zeros(75_000), folder / "weights.pt"))
    with pytest.raises(NoSpace, match=r"checkpoint of step 3: expected more free .*, got 4\d\d\.\d kB; .*the one of step 2 stays"):
        store.save(3, lambda folder: torch.save(torch.zeros(150_000), folder / "weights.pt"))
    assert sorted(p.name for p in store.folder.iterdir()) == ["step-1", "step-2"]
    (small_disk / "other").write_bytes(b"x" * 250_000)
    with pytest.raises(NoSpace, match=r"checkpoint of step 3: expected 30\d\.\d kB \(the size of the one before\) free .* kB too little"):
        store.save(3, lambda folder: torch.save(torch.zeros(75_000), folder / "weights.pt"))
    assert store.latest().step == 2
    (small_disk / "other").unlink()
    store.save(3, lambda folder: torch.save(torch.zeros(75_000), folder / "weights.pt"))
    assert store.latest().step == 3


def test_only_the_last_ones_stay_and_never_fewer_than_two(tmp_path: Path):
    filled(tmp_path, (1, 2, 3, 4, 5), StoreSettings(keep_last=3))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-3", "step-4", "step-5"]
    with pytest.raises(ValueError, match=r"checkpoints\.keep_last: expected at least 2, .* got 1"):
        StoreSettings(keep_last=1)


def test_the_best_ones_stay_besides(tmp_path: Path):
    store = CheckpointStore(tmp_path, StoreSettings(keep_last=2, keep_best=2))
    for step, score in ((1, 0.5), (2, 0.9), (3, math.nan), (4, 0.7), (5, None), (6, 0.1), (7, None)):
        store.save(step, writer(str(step)), score=score)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-4", "step-6", "step-7"]


def test_of_equally_good_ones_the_earliest_stays(tmp_path: Path):
    store = CheckpointStore(tmp_path, StoreSettings(keep_last=2, keep_best=1))
    for step, score in ((1, 0.5), (2, 0.9), (3, 0.7), (4, 0.9), (5, 0.1), (6, None)):
        store.save(step, writer(str(step)), score=score)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-2", "step-5", "step-6"]


def test_a_checkpoint_of_a_step_is_checked_before_it_is_used(tmp_path: Path):
    store = filled(tmp_path)
    found = store.of_step(10)
    assert (found.step, found.folder, found.manifest["best"]) == (10, tmp_path / "step-10", 10)
    flip_a_byte(tmp_path / "step-10")
    with pytest.raises(SaveFailed, match=r"checkpoint of step 10: expected engine/weights.bin as it was written, got other content; run"):
        store.of_step(10)


def test_the_same_step_again_without_a_score_keeps_the_one_it_has(tmp_path: Path):
    store = CheckpointStore(tmp_path, StoreSettings(keep_last=2, keep_best=1))
    for step, score in ((20, 0.9), (20, None), (40, 0.5), (60, 0.1), (80, 0.2)):
        store.save(step, writer(str(step)), score=score)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-20", "step-60", "step-80"]


def test_one_of_other_work_is_refused_with_what_differs_unless_it_is_accepted(tmp_path: Path):
    made, now = Origin("config", "data", "code"), Origin("config", "other data", "other code")
    filled(tmp_path, settings=StoreSettings(origin=made))
    with pytest.raises(ValueError, match=r"step-20: expected one of this work, got one that was made with other data and code; remove it"):
        CheckpointStore(tmp_path, StoreSettings(origin=now)).latest()
    assert CheckpointStore(tmp_path, StoreSettings(origin=now, accepted=(made,))).latest().step == 20


def test_one_of_another_zero_stage_is_refused(tmp_path: Path):
    filled(tmp_path, settings=StoreSettings(zero_stage=2))
    with pytest.raises(ValueError, match=r"step-20: expected one of zero_stage 0, got one of 2; set it back or begin anew"):
        CheckpointStore(tmp_path).latest()


def test_a_damaged_one_that_was_passed_over_does_not_push_out_whole_ones(tmp_path: Path):
    store = filled(tmp_path, (10, 20, 30))
    flip_a_byte(tmp_path / "step-30")
    assert store.latest().step == 20
    store.save(25, writer("redone"))
    flip_a_byte(tmp_path / "step-25")
    assert store.latest().step == 20


def test_the_same_step_again_replaces_a_damaged_one(tmp_path: Path):
    store = filled(tmp_path)
    flip_a_byte(tmp_path / "step-20")
    store.save(20, writer("redone"))
    found = store.latest()
    assert (found.step, (found.folder / "engine" / "weights.bin").read_bytes()) == (20, b"redone" * 50)


def test_sizes_have_units():
    assert [bytes_shown(n) for n in (0, 999, 1000, 1536, 10**6, 2_340_000_000)] == [
        "0 bytes",
        "999 bytes",
        "1.0 kB",
        "1.5 kB",
        "1.0 MB",
        "2.3 GB",
    ]
