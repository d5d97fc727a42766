"""Tables make one struct of all objects in a column: what that adds to the arguments of a tool call isn't anybody's."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlhf_core.config import SourceConfig
from rlhf_core.preparation.sources import load_source

ARGUMENTS = [{"city": "Rome"}, {"amount": 2, "in": [{"unit": "EUR"}, {"day": 1}]}]


def record(arguments: dict) -> dict:
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": f"q {sorted(arguments)}"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "20"},
            {"role": "assistant", "content": "It is 20."},
        ]
    }


def arguments_read(path: Path, kind: str = "file") -> list[dict]:
    about = {"name": "mine", "kind": kind, "path": str(path), "format": "messages", "uses": ["sft"], "weight": 1.0}
    rows = load_source(SourceConfig.model_validate(about), seed=0).rows["sft"]
    return [json.loads(row["messages"][1]["extra"])["tool_calls"][0]["function"]["arguments"] for row in rows]


def test_parquet_and_json_give_the_same_arguments(tmp_path):
    records = [record(arguments) for arguments in ARGUMENTS]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "d.parquet")
    assert arguments_read(tmp_path / "d.parquet") == arguments_read(tmp_path / "d.jsonl") == ARGUMENTS


def test_a_saved_data_set_gives_the_same_arguments(tmp_path):
    datasets = pytest.importorskip("datasets")
    table = pa.Table.from_pylist([record(arguments) for arguments in ARGUMENTS])
    datasets.Dataset(datasets.table.InMemoryTable(table)).save_to_disk(tmp_path / "set")
    assert arguments_read(tmp_path / "set", "huggingface") == ARGUMENTS


def test_a_null_that_json_has_is_kept(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps(record({"city": None})))
    assert arguments_read(tmp_path / "d.jsonl") == [{"city": None}]


def test_a_null_of_the_json_type_is_kept(tmp_path):
    """With which `datasets` reads objects of several shapes."""
    datasets = pytest.importorskip("datasets")
    if not hasattr(datasets, "Json"):
        pytest.skip("this version of datasets has no such type")
    messages = record({})["messages"]
    call = {"name": datasets.Value("string"), "arguments": datasets.Json()}
    features = {"role": datasets.Value("string"), "content": datasets.Value("string"), "tool_calls": datasets.List({"function": call})}
    messages[1]["tool_calls"] = [{"function": {"name": "look", "arguments": {"city": None}}}]
    messages = [{"tool_calls": None} | message for message in messages]
    data = datasets.Dataset.from_dict({"messages": [messages]}, features=datasets.Features({"messages": datasets.List(features)}))
    data.save_to_disk(tmp_path / "set")
    assert arguments_read(tmp_path / "set", "huggingface") == [{"city": None}]
