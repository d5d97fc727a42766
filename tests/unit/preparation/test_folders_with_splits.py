"""A folder whose files are named by splits: held-out files aren't trained on unless the source says so."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.files import files_of_split
from rlhf_core.preparation.sources import load_source


def folder(path: Path, names: list[str]) -> Path:
    for i, name in enumerate(names):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(f'{{"prompt": "q{i}", "chosen": "a", "rejected": "b"}}\n')
    return path


def chosen(path: Path, split: str) -> list[str]:
    return [file.relative_to(path).as_posix() for file in files_of_split(path, split)[0]]


@pytest.mark.parametrize(
    ("names", "train"),
    [
        (["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl", "test-00000-of-00001.jsonl"], 2),
        (["train.jsonl", "validation.jsonl", "valid.jsonl", "dev.jsonl", "val.jsonl", "eval.jsonl", "evaluation_2.jsonl"], 1),
        (["Train/0.jsonl", "Test/0.jsonl"], 1),
        (["train_prefs-0.jsonl", "train_sft-0.jsonl", "test_prefs-0.jsonl", "test_gen-0.jsonl"], 2),
        (["a.jsonl", "b.jsonl", "a_test.jsonl"], 2),
        (["devices.jsonl", "contest.jsonl", "evaluate.jsonl", "latest.jsonl"], 4),  # other words
        (["train_test_mixed.jsonl"], 1),
    ],
)
def test_files_of_other_splits_are_set_aside(names: list[str], train: int, tmp_path: Path):
    path = folder(tmp_path, names)
    read, aside = files_of_split(path, "train")
    order = sorted(names)
    assert [p.relative_to(path).as_posix() for p in read] == [name for name in order if name in names[:train]]
    assert len(aside) == len(names) - train and chosen(path, "all") == order


def test_a_split_can_be_named(tmp_path: Path):
    path = folder(tmp_path, ["train_prefs-0.jsonl", "train_sft-0.jsonl", "test_prefs-0.jsonl", "valid.jsonl"])
    assert chosen(path, "test") == ["test_prefs-0.jsonl"] and chosen(path, "validation") == ["valid.jsonl"]
    assert chosen(path, "train_sft") == ["train_sft-0.jsonl"]


@pytest.mark.parametrize(("names", "split"), [(["test-0.jsonl", "dev-0.jsonl"], "train"), (["train-0.jsonl", "test-0.jsonl"], "dev")])
def test_a_folder_without_files_of_the_split_is_a_question(names: list[str], split: str, tmp_path: Path):
    with pytest.raises(ValueError, match=rf"expected files of the split {split} by their names, got .*test-0\.jsonl.*; set the source"):
        files_of_split(folder(tmp_path, names), split)


def test_a_source_reads_train_alone_and_says_what_it_leaves(tmp_path: Path, caplog):
    path = folder(tmp_path, ["train-0.jsonl", "test-0.jsonl"])
    source = SourceConfig(name="mine", kind="file", path=str(path), format="preference", uses=["preference"])
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        rows = load_source(source, seed=0).rows["preference"]
    assert [row["messages"][0]["content"] for row in rows] == ["q0"]
    assert "source mine: files of other splits by their names are not read: test-0.jsonl" in caplog.text
    every = source.model_copy(update={"dataset_split": "all"})
    assert len(load_source(every, seed=0).rows["preference"]) == 2
