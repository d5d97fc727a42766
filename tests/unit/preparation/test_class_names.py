"""Classes with names, as the library `datasets` stores them: the names are read, not the numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.look.__main__ import main
from rlhf_core.preparation.sources import load_source
from rlhf_core.preparation.tables import features_of
from tests.tiny_models import DEFAULTS

datasets = pytest.importorskip("datasets")
GOOD, BAD = 0, 1  # as in the names below
MARKS = [GOOD, BAD, GOOD]


def stored(path: Path, names: list[str], labels: list[int]) -> Path:
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "completion": datasets.Value("string"), "label": datasets.ClassLabel(names=names)}
    )
    records = [{"prompt": f"q{i}", "completion": f"a{i}", "label": label} for i, label in enumerate(labels)]
    data = datasets.Dataset.from_list(records, features=features)
    data.to_parquet(path) if path.suffix else data.save_to_disk(path)
    return path


def sides(path: Path) -> list[tuple[str | None, str | None]]:
    kind = "file" if path.suffix else "huggingface"
    about = {"name": "mine", "kind": kind, "path": str(path), "format": "unpaired", "uses": ["preference"], "weight": 1.0}
    rows = load_source(SourceConfig.model_validate(about), seed=0).rows["preference"]
    return [(row["chosen"], row["rejected"]) for row in rows]


@pytest.mark.parametrize("name", ["marks.parquet", "marks"])
def test_the_names_say_which_responses_are_good(name, tmp_path):
    path = stored(tmp_path / name, ["good", "bad"], MARKS)
    assert sides(path) == [("a0", None), (None, "a1"), ("a2", None)]


def test_names_that_say_nothing_are_refused_and_a_missing_class_is_dropped(tmp_path):
    with pytest.raises(ValueError, match="column 'label': expected true or false, got 'x'"):
        sides(stored(tmp_path / "x.parquet", ["x", "z"], MARKS))
    assert sides(stored(tmp_path / "y.parquet", ["bad", "good"], [1, -1])) == [("a0", None)]


def test_the_look_counts_150_good_and_150_bad_responses(tmp_path, capsys):
    path = stored(tmp_path / "marks.parquet", ["good", "bad"], [GOOD] * 150 + [BAD] * 150)
    assert main([str(path), "--json", "--params", str(DEFAULTS)]) == 0
    (reading,) = json.loads(capsys.readouterr().out)["readings"]
    assert reading["format"] == "unpaired" and reading["counts"]["sft"]["rows"] == 150


def test_a_number_without_a_name_is_named_with_its_row(tmp_path):
    path = stored(tmp_path / "marks.parquet", ["good", "bad"], MARKS)
    table = pq.read_table(path)
    wrong = table.set_column(2, table.schema.field(2), pa.array([0, 7, 0], pa.int64())).replace_schema_metadata(table.schema.metadata)
    pq.write_table(wrong, path)
    with pytest.raises(ValueError, match=r"marks\.parquet row 2: column 'label': expected the number of one of 2 classes, got 7"):
        sides(path)


def test_classes_inside_of_lists_and_objects_have_their_names(tmp_path):
    mark = datasets.ClassLabel(names=["wrong", "right"])
    features = datasets.Features({"one": {"mark": mark}, "many": datasets.List(mark), "list": datasets.List({"mark": mark})})
    data = datasets.Dataset.from_list([{"one": {"mark": 1}, "many": [0, 1], "list": [{"mark": 0}]}], features=features)
    data.to_parquet(tmp_path / "nested.parquet")
    from rlhf_core.preparation.sources import records_of

    about = {"name": "x", "kind": "file", "path": str(tmp_path / "nested.parquet"), "format": "text", "uses": ["pretrain"]}
    (record,) = records_of(SourceConfig.model_validate(about))
    assert record.values == {"one": {"mark": "right"}, "many": ["wrong", "right"], "list": [{"mark": "wrong"}]}


@pytest.mark.parametrize("metadata", [b"", b"no JSON", b"[]", b'{"info": {"features": [1]}}', b"[" * 10**5, b'{"info": null}'])
def test_other_metadata_name_nothing(metadata):
    assert features_of(pa.schema([("label", pa.int64())], metadata={"huggingface": metadata})) == {}
