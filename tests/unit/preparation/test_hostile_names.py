"""Names of files go into errors as text, and one record makes a bounded number of pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.formats import MAX_PAIRS
from rlhf_core.preparation.sources import Loaded, load_source

PAIR = json.dumps({"prompt": "q", "chosen": "a", "rejected": "b"})


def load(path: Path, format: str = "preference", uses: tuple[str, ...] = ("preference",)) -> Loaded:
    about = {"name": "mine", "kind": "file", "path": str(path), "format": format, "uses": list(uses), "weight": 1.0}
    return load_source(SourceConfig.model_validate(about), seed=0)


@pytest.mark.parametrize(
    ("ending", "content"),
    [
        *[(".jsonl", b"{"), (".jsonl", b"[]"), (".jsonl", b"\xff"), (".jsonl", b""), (".json", b"{}"), (".json", b"[1]"), (".json", b"x")],
        *[(".csv", b"a,b\n1"), (".csv", b"a,a\n"), (".csv", b"\n"), (".csv", b"a,b;c\n"), (".csv", b'a,b\n"'), (".parquet", b"x")],
        *[(".jsonl.gz", b"x"), (".jsonl", (PAIR + "\n{").encode()), (".jsonl", b"{}"), (".jsonl", None)],
    ],
)
def test_the_name_of_a_file_gives_a_terminal_no_orders(tmp_path, ending, content):
    path = tmp_path / f"d\x1b[2J\u202e{ending}"
    path.write_bytes(content) if content is not None else path.symlink_to("nowhere")
    with pytest.raises(ValueError) as error:
        load(tmp_path)
    assert "d\\x1b[2J" in str(error.value) and str(error.value).isprintable()


def test_a_folder_or_file_of_another_kind_is_named_safely(tmp_path):
    folder = tmp_path / "d\x1b[2J"
    folder.mkdir()
    (folder / "x").write_text("")
    for path in (folder, folder / "x"):
        about = {"name": "mine", "kind": "file", "path": "p", "format": "preference", "uses": ["preference"], "weight": 1.0}
        source = SourceConfig.model_validate(about).model_copy(update={"path": str(path)})
        with pytest.raises(ValueError) as error:
            load_source(source, seed=0)
        assert str(error.value).isprintable()


def graded(good: int, bad: int) -> str:
    marks = [True] * good + [False] * bad
    return json.dumps({"prompt": f"q {good}", "completions": [{"completion": f"a{i}", "good": mark} for i, mark in enumerate(marks)]})


def test_a_record_of_too_many_pairs_is_left_out_and_counted(tmp_path):
    at_limit, over = (64, MAX_PAIRS // 64), (64, MAX_PAIRS // 64 + 1)
    (tmp_path / "d.jsonl").write_text("\n".join([graded(*at_limit), graded(1500, 1500), graded(*over)]))
    loaded = load(tmp_path / "d.jsonl", "graded", ("preference", "sft"))
    assert len(loaded.rows["preference"]) == MAX_PAIRS and len(loaded.rows["sft"]) == 64
    assert loaded.dropped == {f"more than {MAX_PAIRS} pairs of good and bad completions": 2} and loaded.dropped.records == 2


def test_without_pairs_no_number_of_completions_is_too_many(tmp_path):
    (tmp_path / "d.jsonl").write_text(graded(1500, 1500))
    loaded = load(tmp_path / "d.jsonl", "graded", ("sft",))
    assert len(loaded.rows["sft"]) == 1500 and not loaded.dropped
