"""Files with labels that somebody broke: labels, or an error that names the file; and nothing is imported by halves."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2]))
from hostile import NASTY_VALUES, is_clear, mangled

from flows import labels as command
from rlhf_core.preparation.labels import KEY, PAIRS, LabelPair, export_pairs, read_labels


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("labels") / "export"
    pairs = [LabelPair(f"id{n}", [{"role": "user", "content": f"Sort {n}."}], f"good {n}", f"bad {n}", 1.0, 0.0) for n in range(3)]
    export_pairs(pairs, folder, count=None, seed=3, origin="a test")
    return folder


def studio(export: Path) -> bytes:
    shown = [json.loads(line) for line in (export / PAIRS).read_text().splitlines()]
    result = [{"from_name": "choice", "value": {"choices": ["a"]}}]
    return json.dumps(
        [{"id": n, "data": item, "annotations": [{"completed_by": 1, "result": result}]} for n, item in enumerate(shown)]
    ).encode()


@pytest.mark.parametrize("kind", ["lines", "studio"])
@settings(max_examples=60)
@given(data=st.data())
def test_any_broken_file_gives_labels_or_names_the_file(export, kind, data):
    whole = (export / PAIRS).read_bytes() if kind == "lines" else studio(export)
    path = export / "broken.json"
    path.write_bytes(data.draw(mangled(whole)))
    taken_or_refused(path, export)


@settings(max_examples=60)
@given(
    where=st.sampled_from(["", "id", "data", "annotations", "annotations.0", "annotations.0.result", "annotations.0.result.0",
                           "annotations.0.result.0.value", "annotations.0.completed_by", "data.id", "data.a"]),
    value=st.sampled_from(NASTY_VALUES),
)  # fmt: skip
def test_any_value_in_label_studios_export_is_taken_or_refused(export, where, value):
    tasks = json.loads(studio(export))
    *parents, last = ["1", *where.split(".")] if where else ["1"]
    node = tasks
    for part in parents:
        node = node[int(part) if part.isdigit() else part]
    node[int(last) if last.isdigit() else last] = value
    try:
        (export / "tasks.json").write_text(json.dumps(tasks))
    except (TypeError, ValueError, RecursionError):  # not a value of JSON
        return
    taken_or_refused(export / "tasks.json", export)


def taken_or_refused(path: Path, export: Path) -> None:
    try:
        labels = read_labels(path, json.loads((export / KEY).read_text()))
    except ValueError as error:
        assert is_clear(str(error)) and path.name in str(error), str(error)[:500]
        return
    assert all(label.choice in (None, "a", "b", "tie") and label.annotator.encode() for label in labels)


@pytest.mark.parametrize("key", [b"", b"[]", b"{}", b'{"pairs": 3}', b"\xff", b'{"pairs": [{}], "origin": 1, "sha256": 2}'])
def test_a_broken_key_is_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys, export, key):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / KEY).write_bytes(key)
    (tmp_path / "mine" / PAIRS).write_bytes((export / PAIRS).read_bytes())
    assert command.main(["import", "mine/" + PAIRS]) == 2
    message = capsys.readouterr().err
    assert KEY in message and is_clear(message.strip()) and not (tmp_path / "data").exists()


@pytest.mark.parametrize("name", ["../x", "..", ".", "", "a/b", "\x00", "-", "a\n", "x" * 300])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path, monkeypatch, export, name, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [{**json.loads(line), "choice": "a"} for line in (export / PAIRS).read_text().splitlines()]
    (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command.main(["import", "labelled.jsonl", "--export", str(export), f"--name={name}"]) == (0 if name == "" else 2)
    assert {p.name for p in tmp_path.iterdir()} <= {"labelled.jsonl", "data"}
