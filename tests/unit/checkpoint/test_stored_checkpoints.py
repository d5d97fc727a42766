"""Checkpoints of ranks on nodes that share no disk: complete or absent in the storage, and verified where they are brought."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from rlhf_core.checkpoint.parts import save_part
from rlhf_core.checkpoint.settings import StoreSettings
from rlhf_core.checkpoint.store import CheckpointStore, SaveFailed
from rlhf_core.checkpoint.stored import check_checkpoint, download_folder, download_for_driver, remove_folder, upload_folder
from rlhf_core.checkpoint.torch_file import check_torch_file
from rlhf_core.storage import node
from rlhf_core.storage.address import Storage, StorageFailed
from rlhf_core.storage.node import JobFiles
from rlhf_core.storage.work import JobStorage

STORE = Path("scratch/train_sft/0123/sft")


class Cluster:
    """Nodes with folders of their own; `on` makes this process one of a node."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        self._folder, self._monkeypatch = folder, monkeypatch
        (folder / "storage").mkdir()
        self.storage = Storage(f"file://{folder}/storage", timeout=20)
        self.attempt(1)

    def attempt(self, number: int) -> None:
        """The processes from now on are those of a new submission."""
        files = JobFiles("", "w", "", {}, str(number), None, 0, 20.0)
        for name, value in files.as_environment().items():
            self._monkeypatch.setenv(name, value)

    def on(self, name: str) -> Path:
        root = self._folder / name
        root.mkdir(exist_ok=True)
        self._monkeypatch.setattr(node, "_entered", (JobStorage(self.storage, "w", root), None))
        self._monkeypatch.chdir(root)
        return root

    def save(self, step: int, *, ranks: int = 2, missing: int | None = None, home: str = "node0") -> CheckpointStore:
        """A checkpoint with a file of each rank, which each has on a node of its own; rank 0's node has the store."""
        self.on(home)
        store = CheckpointStore(STORE, StoreSettings(save_timeout=2.0))

        def write(folder: Path) -> None:
            for rank in reversed(range(ranks)):
                self.on(home if rank == 0 else f"node{rank}")
                (folder / "engine").mkdir(parents=True, exist_ok=True)
                torch.save({"step": step, "rank": torch.full((4,), rank)}, folder / f"engine/state-{rank}.pt")
                if rank != missing:
                    save_part(folder, rank, ["engine"]).join()
            (folder / "driver.json").write_text(f'{{"step": {step}}}')

        store.write(step, write, ranks=range(ranks))
        store.publish()
        store.wait()
        return store


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def test_another_node_resumes_from_what_all_nodes_saved(cluster):
    cluster.save(4)
    assert files(Path(STORE / "step-4")) == ["driver.json", "engine/state-0.pt", "manifest.json"]  # rank 1's file is on its node
    cluster.attempt(2)
    cluster.on("node7")
    found = CheckpointStore(STORE).latest()
    assert found.step == 4
    assert files(found.folder) == ["driver.json", "engine/state-0.pt", "engine/state-1.pt", "manifest.json"]
    assert torch.load(found.folder / "engine/state-1.pt")["rank"].tolist() == [1] * 4


def test_a_driver_brings_its_own_files_only(cluster):
    cluster.save(4)
    cluster.on("head")
    assert download_for_driver(STORE / "step-4") is None
    assert files(STORE / "step-4") == ["driver.json"]


def test_a_checkpoint_without_a_ranks_part_is_absent(cluster):
    cluster.save(4)
    with pytest.raises(SaveFailed, match="rank 1: no hashes of its files"):
        cluster.save(8, missing=1)
    cluster.on("node7")
    assert CheckpointStore(STORE).latest().step == 4
    assert not [name for name in cluster.storage.sizes(f"w/{STORE}") if "step-8" in name]  # opening the store removes the remains


def test_damage_in_the_storage_is_found_and_the_checkpoint_before_is_used(cluster, caplog):
    cluster.save(4)
    cluster.save(8)
    largest = max((cluster.storage.sizes(f"w/{STORE}/step-8")).items(), key=lambda item: item[1])[0]
    content = bytearray(cluster.storage.note(f"w/{STORE}/step-8/{largest}"))
    content[-100] ^= 1
    cluster.storage.put_note(f"w/{STORE}/step-8/{largest}", bytes(content))
    cluster.on("node7")
    assert CheckpointStore(STORE).latest().step == 4
    assert "checkpoint of step 8: storage" in caplog.text and "got other content" in caplog.text


def test_damage_on_the_node_is_repaired_from_the_storage(cluster):
    cluster.save(4)
    (STORE / "step-4/engine/state-0.pt").write_bytes(b"x")
    assert check_checkpoint(STORE / "step-4") is None
    assert torch.load(STORE / "step-4/engine/state-0.pt")["step"] == 4


def test_old_checkpoints_leave_storage_and_nodes(cluster):
    for step in (2, 4, 6):
        cluster.save(step)
    names = {name.partition("/")[0] for name in cluster.storage.sizes(f"w/{STORE}")}
    assert names == {"step-4", "step-6"}
    cluster.on("node1")
    assert [path.name for path in STORE.iterdir()] == ["writing-6"]


def test_a_step_that_is_saved_again_replaces_the_one_before(cluster):
    cluster.save(4, ranks=2)
    cluster.save(4, ranks=1)
    cluster.on("node7")
    found = CheckpointStore(STORE).latest()
    assert files(found.folder) == ["driver.json", "engine/state-0.pt", "manifest.json"]
    assert len(cluster.storage.sizes(f"w/{STORE}/step-4")) == 3


def test_a_shared_folder_reaches_other_nodes_until_it_is_removed(cluster):
    cluster.on("node0")
    (STORE / "universal").mkdir(parents=True)
    (STORE / "universal/part").write_text("x")
    upload_folder(STORE / "universal")
    cluster.on("node1")
    download_folder(STORE / "universal")
    assert (STORE / "universal/part").read_text() == "x"
    remove_folder(STORE / "universal")
    with pytest.raises(StorageFailed, match="which another node made, got none"):
        download_folder(STORE / "universal")


class _Harmful:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize("kind", ["code", "pickle", "twice"])
def test_a_file_that_could_run_code_is_refused(kind, tmp_path):
    path = tmp_path / "state.pt"
    torch.save({"x": _Harmful() if kind == "code" else 1}, path)
    if kind == "pickle":  # which torch would read, though Python finds an archive behind it
        path.write_bytes(pickle.dumps(_Harmful()) + path.read_bytes())
    if kind == "twice":
        with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning):
            archive.writestr("state/data.pkl", pickle.dumps(_Harmful()))
    if kind == "twice":  # torch reads the first, whoever asks it
        check_torch_file(path)
        assert torch.load(path, weights_only=False) == {"x": 1}
        return
    with pytest.raises(ValueError, match=r"state.pt: expected (only the classes of a checkpoint, got print|a file of torch.save, got Unp)"):
        check_torch_file(path)


def test_a_file_of_the_pipeline_is_accepted(tmp_path):
    torch.save({"a": torch.ones(3), "b": [torch.nn.Parameter(torch.zeros(2))], "n": 1}, tmp_path / "state.pt")
    check_torch_file(tmp_path / "state.pt")
