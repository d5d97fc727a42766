"""Marks beside answers, whatever their column is called: nothing is guessed that trains on the bad ones unasked."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from whole_matrix import cells

from rlhf_core.look.__main__ import main
from tests.tiny_models import DEFAULTS


def table(folder: Path, *marks: str, name: str = "thumb", extra: dict[str, str] | None = None) -> Path:
    """A CSV of questions and answers, and a mark of each."""
    path = folder / "marks.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["question", "answer", name])
        writer.writerows([f"Which story is number {i}?", f"It is the story of the duck number {i}.", mark] for i, mark in enumerate(marks))
    return path


def shown_of(capsys, path: Path, *options: str) -> tuple[int, dict]:
    code = main([str(path), "--json", "--params", str(DEFAULTS), *options])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "marks",
    [
        *(("0", "1"), ("true", "false"), ("Yes", "no"), ("good", "bad"), ("up", "down"), ("-1", "+1")),
        *(("0.0", "1.0"), ("thumbs up", "thumbs down"), ("positive", "Negative")),
    ],
)
@pytest.mark.parametrize("name", cells(["thumb", "einstellung"], ["einstellung"]))
def test_a_column_of_two_marks_is_a_question_and_not_a_guess(marks, name, tmp_path, capsys):
    code, found = shown_of(capsys, table(tmp_path, *marks, *marks, name=name))
    assert code == 2 and [r["format"] for r in found["readings"]] == ["instruction", "unpaired"]
    instruction, unpaired = found["readings"]
    assert any(name in line and "every response would be learned, good or bad" in line for line in instruction["unsure"])
    assert unpaired["columns"] == {"prompt": "question", "completion": "answer", "label": name}
    assert unpaired["counts"]["sft"]["rows"] == 2 and unpaired["counts"]["preference"]["rows"] == 4


@pytest.mark.parametrize("marks", [("3", "5", "1", "5"), ("2.5", "0", "2.5"), ("2", "-2", "0")])
def test_marks_that_no_format_reads_are_a_question(marks, tmp_path, capsys):
    code, found = shown_of(capsys, table(tmp_path, *marks, *marks, name="einstellung"))
    assert code == 2 and "einstellung" in found["unsure"]
    main([str(tmp_path / "marks.csv"), "--params", str(DEFAULTS)])
    assert "every response would be learned, good or bad" in capsys.readouterr().out


def test_marks_beside_conversations_are_a_question_too(tmp_path, capsys):
    talk = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is 4."}]
    path = tmp_path / "talks.jsonl"
    path.write_text("".join(json.dumps({"messages": talk, "fine": mark}) + "\n" for mark in (True, False)))
    code, found = shown_of(capsys, path)
    assert code == 2 and "fine" in found["unsure"]


@pytest.mark.parametrize("values", [("en", "de"), ("train", "test"), ("17", "18", "19", "20"), ("1", "1"), ("a7", "b9")])
def test_columns_that_mark_nothing_leave_the_guess_alone(values, tmp_path, capsys):
    code, found = shown_of(capsys, table(tmp_path, *values, name="einstellung"))
    assert code == 0 and [r["format"] for r in found["readings"]] == ["instruction"]


def test_a_column_that_is_named_is_tried_in_every_format_that_has_it(tmp_path, capsys):
    path = table(tmp_path, "1", "0")
    for options in (["--columns", "label=thumb"], ["--format", "unpaired"], ["--format", "unpaired", "--columns", "label=thumb"]):
        code, found = shown_of(capsys, path, *options)
        (reading,) = found["readings"]
        assert (code, reading["format"]) == (0, "unpaired")
        assert reading["columns"] == {"prompt": "question", "completion": "answer", "label": "thumb"}
    code, found = shown_of(capsys, table(tmp_path, "1", "0", name="answered"), "--columns", "completion=answer", "label=answered")
    assert code == 0 and found["readings"][0]["columns"]["label"] == "answered"


def test_columns_of_unusual_names_are_found_by_ours(tmp_path, capsys):
    path = tmp_path / "odd.jsonl"
    path.write_text("".join(json.dumps({"frage": f"{i} + 2?", "antwort": "4", "gut": i == 2}) + "\n" for i in (1, 2)))
    code, found = shown_of(capsys, path, "--columns", "prompt=frage", "completion=antwort", "label=gut")
    assert (code, [r["format"] for r in found["readings"]]) == (0, ["unpaired"])


def test_a_format_without_its_columns_offers_the_line_that_names_them(tmp_path, capsys):
    assert main([str(table(tmp_path, "fine", "sad")), "--params", str(DEFAULTS), "--format", "unpaired"]) == 2
    out = capsys.readouterr().out
    assert "map label in the source's columns; its fields are separated by ';'" in out
    assert "--format unpaired --columns prompt=question completion=answer label=..." in out


def marked(folder: Path, *marks: int) -> Path:
    path = folder / "marks.jsonl"
    lines = ({"prompt": f"What is {i}?", "completion": f"It is the number {i}.", "label": mark} for i, mark in enumerate(marks))
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_zero_between_one_and_minus_one_is_a_mark_too(tmp_path, capsys):
    code, found = shown_of(capsys, marked(tmp_path, *[1, -1, 1, 0] * 10))
    assert (code, [r["format"] for r in found["readings"]]) == (0, ["unpaired"])
    assert found["readings"][0]["counts"]["preference"]["rows"] == 30


def test_a_late_minus_one_is_said_and_not_read_as_an_answer(tmp_path, capsys):
    path = marked(tmp_path, *[1] * 120, *[0] * 60, *[-1] * 10)
    code, found = shown_of(capsys, path)
    assert code == 2 and "label" in found["unsure"]
    main([str(path), "--params", str(DEFAULTS), "--format", "unpaired"])
    assert "got -1, which none of them has" in capsys.readouterr().out
