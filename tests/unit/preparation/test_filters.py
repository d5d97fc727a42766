"""Rows that a source's `drop` takes away, what a source may lose, and where what is lost or refused stands."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from strict_limits import strict_limits
from whole_matrix import cells

from rlhf_core.config import DataConfig, ValidationConfig
from rlhf_core.data.schema import open_rows, read_rows, write_rows
from rlhf_core.models.tokenizer import build_tokenizer
from rlhf_core.preparation.filters import REASONS, KeptRows
from rlhf_core.preparation.prepare import Prepared, measure_rows
from rlhf_core.preparation.sources import Mixed, mix
from rlhf_core.preparation.validation.tables import read_measured
from rlhf_core.preparation.validation.validate import Finding, validate

USES = ["sft", "preference", "prompt"]
MAX_LENGTH = 60
STRICT = strict_limits(max_duplicate_fraction=1.0)
# The expectation of a kind of rows -> records that break it, and no other, beside forty sound ones.
FAULTS = {
    "empty": [{"prompt": "Empty?", "chosen": "", "rejected": "b"}, {"prompt": "Blank?", "chosen": "a", "rejected": " \n\t "}],
    "identical": [{"prompt": "Same?", "chosen": "yes", "rejected": " yes\n"}],
    "contradictory": [{"prompt": "Which?", "chosen": "a", "rejected": "b"}, {"prompt": "Which?", "chosen": "b", "rejected": "a"}],
    "too_long": [{"prompt": "Long?", "chosen": "8" * 90, "rejected": "no"}],
}
EXPECTATIONS = {"empty": "empty.", "identical": "identical_pairs", "contradictory": "contradictory_pairs", "too_long": "too_long"}
SOUND = [{"prompt": f"Double {i}.", "chosen": f"It is {2 * i}.", "rejected": "No."} for i in range(40)]


def write(path: Path, records: list[dict]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def config(*sources: dict) -> DataConfig:
    common = {"kind": "file", "format": "preference", "uses": USES, "weight": 1.0}
    named = [{**common, "name": f"s{i}", **source} for i, source in enumerate(sources)]
    return DataConfig.model_validate({"validation_fraction": 0.1, "test_fraction": 0.2, "sources": named})


def prepared(of: DataConfig, folder: Path, *, limit: float = 1.0) -> Mixed:
    found = mix(of, folder / "out", scratch=folder / "aside", seed=0, max_dropped_fraction=limit)
    measure_rows(found, tokenizer(), of, folder / "measured", max_length=MAX_LENGTH, max_dropped_fraction=limit)
    for rows in found.rows.values():
        rows.write()
    return found


@cache
def tokenizer():
    return build_tokenizer([f"Double {i}. It is {i}. No. Same? Which? yes" for i in range(20)], vocab_size=300)


def failed(folder: Path, limits: ValidationConfig = STRICT, *, uses: Sequence[str] = ("preference",)) -> list[Finding]:
    tables = {use: open_rows(folder / "out" / f"{use}.parquet") for use in uses}
    findings = validate(tables, lambda use: read_measured(folder / "measured", use, tables[use]), limits, max_length=MAX_LENGTH, needed=())
    return [finding for finding in findings if not finding.passed]


@pytest.mark.parametrize("kind", cells(FAULTS, ["contradictory", "too_long"]))
def test_drop_makes_the_expectation_of_its_name_pass(tmp_path, kind):
    path = write(tmp_path / "d.jsonl", SOUND + FAULTS[kind])
    prepared(config({"path": str(path)}), tmp_path / "kept")
    broken = failed(tmp_path / "kept", uses=USES)
    assert broken and all(finding.name.startswith(EXPECTATIONS[kind]) for finding in broken)
    assert all(f"`drop: [{kind}]`" in finding.message() for finding in broken)

    found = prepared(config({"path": str(path), "drop": [kind]}), tmp_path / "dropped")
    assert failed(tmp_path / "dropped", uses=USES) == []
    refused = {use: {i for finding in broken if finding.use == use for i in finding.ids} for use in USES}
    before = {use: {row["id"] for row in read_rows(tmp_path / "kept/out", use)} for use in USES}
    left = {use: {row["id"] for row in read_rows(tmp_path / "dropped/out", use)} for use in USES}
    assert {use: before[use] - left[use] for use in USES} == refused  # these rows and no others
    counted = {reason.split()[0]: n for reason, n in found.dropped["s0"].items() if f"({kind})" in reason}
    assert counted == {use: len(ids) for use, ids in refused.items() if ids}
    for use in USES:
        assert sum(n for (_, of, _), n in found.counts.items() if of == use) == len(left[use])


def test_unpaired_rows_that_contradict_each_other_are_dropped(tmp_path):
    records = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 2 == 0} for i in range(20)]
    records += [{"prompt": "q3", "completion": "a3", "label": True}, {"prompt": "q5", "completion": "a5", "label": False}]
    path = write(tmp_path / "d.jsonl", records)
    unpaired = {"path": str(path), "format": "unpaired", "drop": ["contradictory"]}
    found = prepared(config(unpaired), tmp_path)
    assert found.dropped["s0"]["preference rows that another row contradicts (contradictory)"] == 2
    assert failed(tmp_path) == []


def test_a_source_drops_its_rows_that_another_source_contradicts_and_not_the_others(tmp_path):
    one = write(tmp_path / "one.jsonl", [*SOUND, FAULTS["contradictory"][0]])
    two = write(tmp_path / "two.jsonl", [{"prompt": "Two?", "chosen": "c", "rejected": "d"}, FAULTS["contradictory"][1]])
    found = prepared(config({"path": str(one)}, {"path": str(two), "drop": ["contradictory"]}), tmp_path)
    rows = [row for row in read_rows(tmp_path / "out", "preference") if row["messages"][0]["content"] == "Which?"]
    assert [(row["source"], row["chosen"]) for row in rows] == [("s0", "a")]
    assert "preference rows that another row contradicts (contradictory)" in found.dropped["s1"] and failed(tmp_path) == []


def test_of_repeated_pairs_the_first_stays_and_its_demonstrations_and_prompt(tmp_path):
    swapped = {"prompt": "Double 1.", "chosen": "No.", "rejected": "It is 2."}
    path = write(tmp_path / "d.jsonl", [*SOUND, SOUND[3], SOUND[5], SOUND[3], swapped])
    strict = strict_limits(max_contradictory_fraction=1.0)
    prepared(config({"path": str(path)}), tmp_path / "kept")
    (broken,) = failed(tmp_path / "kept", strict)
    assert broken.name == "duplicate_pairs" and broken.unexpected == 5 and "`drop: [duplicate]`" in broken.message()
    found = prepared(config({"path": str(path), "drop": ["duplicate"]}), tmp_path / "dropped")
    assert failed(tmp_path / "dropped", strict) == []
    origins = {row["origin"] for row in pq.read_table(tmp_path / "dropped/out/preference.parquet").to_pylist()}
    assert origins == {f"{path} line {i}" for i in [*range(1, 41), 44]}
    assert [(reason, n) for reason, n in found.dropped["s0"].items() if "(duplicate)" in reason] == [
        ("preference rows that another row repeats (duplicate)", 3)
    ]
    assert len(list(read_rows(tmp_path / "dropped/out", "sft"))) == 44


@pytest.mark.parametrize(("drops", "kept_by"), [((True, False), "s1"), ((False, True), "s0"), ((True, True), "s0")])
def test_a_pair_of_two_sources_stays_where_it_is_not_to_be_dropped(tmp_path, drops, kept_by):
    one = write(tmp_path / "one.jsonl", [*SOUND[:20], SOUND[0]])
    two = write(tmp_path / "two.jsonl", [*SOUND[20:], SOUND[0]])
    files = zip((one, two), drops, strict=True)
    prepared(config(*({"path": str(path), "drop": ["duplicate"] * drop} for path, drop in files)), tmp_path)
    rows = [row for row in read_rows(tmp_path / "out", "preference") if row["messages"][0]["content"] == "Double 0."]
    assert {row["source"] for row in rows} == {kept_by} and len(rows) == (1 if drops[0] else 2)


def test_unpaired_rows_that_are_repeated_are_dropped_and_contradictory_ones_first(tmp_path):
    records = [{"prompt": f"q{i}", "completion": f"a{i}", "label": i % 2 == 0} for i in range(20)]
    records += [records[2], records[3], {**records[3], "label": True}]
    unpaired = {"path": str(write(tmp_path / "d.jsonl", records)), "format": "unpaired", "drop": ["duplicate", "contradictory"]}
    found = prepared(config(unpaired), tmp_path).dropped["s0"]
    assert [found[f"preference rows that another row {kind}"] for kind in ("repeats (duplicate)", "contradicts (contradictory)")] == [1, 3]
    assert failed(tmp_path, strict_limits()) == []


def test_a_source_that_loses_too_much_ends_it_with_reasons_files_lines_and_texts(tmp_path):
    wrong = {"prompt": [{"role": "user", "content": "Pictured?"}, {"role": "assistant", "content": "x"}], "chosen": "a", "rejected": "b"}
    path = write(tmp_path / "d.jsonl", [*SOUND[:30], *[wrong] * 8, *FAULTS["identical"] * 2])
    of = config({"path": str(path), "drop": ["identical"]})
    with pytest.raises(ValueError) as refused:
        prepared(of, tmp_path, limit=0.2)
    message = str(refused.value)
    assert "source s0: expected at most 20.00% of the preference data to be dropped, got 25.00% (8 of 40 records, 2 of 32 rows)" in message
    assert "raise validation.max_dropped_fraction" in message
    assert "\n  8 the prompt doesn't end with" in message and f"\n    {path} line 31: " in message and "Pictured?" in message
    assert "line 34" not in message  # of a reason the first three
    assert f"\n  2 preference rows whose chosen and rejected are the same text (identical)\n    {path} line 39: 'Same?'" in message
    assert prepared(of, tmp_path / "allowed", limit=0.25).tallies["s0"].share("preference") == 0.25


def test_what_is_dropped_late_counts_with_what_was_dropped_on_reading(tmp_path):
    path = write(tmp_path / "d.jsonl", [*SOUND[:6], *FAULTS["identical"] * 2, *FAULTS["contradictory"]])
    of = config({"path": str(path), "drop": ["identical", "contradictory"]})
    assert prepared(of, tmp_path).tallies["s0"].share("preference") == pytest.approx(0.4)
    with pytest.raises(ValueError, match=r"at most 30.00% of the preference data .* got 40.00%"):
        prepared(of, tmp_path / "again", limit=0.3)


def test_every_row_keeps_the_place_of_its_record_through_weights_splits_and_drops(tmp_path):
    write(tmp_path / "mine/b.jsonl", SOUND[:20])
    write(tmp_path / "mine/a.jsonl", [*SOUND[20:], *FAULTS["identical"], *FAULTS["contradictory"]])
    light = write(tmp_path / "light.jsonl", [{"prompt": f"Light {i}.", "chosen": "a", "rejected": "b"} for i in range(30)])
    drop = ["identical", "contradictory", "too_long"]
    of = config({"path": str(tmp_path / "mine"), "drop": drop}, {"path": str(light), "weight": 0.5, "drop": drop})
    prepared(of, tmp_path)
    checked = 0
    for use in USES:
        for row in pq.read_table(tmp_path / "out" / f"{use}.parquet").to_pylist():
            file, line = row["origin"].rsplit(" line ", 1)
            record = json.loads(Path(file).read_text().splitlines()[int(line) - 1])
            assert row["messages"][0]["content"] == record["prompt"]
            checked += 1
    assert checked == 3 * (40 + 15) + 3 + 2  # of identical and contradictory pairs the demonstrations stay, and their two prompts


def test_an_origin_is_the_path_of_params_and_not_where_a_worktree_found_it(tmp_path, monkeypatch):
    write(tmp_path / "main/mine/d.jsonl", SOUND)
    worktree = tmp_path / "main/runs/one"
    worktree.mkdir(parents=True)
    (worktree / ".git").write_text(f"gitdir: {tmp_path}/main/.git/worktrees/one\n")
    monkeypatch.chdir(worktree)
    prepared(config({"path": "mine"}), tmp_path)
    rows = pq.read_table(tmp_path / "out/sft.parquet").to_pylist()
    assert [row["origin"] for row in rows] == [f"mine/d.jsonl line {i}" for i in range(1, 41)]


def test_rows_of_a_data_set_have_its_name_and_row_and_the_clerks_have_no_origin(tmp_path, monkeypatch):
    from datasets import Dataset

    monkeypatch.chdir(tmp_path)
    Dataset.from_list(SOUND).save_to_disk("saved")
    clerk = {"pretrain_lines": 5, "demonstrations": 5, "prompts": 5, "responses_per_prompt": 2, "label_noise": 0.0, "garbled_fraction": 0.0}
    made = {"name": "clerk", "kind": "clerk", "uses": ["sft"], "weight": 1.0, "clerk": clerk | {"polite_errors_only": False}}
    hub = config({"path": "saved", "kind": "huggingface", "weight": 1.0}).model_dump(mode="json", exclude_unset=True)
    hub["sources"].append(made)
    prepared(DataConfig.model_validate(hub), tmp_path)
    rows = pq.read_table(tmp_path / "out/sft.parquet").to_pylist()
    assert {row["origin"] for row in rows if row["source"] == "clerk"} == {None}
    assert [row["origin"] for row in rows if row["source"] == "s0"] == [f"saved row {i}" for i in range(1, 41)]


def test_the_account_of_a_source_has_records_uses_splits_and_reasons(tmp_path):
    path = write(tmp_path / "d.jsonl", [*SOUND, *FAULTS["identical"], *FAULTS["too_long"], {"prompt": [], "chosen": "a", "rejected": "b"}])
    of = config({"path": str(path), "drop": ["identical", "too_long"]})
    found = prepared(of, tmp_path)
    about = Prepared(of, found, tokenizer(), {})
    line = next(about.accounts())
    train = found.counts["s0", "preference", "train"]
    assert line.startswith("s0: read 43 records: kept sft 41 (") and f"preference 40 ({train} train, " in line
    assert "; dropped: " in line and "1 preference rows longer than model.max_length (too_long)" in line
    assert "1 a conversation without messages" in line
    metrics = about.metrics()
    assert metrics["records"] == {"s0": 43}
    assert metrics["dropped_fraction"]["s0"]["preference"] == pytest.approx(3 / 43)
    assert sum(metrics["dropped"]["s0"].values()) == 4  # sft row, pair, pair, record


def test_a_use_that_has_lost_all_its_rows_is_none_of_the_prepared(tmp_path):
    whole = {"prompt": "Long?", "chosen": "8" * 90, "rejected": "no"}
    of = config({"path": str(write(tmp_path / "a.jsonl", [whole])), "uses": ["preference", "prompt"], "drop": ["too_long"]})
    found = prepared(of, tmp_path)
    assert found.uses == ["prompt"] and [p.name for p in (tmp_path / "out").iterdir()] == ["prompt.parquet"]
    assert set(Prepared(of, found, tokenizer(), {"prompt": {}}).metrics()["rows"]) == {"prompt"}


@pytest.mark.parametrize("kind", ["contradictory", "duplicate"])
def test_white_space_at_edges_hides_neither_repetitions_nor_contradictions(tmp_path, kind):
    sides = {"chosen": "b ", "rejected": "\na"} if kind == "contradictory" else {"chosen": " a", "rejected": "b\n"}
    path = write(tmp_path / "d.jsonl", [*SOUND, {"prompt": "Which?", "chosen": "a", "rejected": "b"}, {"prompt": "Which?\n", **sides}])
    prepared(config({"path": str(path)}), tmp_path / "kept")
    found = {f.name: f.unexpected for f in failed(tmp_path / "kept", strict_limits(max_duplicate_fraction=0.0))}
    assert {name: found.get(name, 0) for name in found if "pairs" in name} == {f"{kind}_pairs": 2}
    mixed = prepared(config({"path": str(path), "drop": [kind]}), tmp_path / "dropped")
    assert mixed.dropped["s0"].get(f"preference rows {REASONS[kind]}") == (2 if kind == "contradictory" else 1)


def test_rows_are_dropped_in_turn_and_the_file_is_rewritten_once(tmp_path):
    write_rows(tmp_path, "pretrain", [{"id": str(i), "source": "s", "split": "train", "text": f"text {i}"} for i in range(6)])
    path = tmp_path / "pretrain.parquet"
    rows, before = KeptRows(path), path.read_bytes()

    def kept() -> list[str]:
        return [row_id for batch in rows.batches(["id"]) for row_id in batch["id"].to_pylist()]

    rows.write()
    dropped = rows.drop(np.array([True, False, False, True, False, False]))
    assert [row["id"] for row in dropped] == ["0", "3"] and kept() == ["1", "2", "4", "5"]
    assert [row["text"] for row in rows.drop(np.array([False, True, False, True]))] == ["text 2", "text 5"]
    assert kept() == ["1", "4"] and path.read_bytes() == before
    rows.write()
    assert kept() == ["1", "4"] == [row["id"] for row in read_rows(tmp_path, "pretrain")]
    assert [row["id"] for row in rows.drop(np.array([True, True]))] == ["1", "4"]
    rows.write()
    assert not kept() and not path.exists()
