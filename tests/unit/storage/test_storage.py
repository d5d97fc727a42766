"""Files in a storage: whole, verified, written once; a node's copy of the project's folder."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from rlhf_core.storage import address, node
from rlhf_core.storage.address import Storage, StorageFailed, StorageRefused
from rlhf_core.storage.clean import clean
from rlhf_core.storage.files import download, hash_files, index_bytes, sha256_of, upload
from rlhf_core.storage.node import INPUTS, JobFiles, enter
from rlhf_core.storage.packages import differences, found_here, wanted
from rlhf_core.storage.work import OUTPUTS, JobStorage, RemoteNote


@pytest.fixture(autouse=True)
def folder(tmp_path):
    (tmp_path / "storage").mkdir()


@pytest.fixture(params=["file", "memory"])
def storage(request, tmp_path) -> Storage:
    """A folder, and an object store of fsspec."""
    name = f"{request.param}://{tmp_path}/storage" if request.param == "file" else f"memory://bucket{tmp_path}"
    return Storage(name, timeout=20)


@pytest.fixture
def entered(monkeypatch):
    """`enter` as in new processes: a function that makes this process one."""
    monkeypatch.setattr(node, "_entered", None)
    monkeypatch.chdir(os.getcwd())

    def anew(files: JobFiles) -> JobStorage:
        node._entered = None  # closes the lock of the process before
        for name, value in files.as_environment().items():
            monkeypatch.setenv(name, value)
        return enter()

    return anew


def write(folder: Path, **files: str) -> dict[str, Path]:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return {name: folder / name for name in files}


def job(storage: Storage, folder: Path, files: dict[str, Path], *, limit: int = 1 << 30) -> JobFiles:
    index = hash_files(files)
    upload(storage, INPUTS, files, index)
    content = index_bytes(index)
    storage.put_note(f"{INPUTS}/{sha256_of(content)}", content)
    url = f"file://{storage.folder}"
    return JobFiles(url, "train_sft/0123-ab", sha256_of(content), {}, "1", str(folder), limit, 20.0)


def test_notes_and_files_are_read_as_they_were_written(storage, tmp_path):
    (tmp_path / "large").write_bytes(bytes(range(256)) * 40)
    storage.put([(tmp_path / "large", "a/b/large")])
    storage.put_note("a/note", b"told")
    storage.get([("a/b/large", 10240, tmp_path / "again")])
    assert (tmp_path / "again").read_bytes() == (tmp_path / "large").read_bytes()
    assert storage.note("a/note") == b"told" and storage.note("a/none") is None
    assert storage.sizes("a") == {"b/large": 10240, "note": 4} and storage.sizes("nowhere") == {}
    storage.copy([("a/note", "c/note")])
    storage.remove(["a/note", "a/none"])
    storage.remove_folder("a/b")
    storage.remove_folder("nowhere")
    assert storage.sizes("a") == {} and storage.note("c/note") == b"told"


def test_files_longer_than_a_block_are_read_in_parts(storage, tmp_path, monkeypatch):
    monkeypatch.setattr(address, "BLOCK", 1000)
    (tmp_path / "long").write_bytes(os.urandom(3456))
    storage.put([(tmp_path / "long", "long")])
    storage.get([("long", 3456, tmp_path / "again")])
    assert (tmp_path / "again").read_bytes() == (tmp_path / "long").read_bytes()


def test_what_is_there_is_not_written_again(storage, tmp_path):
    files = write(tmp_path / "in", one="1", two="22", same="1")
    index = hash_files(files)
    assert upload(storage, "set", files, index) == 3  # bytes: two of the three files have the same content
    assert upload(storage, "set", files, index) == 0
    download(storage, "set", index, tmp_path / "out")
    assert {p.name: p.read_text() for p in (tmp_path / "out").iterdir()} == {"one": "1", "two": "22", "same": "1"}


def test_a_file_with_other_content_is_refused_and_none_appears(storage, tmp_path):
    files = write(tmp_path / "in", one="1")
    index = hash_files(files)
    storage.put_note(f"set/{index['one'].sha256}", b"2")
    with pytest.raises(StorageFailed, match="expected one as it was written, got other content"):
        download(storage, "set", index, tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_name_outside_the_folder_is_refused(storage, tmp_path):
    files = write(tmp_path / "in", one="1")
    upload(storage, "set", files, hash_files(files))
    with pytest.raises(StorageFailed, match="below the folder"):
        download(storage, "set", {"../one": hash_files(files)["one"]}, tmp_path / "out")


def test_a_storage_that_does_not_answer_is_told_by_its_deadline(tmp_path):
    storage = Storage(f"file://{tmp_path}/storage", timeout=0.2)
    os.mkfifo(tmp_path / "storage/pipe")  # opening it waits for a writer
    with pytest.raises(StorageFailed, match=r"expected 1 files read within 0 s, got no answer"):
        storage.get([("pipe", 0, tmp_path / "out")])


NEVER_ANSWERED = """
import sys
from pathlib import Path
from rlhf_core.storage.address import Storage, StorageFailed

