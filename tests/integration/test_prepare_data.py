"""The stage prepare_data in a workspace of its own, as a process, as DVC runs it."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm_python
from clerk_params import CLERK_PARAMS

from flows.chain.overrides import check
from rlhf_core.config import apply_overrides, read_recipe
from rlhf_core.data.hashing import conversation_text
from rlhf_core.data.schema import SCHEMAS, SPLITS, read_rows

ROOT = Path(__file__).parents[2]
REAL = ROOT / "../shared/data"
OUTS = ("data/prepared", "models/tokenizer", "metrics/prepare_data.json")
SMALL = {
    "data.sources.0.clerk.pretrain_lines": 300,
    "data.sources.0.clerk.demonstrations": 300,
    "data.sources.0.clerk.prompts": 300,
}
USES = [use for use in SCHEMAS if use != "stepwise"]  # of the clerk


def workspace(folder: Path, overrides: dict) -> Path:
    """Parameters and the code of the checkout, nothing else."""
    folder.mkdir()
    for file in (CLERK_PARAMS, ROOT / "dvc.yaml"):
        shutil.copy(file, folder)
    for name in ("tasks", "rlhf_core", "rewards"):
        (folder / name).symlink_to(ROOT / name)
    apply_overrides(folder / "params.yaml", overrides)
    return folder


def prepare(folder: Path) -> subprocess.CompletedProcess[str]:
    return run_stage(folder, "prepare_data")


def run_stage(folder: Path, stage: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run([sys.executable, "-m", f"tasks.{stage}"], cwd=folder, env=os.environ | {"PYTHONPATH": str(folder)})


def contents(folder: Path) -> dict[str, bytes]:
    files = [f for out in OUTS for f in ([folder / out] if (folder / out).is_file() else sorted((folder / out).rglob("*")))]
    return {str(f.relative_to(folder)): f.read_bytes() for f in files}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory) -> Path:
    folder = workspace(tmp_path_factory.mktemp("prepare") / "a", SMALL)
    done = prepare(folder)
    assert done.returncode == 0, done.stderr
    return folder


def test_the_same_parameters_give_the_same_bytes_without_torch(prepared, tmp_path):
    again = workspace(tmp_path / "again", SMALL)
    code = "import sys; from tasks.prepare_data import main; main(); assert 'torch' not in sys.modules"
    environment = os.environ | {"PYTHONPATH": str(again)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=again, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert contents(again) == contents(prepared)


def test_another_seed_gives_other_bytes(prepared, tmp_path):
    other = workspace(tmp_path / "other", SMALL | {"seed": 1})
    assert prepare(other).returncode == 0
    assert {name for name, content in contents(other).items() if content != contents(prepared)[name]} >= {
        f"data/prepared/{use}.parquet" for use in (*USES, "slices")
    }


def test_no_conversation_is_in_two_splits_of_any_use(prepared):
    split_of: dict[str, str] = {}
    shared = 0
    for use in ("sft", "preference", "prompt"):
        for row in read_rows(prepared / "data/prepared", use):
            text = conversation_text(row["messages"])
            shared += text in split_of
            assert split_of.setdefault(text, row["split"]) == row["split"]
    assert set(split_of.values()) == set(SPLITS)
    assert shared > 1000  # most pairs share their prompt, so the claim above is about something


def test_metrics_and_sources_say_what_is_there(prepared):
    metrics = json.loads((prepared / "metrics/prepare_data.json").read_text())
    sources = json.loads((prepared / "data/prepared/sources.json").read_text())
    for use in USES:
        rows = read_rows(prepared / "data/prepared", use)
        assert len({row["id"] for row in rows}) == len(rows)
        for split in SPLITS:
            count = len(read_rows(prepared / "data/prepared", use, split))
            assert metrics["rows"][use][split] == sources["clerk"]["rows"][use][split] == count
    assert sources["clerk"]["kind"] == "clerk"
    assert metrics["vocabulary_size"] == 390
    assert 5 < metrics["mean_tokens"]["sft"]["response"] < 16
    with (prepared / "plots/token_lengths.csv").open(newline="") as file:
        lengths = [row for row in csv.DictReader(file) if row["use"] == "sft" and row["column"] == "response"]
    assert sum(int(row["texts"]) for row in lengths) == len(read_rows(prepared / "data/prepared", "sft"))


def test_prompts_and_good_answers_are_short_in_tokens(prepared):
    from rlhf_core.data.judge import judge
    from rlhf_core.models.tokenizer import encode_conversation, load_tokenizer

    tokenizer = load_tokenizer(str(prepared / "models/tokenizer"), trust_remote_code=False)
    for row in read_rows(prepared / "data/prepared", "sft"):
        ids, prompt_length = encode_conversation(tokenizer, row["messages"], row["response"])
        assert prompt_length <= 34
        assert len(ids) - prompt_length <= (16 if judge(row["messages"], row["response"]).ok else 32)


def test_mixing_keeps_shares_by_weight_and_caps_rows(tmp_path):
    lines = "".join(json.dumps({"q": f"question {i}", "a": "1"}) + "\n" for i in range(100))
    sources = [
        {
            "name": name,
            "kind": "file",
            "path": "mine.jsonl",
            "format": "prompt",
            "columns": {"prompt": "q", "label": "a"},
            "uses": ["prompt"],
            "weight": weight,
        }
        for name, weight in (("light", 0.25), ("heavy", 2.0))
    ]
    folder = workspace(tmp_path / "w", {"data.sources": sources, "data.max_rows": 60})
    (folder / "mine.jsonl").write_text(lines)
    done = prepare(folder)
    assert done.returncode == 0, done.stderr
    rows = read_rows(folder / "data/prepared", "prompt")
    # 0.25 / 2.0 of 100 rows is 12.5, rounded to even; 60 is the cap
    assert [sum(row["source"] == name for row in rows) for name in ("light", "heavy")] == [12, 60]
    assert {p.name for p in (folder / "data/prepared").iterdir()} == {"prompt.parquet", "sources.json"}


def test_a_broken_line_stops_the_stage_with_one_plain_line(tmp_path):
    source = {"name": "mine", "kind": "file", "path": "mine.jsonl", "format": "text", "uses": ["pretrain"], "weight": 1.0}
    folder = workspace(tmp_path / "w", {"data.sources": [source]})
    (folder / "mine.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    done = prepare(folder)
    assert done.returncode == 1
    assert done.stderr.startswith("prepare_data: mine.jsonl line 2: expected JSON, got '{\"text\":'")
    assert not (folder / "data/prepared").exists()


def test_what_a_source_loses_is_printed_and_too_much_of_it_ends_the_stage(tmp_path):
    lines = [{"prompt": f"Double {i}.", "chosen": f"It is {2 * i}.", "rejected": "No." if i % 4 else f"It is {2 * i}."} for i in range(40)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"name": "mine", "kind": "file", "path": "../d.jsonl", "format": "preference", "uses": ["preference"], "weight": 1.0}
    folder = workspace(tmp_path / "w", {"data.sources": [source | {"drop": ["identical"]}]})
    failed = prepare(folder)
    assert failed.returncode == 1 and "Traceback" not in failed.stderr
    assert "source mine: expected at most 10.00% of the preference data to be dropped, got 25.00%" in failed.stderr
    assert "  10 preference rows whose chosen and rejected are the same text (identical)\n" in failed.stderr
    assert "    ../d.jsonl line 1: 'Double 0.'\n" in failed.stderr
    assert not (folder / "data/prepared").exists()

    apply_overrides(folder / "params.yaml", {"validation.max_dropped_fraction": 0.25})
    done = prepare(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine: read 40 records: kept preference 30 (" in done.stdout + done.stderr
    assert "; dropped: 10 preference rows whose chosen and rejected are the same text (identical)" in done.stdout + done.stderr
    metrics = json.loads((folder / "metrics/prepare_data.json").read_text())
    assert metrics["records"] == {"mine": 40} and metrics["dropped_fraction"] == {"mine": {"preference": 0.25}}


def test_a_judge_that_is_not_there_stops_the_stage_before_any_data_is_read(tmp_path):
    source = {"name": "mine", "kind": "file", "path": "absent.jsonl", "format": "text", "uses": ["pretrain"], "weight": 1.0}
    done = prepare(workspace(tmp_path / "w", {"data.sources": [source | {"judge": "rewards/stories.py:kynd"}]}))
    assert done.returncode == 1
    assert done.stderr.startswith("prepare_data: source mine: rule rewards/stories.py:kynd: expected a function kynd there, got None")


@pytest.mark.parametrize("recipe", ["hh_rlhf", "gsm8k"])
def test_recipes_are_complete_parameters(recipe):
    params = check(CLERK_PARAMS, read_recipe(ROOT / f"recipes/{recipe}.yaml"))
    assert {"sft", "preference", "prompt"} == {use for source in params.data.sources for use in source.uses}


@pytest.mark.long
@pytest.mark.skipif(not REAL.exists(), reason="the real data sets are not here: ../shared/data, beside the checkout")
@pytest.mark.parametrize(("recipe", "pairs", "is_validated"), [("hh_rlhf", 2307, True), ("gsm8k", 2429, False)])
def test_recipes_prepare_the_real_data_which_passes_validation(tmp_path, recipe, pairs, is_validated):
    """Validation takes as long again; test_real_data.py has it for both."""
    (tmp_path / "shared").symlink_to(REAL.resolve().parent)
    folder = workspace(tmp_path / "w", read_recipe(ROOT / f"recipes/{recipe}.yaml"))
    done = prepare(folder)
    assert done.returncode == 0, done.stderr
    assert len(read_rows(folder / "data/prepared", "preference")) == pairs
    assert len(read_rows(folder / "data/prepared", "preference", "test")) >= check(folder / "params.yaml", {}).gate.min_pairs
    if not is_validated:
        return
    validated = run_stage(folder, "validate_data")
    assert validated.returncode == 0, validated.stderr
    validation = json.loads((folder / "metrics/validation.json").read_text())
    assert validation["passed"] and validation["rows"]["preference"] == pairs
