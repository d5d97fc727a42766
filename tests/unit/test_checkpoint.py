"""CORRECTNESS, checkpoint: written aside, complete or not there, a damaged one passed over, an old one never lost to a new one."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from rlhf_core.checkpoint import MANIFEST, CheckpointStore, damage


def writer(text: str):
    def write(folder: Path) -> None:
        (folder / "engine").mkdir()
        (folder / "engine" / "weights.bin").write_bytes(text.encode() * 50)
        (folder / "driver.json").write_text(json.dumps({"text": text}))

    return write


def filled(folder: Path, steps: tuple[int, ...] = (10, 20), keep_last: int = 2) -> CheckpointStore:
    store = CheckpointStore(folder, keep_last=keep_last)
    for step in steps:
        store.save(step, writer(f"step {step}"))
    return store


def test_nothing_saved_is_nothing_found(tmp_path: Path):
    assert CheckpointStore(tmp_path / "new").latest() is None


def test_the_newest_is_found_with_all_that_was_written(tmp_path: Path):
    step, folder = filled(tmp_path).latest()
    assert step == 20
    assert (folder / "engine" / "weights.bin").read_bytes() == b"step 20" * 50
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["step"] == 20
    assert sorted(manifest["files"]) == ["driver.json", "engine/weights.bin"]
    assert manifest["files"]["engine/weights.bin"]["bytes"] == 350


def test_steps_are_numbers_not_text(tmp_path: Path):
    assert filled(tmp_path, (9, 20, 100)).latest()[0] == 100


def flip_a_byte(folder: Path) -> None:
    content = bytearray((folder / "engine" / "weights.bin").read_bytes())
    content[123] ^= 1
    (folder / "engine" / "weights.bin").write_bytes(content)


def cut_short(folder: Path) -> None:
    content = (folder / "engine" / "weights.bin").read_bytes()
    (folder / "engine" / "weights.bin").write_bytes(content[:-1])


DAMAGE = {
    "flipped byte": (flip_a_byte, "expected engine/weights.bin as it was written"),
    "torn file": (cut_short, "expected engine/weights.bin as it was written"),
    "missing file": (lambda folder: (folder / "driver.json").unlink(), "expected the file driver.json, got none"),
    "missing manifest": (lambda folder: (folder / MANIFEST).unlink(), "expected a readable manifest.json, got FileNotFoundError"),
    "torn manifest": (
        lambda folder: (folder / MANIFEST).write_text((folder / MANIFEST).read_text()[:40]),
        "expected a readable manifest.json, got JSONDecodeError",
    ),
    "manifest of something else": (lambda folder: (folder / MANIFEST).write_text("[]"), "expected a readable manifest.json, got TypeError"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str):
    store = filled(tmp_path)
    harm, message = DAMAGE[kind]
    harm(tmp_path / "step-20")
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        assert store.latest() == (10, tmp_path / "step-10")
    assert message in damage(tmp_path / "step-20")
    (record,) = caplog.records
    assert "checkpoint of step 20" in record.getMessage() and message in record.getMessage()


def test_when_all_are_damaged_there_is_none(tmp_path: Path):
    store = filled(tmp_path)
    for step in (10, 20):
        flip_a_byte(tmp_path / f"step-{step}")
    assert store.latest() is None


def test_a_failing_write_leaves_the_earlier_ones_and_its_remains_go(tmp_path: Path):
    store = filled(tmp_path)

    def full_disk(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        store.save(30, full_disk)
    assert store.latest()[0] == 20
    assert damage(tmp_path / "step-10") is None
    assert (tmp_path / "writing-30").exists()
    assert CheckpointStore(tmp_path).latest()[0] == 20
    assert not list(tmp_path.glob("writing-*"))
    store.save(30, writer("again"))
    assert (store.latest()[1] / "driver.json").read_text() == '{"text": "again"}'


def test_only_the_last_ones_stay(tmp_path: Path):
    filled(tmp_path / "three", (1, 2, 3, 4, 5), keep_last=3)
    assert sorted(p.name for p in (tmp_path / "three").iterdir()) == ["step-3", "step-4", "step-5"]
    filled(tmp_path / "one", (1, 2, 3), keep_last=1)
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == ["step-2", "step-3"]


def test_a_damaged_one_that_was_passed_over_does_not_push_out_whole_ones(tmp_path: Path):
    store = filled(tmp_path, (10, 20, 30))
    flip_a_byte(tmp_path / "step-30")
    assert store.latest()[0] == 20
    store.save(25, writer("redone"))
    flip_a_byte(tmp_path / "step-25")
    assert store.latest()[0] == 20


def test_the_same_step_again_replaces_a_damaged_one(tmp_path: Path):
    store = filled(tmp_path)
    flip_a_byte(tmp_path / "step-20")
    store.save(20, writer("redone"))
    step, folder = store.latest()
    assert (step, (folder / "engine" / "weights.bin").read_bytes()) == (20, b"redone" * 50)