storage = Storage(sys.argv[1], timeout=1.0)
try:
    storage.get([("pipe", 0, Path(sys.argv[2]))] * 3)
except StorageFailed as error:
    sys.exit(str(error))
"""


def test_a_process_ends_although_a_storage_never_answers(tmp_path):
    os.mkfifo(tmp_path / "storage/pipe")
    command = [sys.executable, "-c", NEVER_ANSWERED, f"file://{tmp_path}/storage", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 1 and "expected 3 files read within 1 s, got no answer" in done.stderr


def test_after_a_failure_no_further_call_is_begun(tmp_path):
    storage, begun = Storage(f"file://{tmp_path}/storage", timeout=20), []

    def fail(number: int) -> None:
        begun.append(number)
        raise OSError(f"call {number}")

    with pytest.raises(StorageFailed, match=r"expected 100 calls made, got OSError: call \d"):
        storage._all([partial(fail, number) for number in range(100)], "calls made")
    assert 1 <= len(begun) <= address.THREADS


def test_a_failure_is_raised_while_another_call_hangs(tmp_path):
    storage, released = Storage(f"file://{tmp_path}/storage", timeout=20), threading.Event()

    def fail() -> None:
        raise PermissionError("no access")

    began = time.monotonic()
    with pytest.raises(StorageFailed, match="expected 2 calls made, got PermissionError: no access"):
        storage._all([lambda: released.wait(30) and None, fail], "calls made")
    assert time.monotonic() - began < 10
    released.set()


def test_an_address_that_nothing_reads_is_refused_without_its_query():
    with pytest.raises(StorageFailed, match="got nowhere://bucket/x, which fails") as refused:
        Storage("nowhere://bucket/x?secret_key=abc", timeout=1)
    assert "abc" not in str(refused.value)


def test_a_check_leaves_nothing_behind(storage):
    storage.check()
    assert storage.sizes("") == {}


def test_a_storage_that_cannot_be_written_is_refused_by_its_check(tmp_path):
    storage = Storage(f"file://{tmp_path}", timeout=20)
    storage.folder = f"{tmp_path}/file"
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageRefused, match=r"expected to write, read and remove a file in .*, got .*Error: .*flow.environment"):
        storage.check()


def test_a_local_folder_must_exist_and_is_not_made(tmp_path):
    with pytest.raises(StorageRefused, match=f"expected the folder {tmp_path}/mount on every node, got none on {platform.node()}"):
        Storage(f"file://{tmp_path}/mount", timeout=20)
    assert not (tmp_path / "mount").exists()


def test_a_set_is_replaced_as_a_whole(storage, tmp_path):
    mine, theirs = JobStorage(storage, "w", tmp_path / "mine"), JobStorage(storage, "w", tmp_path / "theirs")
    write(tmp_path / "mine/work", curves="1", model="m")
    assert not theirs.pull(OUTPUTS)
    mine.outputs.append(Path("work"))
    mine.push_outputs()
    write(tmp_path / "mine/work", curves="1 2")
    mine.push_outputs()
    assert theirs.pull(OUTPUTS) and (tmp_path / "theirs/work/curves").read_text() == "1 2"
    assert len(storage.sizes(f"w/{OUTPUTS}")) == 3  # two files and the index
    (tmp_path / "theirs/work/model").write_text("x")
    theirs.pull(OUTPUTS)
    assert (tmp_path / "theirs/work/model").read_text() == "m"


def test_inputs_are_removed_unless_a_job_is_at_work_and_come_back_with_the_next(storage, tmp_path):
    files = write(tmp_path / "in", one="1", two="22")
    index = hash_files(files)
    upload(storage, INPUTS, files, index)
    storage.put_note("train_sft/ab-1/pulse", b"7")
    storage.put_note("train_sft/ab-1/checkpoints/step-1/manifest.json", b"{}")
    done = threading.Event()

    def beat() -> None:
        count = 8
        while not done.wait(0.05):
            count += 1
            storage.put_note("train_sft/ab-1/pulse", str(count).encode())

    driver = threading.Thread(target=beat)
    driver.start()
    try:
        with pytest.raises(ValueError, match="expected no job at work, got train_sft/ab-1; wait for it or stop it"):
            clean(storage, watched=1.0)
    finally:
        done.set()
        driver.join()
    assert len(storage.sizes(INPUTS)) == 2
    assert "removed 2 files of inputs/" in clean(storage, watched=0.2)
    assert storage.sizes(INPUTS) == {} and len(storage.sizes("train_sft")) == 2
    assert upload(storage, INPUTS, files, index) == 3


def test_a_note_is_read_again_after_its_seconds_only(storage, tmp_path):
    work = JobStorage(storage, "w", tmp_path)
    note = RemoteNote(work, "pulse", seconds=0.0)
    assert not note.exists()
    work.put_note("pulse", b"1")
    assert note.read_bytes() == b"1"
    slow = RemoteNote(work, "pulse", seconds=60.0)
    slow.read_bytes()
    work.put_note("pulse", b"2")
    assert (slow.read_bytes(), note.read_bytes()) == (b"1", b"2")


def test_a_node_gets_each_input_once_and_shares_it_among_processes(tmp_path, entered):
    storage = Storage(f"file://{tmp_path}/storage", timeout=20)
    files = job(storage, tmp_path / "node", write(tmp_path / "in", **{"data/rows": "r", "models/sft/weights": "w"}))
    work = entered(files)
    assert Path.cwd() == work.root and Path("data/rows").read_text() == "r"
    assert Path("rlhf_core/storage/node.py").samefile(node.__file__) and Path("params.yaml").exists()
    storage.remove_folder(INPUTS)
    storage.put_note(
        f"{INPUTS}/{files.inputs}",
        index_bytes(hash_files(write(tmp_path / "in", **{"data/rows": "r"}) | {"models/sft/weights": tmp_path / "in/models/sft/weights"})),
    )
    entered(files)  # from the node's copy
    assert Path("models/sft/weights").read_text() == "w"


def test_a_changed_input_replaces_the_link_and_leaves_outputs(tmp_path, entered):
    storage = Storage(f"file://{tmp_path}/storage", timeout=20)
    work = entered(job(storage, tmp_path / "node", write(tmp_path / "in", rows="old")))
    (work.root / "curves").write_text("kept")
    entered(job(storage, tmp_path / "node", write(tmp_path / "in", rows="new")))
    assert Path("rows").read_text() == "new" and Path("curves").read_text() == "kept"


def test_a_damaged_input_is_refused(tmp_path, entered):
    storage = Storage(f"file://{tmp_path}/storage", timeout=20)
    paths = write(tmp_path / "in", rows="old")
    files = job(storage, tmp_path / "node", paths)
    storage.put_note(f"{INPUTS}/{hash_files(paths)['rows'].sha256}", b"new")
    with pytest.raises(StorageFailed, match="as it was written"):
        entered(files)
    with pytest.raises(StorageFailed, match="expected the job's inputs, got none"):
        entered(replace(files, inputs="0" * 64))


def test_what_no_process_uses_makes_room(tmp_path, entered):
    storage = Storage(f"file://{tmp_path}/storage", timeout=20)
    first = job(storage, tmp_path / "node", write(tmp_path / "in", rows="x" * 5000))
    root = entered(first).root
    second = replace(job(storage, tmp_path / "node", write(tmp_path / "in", rows="y" * 5000), limit=6000), work="train_sft/4567-cd")
    entered(second)  # the first process has ended: its lock is closed with it
    assert not root.exists() and Path("rows").read_text() == "y" * 5000
    assert len(list((tmp_path / "node/objects").iterdir())) == 1


def test_a_folder_that_others_can_write_is_refused(tmp_path, entered):
    storage = Storage(f"file://{tmp_path}/storage", timeout=20)
    files = job(storage, tmp_path / "node", write(tmp_path / "in", rows="x"))
    (tmp_path / "node").mkdir()
    (tmp_path / "node").chmod(0o777)
    with pytest.raises(StorageFailed, match="only this user can write"):
        entered(files)


def test_processes_of_a_node_that_start_together_fetch_once(tmp_path, monkeypatch):
    storage = Storage(f"file://{tmp_path}/storage", timeout=20)
    files = job(storage, tmp_path / "node", write(tmp_path / "in", rows="x"))
    fetched, fetch = [], node.download
    monkeypatch.setattr(node, "download", lambda *given: (fetched.append(given), fetch(*given)))
    threads = [threading.Thread(target=node._enter, args=(files,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(fetched) == 1


def test_without_a_storage_the_shared_folder_becomes_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.delenv(node.ENVIRONMENT, raising=False)
    monkeypatch.chdir(os.getcwd())
    assert enter(tmp_path) is None and Path.cwd() == tmp_path


def test_a_node_with_other_packages_is_told_which():
    needed = {"python": "3.11", "torch": "2.13.0", "vllm": "", "peft": "0.17"}
    assert differences(needed, needed) == []
    assert differences(needed, {"python": "3.11", "torch": "2.11.0", "vllm": "0.26"}) == [
        "torch 2.11.0 instead of 2.13.0",
        "peft is missing",
    ]
    here = wanted(["json"])
    assert here["json"] == "" and "+" not in here["torch"] and differences(here, found_here(here)) == []


def test_the_environment_of_a_job_survives_and_has_no_more_than_its_fields(tmp_path):
    files = JobFiles("s3://bucket/x", "train_sft/1", "ab", {"torch": "2"}, "1", None, 5, 1.0)
    assert JobFiles.read(files.as_environment()) == files
    assert set(json.loads(files.as_environment()[node.ENVIRONMENT])) == set(vars(files))
