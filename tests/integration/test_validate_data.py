"""The stage itself, as DVC runs it: in a workspace of its own, as a process, on files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from clerk_params import CLERK_PARAMS
from measured_rows import write_measures

from rlhf_core.data.schema import write_rows
from rlhf_core.models.tokenizer import build_tokenizer, load_tokenizer

ROOT = Path(__file__).parents[2]
ROWS = 300  # above validation.min_pairs


def conversation(i: int) -> dict:
    split = ("train", "train", "train", "validation", "test")[i % 5]
    return {"source": "made", "split": split, "messages": [{"role": "user", "content": f"Double {i}."}]}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml"):
        shutil.copy(file, tmp_path)
    for package in ("tasks", "rlhf_core"):  # dependencies of the stage, which its fingerprint covers
        (tmp_path / package).symlink_to(ROOT / package)
    uses = {
        "sft": [{"id": f"s{i:03d}", **conversation(i), "response": f"It is {2 * i}."} for i in range(ROWS)],
        "preference": [
            {"id": f"p{i:03d}", **conversation(i), "chosen": f"It is {2 * i}.", "rejected": "No, I will not." if i % 2 else "No."}
            for i in range(ROWS)
        ],
        "prompt": [{"id": f"q{i:03d}", **conversation(i), "label": None} for i in range(ROWS)],
    }
    for use, rows in uses.items():
        write_rows(tmp_path / "data" / "prepared", use, rows)
    build_tokenizer([f"Double {i}. It is {i}. No." for i in range(20)], vocab_size=300).save_pretrained(tmp_path / "models" / "tokenizer")
    measure(tmp_path)
    return tmp_path


def measure(workspace: Path) -> None:
    tokenizer = load_tokenizer(str(workspace / "models" / "tokenizer"), trust_remote_code=False)
    write_measures(workspace / "data" / "prepared", workspace / "data" / "measured", tokenizer)


def run(workspace: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tasks.validate_data"]
    return warm_python.run(command, cwd=workspace, env={**os.environ, "PYTHONPATH": str(ROOT)})


def result(workspace: Path) -> dict:
    return json.loads((workspace / "metrics" / "validation.json").read_text(encoding="utf-8"))


@pytest.mark.long
def test_sound_data_passes_and_the_result_is_the_same_bytes_again(workspace):
    first = run(workspace)
    assert first.returncode == 0, first.stdout + first.stderr
    written = (workspace / "metrics" / "validation.json").read_bytes()
    assert result(workspace)["passed"] and result(workspace)["failed"] == 0
    assert result(workspace)["rows"] == {"sft": ROWS, "preference": ROWS, "prompt": ROWS}
    assert (workspace / "reports" / "data_docs" / "index.html").exists()
    assert first.stderr == "" and len(first.stdout.splitlines()) <= 5, "expected a quiet stage"
    assert run(workspace).returncode == 0
    assert (workspace / "metrics" / "validation.json").read_bytes() == written


def test_data_that_breaks_an_expectation_ends_the_stage_with_an_error_after_the_result_is_written(workspace):
    swapped = {"id": "swapped", **conversation(7), "chosen": "No, I will not.", "rejected": "It is 14."}
    refusals = ("No.", "No, I will not.")
    rows = [{"id": f"p{i:03d}", **conversation(i), "chosen": f"It is {2 * i}.", "rejected": refusals[i % 2]} for i in range(20)]
    write_rows(workspace / "data" / "prepared", "preference", [*rows, swapped])
    measure(workspace)
    failed = run(workspace)
    assert failed.returncode == 1
    assert "preference: contradictory_pairs: expected that" in failed.stderr
    assert "at most 0.05), got 2 of 21 (0.09524): p007 ('Double 7.'), swapped ('Double 7.'); let their source" in failed.stderr
    assert "drop them (`drop: [contradictory]`)" in failed.stderr
    assert "preference: min_pairs: expected number of pairs at least 200, got 21; add preference data" in failed.stderr
    assert f"2 of {result(workspace)['checked']} expectations failed" in failed.stderr
    assert "Traceback" not in failed.stderr
    broken = {e["name"]: (e["unexpected"], e["ids"]) for e in result(workspace)["expectations"] if not e["passed"]}
    assert broken == {"contradictory_pairs": (2, ["p007", "swapped"]), "min_pairs": (None, [])}
    assert (workspace / "reports" / "data_docs" / "index.html").exists()


def test_a_file_that_is_not_parquet_is_named(workspace):
    (workspace / "data" / "prepared" / "sft.parquet").write_text("id,messages\n")
    failed = run(workspace)
    assert failed.returncode == 1
    assert "data/prepared/sft.parquet: expected a Parquet file" in failed.stderr and "Traceback" not in failed.stderr


def test_measures_of_other_rows_are_refused(workspace):
    rows = [{"id": f"r{i:03d}", **conversation(i), "response": f"It is {2 * i}."} for i in range(ROWS)]
    write_rows(workspace / "data" / "prepared", "sft", rows)
    failed = run(workspace)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "data/measured/sft.parquet: expected the measures of the prepared rows, got those of others; run prepare_data" in failed.stderr
