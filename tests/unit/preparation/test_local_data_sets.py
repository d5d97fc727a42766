"""Local folders that the library `datasets` reads: what is read is what is there, and what is hashed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.sources import load_source
from rlhf_core.provenance.file_hashes import FileHashes

datasets = pytest.importorskip("datasets")
CARD = "---\nconfigs:\n- config_name: default\n  {}\n---\n"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def prompts(path: Path, kind: str = "huggingface") -> list[str]:
    about = {"name": "mine", "kind": kind, "path": str(path), "format": "prompt", "uses": ["prompt"], "weight": 1.0}
    rows = load_source(SourceConfig.model_validate(about), seed=0).rows["prompt"]
    return [row["messages"][0]["content"] for row in rows]


def written(path: Path, prompt: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"prompt": prompt}) + "\n")
    return path


def test_other_content_with_the_same_time_is_read_anew(tmp_path):
    path = written(tmp_path / "set/train.jsonl", "old")
    times = path.stat()
    assert prompts(tmp_path / "set") == ["old"]
    written(path, "new")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert prompts(tmp_path / "set") == ["new"]
    assert prompts(tmp_path / "set") == ["new"]


@pytest.mark.parametrize(
    "message", ["data_files: ../ext2/x.jsonl", "data_dir: ../ext2", "data_files: {ext}", "data_files: [train.jsonl, ../ext2/x.jsonl]"]
)
def test_a_card_whose_data_are_elsewhere_is_refused(tmp_path, message):
    written(tmp_path / "set/train.jsonl", "in")
    there = written(tmp_path / "ext2/x.jsonl", "out")
    (tmp_path / "set/README.md").write_text(CARD.format(message.format(ext=there)))
    with pytest.raises(ValueError, match=r"source mine: data set .*set: .*expected data files in the folder, .*x\.jsonl"):
        prompts(tmp_path / "set")


def test_a_card_may_name_files_of_its_folder_and_links(tmp_path):
    written(tmp_path / "set/a/x.jsonl", "in")
    (tmp_path / "set/b.jsonl").symlink_to(written(tmp_path / "ext2/x.jsonl", "linked"))
    (tmp_path / "set/README.md").write_text(CARD.format("data_files: [a/../a/x.jsonl, b.jsonl]"))
    (tmp_path / "by_link").symlink_to(tmp_path / "set")
    assert prompts(tmp_path / "by_link") == ["in", "linked"]


def test_a_saved_data_set_whose_data_are_elsewhere_is_refused(tmp_path):
    for name in ("set", "ext2"):
        datasets.Dataset.from_list([{"prompt": name}]).save_to_disk(tmp_path / name)
    assert prompts(tmp_path / "set") == ["set"]
    state = json.loads((tmp_path / "set/state.json").read_text())
    [data] = state["_data_files"]
    state["_data_files"] = [{"filename": f"../ext2/{data['filename']}"}]
    (tmp_path / "set/state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match="expected data files in the folder"):
        prompts(tmp_path / "set")


def test_a_card_whose_data_are_in_a_linked_folder_is_refused(tmp_path):
    """Linked folders are not hashed, and `sub/..` of one is elsewhere."""
    for at in ("ext/in/x.jsonl", "ext/y.jsonl", "set/y.jsonl"):
        written(tmp_path / at, at)
    (tmp_path / "set/sub").symlink_to(tmp_path / "ext/in")
    for message in ("sub/x.jsonl", "sub/../y.jsonl"):
        (tmp_path / "set/README.md").write_text(CARD.format(f"data_files: {message}"))
        with pytest.raises(ValueError, match="expected data files in the folder"):
            prompts(tmp_path / "set")


def test_files_that_are_not_hashed_are_not_read(tmp_path):
    folder = tmp_path / "rows"
    written(folder / "a.jsonl", "a")
    for beside in (".git", "__pycache__", ".cache/huggingface"):
        written(folder / beside / "b.jsonl", beside)
    written(folder / ".cache/c.jsonl", "c")
    assert prompts(folder, "file") == ["c", "a"]
    assert sorted(FileHashes(tmp_path).of_folder(folder)) == [".cache/c.jsonl", "a.jsonl"]
    shutil.rmtree(folder / ".cache")
    (folder / "a.jsonl").unlink()
    with pytest.raises(ValueError, match="got a folder without any"):
        prompts(folder, "file")


def test_reading_a_saved_data_set_writes_nothing_into_its_folder(tmp_path):
    datasets.Dataset.from_list([{"prompt": "in"}, {"prompt": "too"}]).save_to_disk(tmp_path / "set")
    before = sorted(path.name for path in (tmp_path / "set").iterdir())
    assert prompts(tmp_path / "set") == ["in", "too"]
    assert sorted(path.name for path in (tmp_path / "set").iterdir()) == before
