"""What the look at data says of held-out prompts that training has again, and of files that name another split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from clerk_params import CLERK_PARAMS

from rlhf_core.look.__main__ import main


def write(path: Path, prompts: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": prompt, "chosen": "a", "rejected": "b"}) + "\n" for prompt in prompts))


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.chdir(Path(__file__).parents[3])


def test_repeated_prompts_are_counted_by_split_with_both_places(tmp_path: Path, capsys):
    texts = [f"Which colour has house {i}?" for i in range(60)]
    write(tmp_path / "d.jsonl", [*texts, *(f"{text}?" for text in texts)])
    assert main([str(tmp_path / "d.jsonl"), "--json", "--params", str(CLERK_PARAMS)]) == 0
    repeats = json.loads(capsys.readouterr().out)["readings"][0]["repeats"]
    assert {*repeats} == {"validation", "test", "promotion"}
    assert 5 < repeats["test"]["prompts"] < 30 and repeats["test"]["near"] > 3 and repeats["test"]["contained"] == 0
    assert main([str(tmp_path / "d.jsonl"), "--params", str(CLERK_PARAMS)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("test split:")]
    counts = f"{repeats['test']['near']} of {repeats['test']['prompts']} prompts"
    assert counts in line and "validation.max_near_duplicate_fraction is 0.02: validate_data stops" in line
    assert line.count("d.jsonl line") == 2


def test_different_prompts_give_no_line(tmp_path: Path, capsys):
    write(tmp_path / "d.jsonl", [f"Which colour has house {i}?" for i in range(60)])
    assert main([str(tmp_path / "d.jsonl")]) == 0
    assert " split: " not in capsys.readouterr().out


def test_files_of_other_splits_are_named_and_can_be_chosen(tmp_path: Path, capsys):
    write(tmp_path / "train-0.jsonl", ["q1", "q2"])
    write(tmp_path / "test-0.jsonl", ["q3"])
    assert main([str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "all 2 records read" in out and "not read, since their names are of other splits: test-0.jsonl" in out
    assert "dataset_split" not in out
    assert main([str(tmp_path), "--split", "all"]) == 0
    out = capsys.readouterr().out
    assert "all 3 records read" in out and "not read" not in out and "dataset_split: all" in out
    assert main([str(tmp_path / "train-0.jsonl"), "--split", "test"]) == 2
    assert "expected no dataset_split of kind file" in capsys.readouterr().err
