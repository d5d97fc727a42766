"""Files that are replaced as a whole, and locks between processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_core.files import lock_file, replace_text, replacing, try_lock


def test_readers_see_the_old_file_until_the_new_one_is_whole(tmp_path: Path):
    path = tmp_path / "new" / "a.txt"
    replace_text(path, "old\r\n")
    with replacing(path) as aside:
        aside.write_text("half")
        assert path.read_bytes() == b"old\r\n"
        aside.write_text("whole")
    assert path.read_text() == "whole" and list(path.parent.iterdir()) == [path]


def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path):
    path = tmp_path / "a.txt"
    replace_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as aside:
        aside.write_text("half")
        raise KeyboardInterrupt
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_do_not_write_into_each_others(tmp_path: Path):
    path = tmp_path / ("a" * 250)  # bytes; file systems allow 255
    with replacing(path) as one, replacing(path) as other:
        one.write_text("one")
        other.write_text("other")
    assert path.read_text() == "one"


@pytest.mark.parametrize(("held", "wanted", "free"), [(False, False, False), (True, True, True), (True, False, False)])
def test_a_lock_excludes_another_process_unless_both_share_it(tmp_path: Path, held: bool, wanted: bool, free: bool):
    path = tmp_path / "lock"
    program = f"from rlhf_core.files import try_lock; file = open({str(path)!r}, 'a'); print(try_lock(file, shared={wanted}))"
    with path.open("a") as file:
        assert try_lock(file, shared=held)
        printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(free)


def test_a_lock_that_stays_taken_is_reported(tmp_path: Path):
    with (tmp_path / "lock").open("a") as mine, (tmp_path / "lock").open("a") as other:
        assert try_lock(mine)
        with pytest.raises(TimeoutError, match="expected it free within 0 s, got another process at work"):
            lock_file(other, 0.1)
